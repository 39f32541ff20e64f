#include "core/cuda_images.h"

#include <algorithm>
#include <set>

#include "core/errors.h"

namespace strata_pa::cuda {
namespace {

int major(int arch) { return arch / 10; }

std::vector<std::string> with_prefix(const char* prefix, const std::vector<int>& archs) {
  std::vector<std::string> names;
  for (int arch : archs) names.push_back(text(prefix, arch));
  return names;
}

}  // namespace

#ifndef STRATA_PA_CUDA_IMAGES
const BuiltImages& built_images() {
  static const BuiltImages none = {"", 0, {}};
  return none;
}
#endif

const Image* find_image(const std::string& name) {
  for (const Image& image : built_images().images)
    if (image.name == name) return &image;
  return nullptr;
}

Choice choose(Vendor vendor, int sm, const Image& image) {
  Choice best;
  if (vendor != Vendor::kNvidia) return best;
  for (int arch : image.ptx)
    if (arch <= sm) best = {Choice::kPtx, arch};
  for (int arch : image.cubins)
    if (arch == sm || (!image.only && arch < sm && major(arch) == major(sm))) best = {Choice::kCubin, arch};
  return best;
}

std::string describe(const Image& image) {
  return text("cubins ", join(with_prefix("sm_", image.cubins)), ", PTX ", join(with_prefix("compute_", image.ptx)));
}

std::vector<std::string> built_archs() {
  std::set<int> cubins, ptx;
  for (const Image& image : built_images().images) {
    cubins.insert(image.cubins.begin(), image.cubins.end());
    ptx.insert(image.ptx.begin(), image.ptx.end());
  }
  std::vector<std::string> names = with_prefix("sm_", {cubins.begin(), cubins.end()});
  for (const std::string& name : with_prefix("compute_", {ptx.begin(), ptx.end()})) names.push_back(name);
  return names;
}

std::string refusal(Vendor vendor, int sm, const std::string& card) {
  if (built_images().images.empty()) return text(card, ": this build is without CUDA (STRATA_PA_CUDA=OFF)");
  for (const Image& image : built_images().images)
    if (choose(vendor, sm, image).kind != Choice::kNone) return "";
  return text(card, " is not served: ", vendor == Vendor::kNvidia ? "" : "its vendor is not NVIDIA, and ", "the CUDA kernels of this build are for ",
              join(built_archs()));
}

}  // namespace strata_pa::cuda
