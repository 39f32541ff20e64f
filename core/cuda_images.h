// The embedded CUDA images: what each holds, and which part of it a card runs.
#pragma once
#include <string>
#include <vector>

namespace strata_pa::cuda {

// One file of cuda/. Architectures are 10 * major + minor, ascending.
struct Image {
  const char* name;  // "v2_sm80"
  const unsigned char* begin;
  const unsigned char* end;
  std::vector<int> cubins, ptx;
  bool only = false;  // "..._sm90a": instructions of that architecture alone, no other card runs its cubin
};
struct BuiltImages {
  const char* compiler;  // nvcc's version; "": a build without CUDA
  int driver_major;      // the least CUDA version that the driver must support
  std::vector<Image> images;
};
const BuiltImages& built_images();
const Image* find_image(const std::string& name);  // null: not in this build

enum class Vendor { kNvidia, kAMD };

// What a card runs of an image. The driver, which gets the whole image, follows the same order.
struct Choice {
  enum Kind { kNone, kCubin, kPtx } kind = kNone;
  int arch = 0;
};
// The card's own cubin; else the newest cubin of the same major version below it (binary compatibility); else the newest PTX below it.
Choice choose(Vendor vendor, int sm, const Image& image);

std::string describe(const Image& image);  // "cubins sm_80, sm_90, PTX compute_80"
std::vector<std::string> built_archs();    // over all images: "sm_75", ..., "compute_75", ...

// "": some image has code for the card. Else a sentence that names the card and the built list.
std::string refusal(Vendor vendor, int sm, const std::string& card);

}  // namespace strata_pa::cuda
