// The embedded AMD code objects: which kernels there are for which architecture.
#pragma once
#include <string>
#include <vector>

namespace strata_pa::hip {

struct CodeObject {
  const char* arch;  // "gfx942"
  const unsigned char* begin;
  const unsigned char* end;
};
// One file of hip/.
struct Image {
  const char* name;  // "exact"
  std::vector<CodeObject> objects;
};
struct BuiltImages {
  const char* compiler;  // "clang version 22.1.6"; "": a build without HIP
  std::vector<Image> images;
};
const BuiltImages& built_images();
const Image* find_image(const std::string& name);  // null: not in this build

// The code object of exactly that architecture, or null.
const CodeObject* choose(const std::string& arch, const Image& image);

std::string describe(const Image& image);  // "code objects for gfx90a, gfx942"
std::vector<std::string> built_archs();    // over all images

// "": some image has code for the card. Else a sentence that names the card and the built list.
std::string refusal(const std::string& arch, const std::string& card);

}  // namespace strata_pa::hip
