#include "core/hip_images.h"

#include <algorithm>

#include "core/errors.h"

namespace strata_pa::hip {
namespace {

std::vector<std::string> archs_of(const Image& image) {
  std::vector<std::string> archs;
  for (const CodeObject& object : image.objects) archs.push_back(object.arch);
  return archs;
}

}  // namespace

#ifndef STRATA_PA_HIP_IMAGES
const BuiltImages& built_images() {
  static const BuiltImages none = {"", {}};
  return none;
}
#endif

const Image* find_image(const std::string& name) {
  for (const Image& image : built_images().images)
    if (image.name == name) return &image;
  return nullptr;
}

const CodeObject* choose(const std::string& arch, const Image& image) {
  for (const CodeObject& object : image.objects)
    if (object.arch == arch) return &object;
  return nullptr;
}

std::string describe(const Image& image) { return text("code objects for ", join(archs_of(image))); }

std::vector<std::string> built_archs() {
  return built_images().images.empty() ? std::vector<std::string>{} : archs_of(built_images().images[0]);
}

std::string refusal(const std::string& arch, const std::string& card) {
  if (built_images().images.empty()) return text(card, ": this build is without HIP (STRATA_PA_HIP=OFF)");
  for (const Image& image : built_images().images)
    if (choose(arch, image)) return "";
  return text(card, " is not served: the HIP kernels of this build are for ", join(built_archs()));
}

}  // namespace strata_pa::hip
