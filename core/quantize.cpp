#include "core/quantize.h"

#include <algorithm>
#include <cmath>

#include "core/half.h"

namespace strata_pa {
namespace {

template <class T, class Convert>
int64_t quantize(const T* x, Convert to_float, int64_t dims, int64_t group, int8_t* codes, uint16_t* scales) {
  for (int64_t begin = 0; begin < dims; begin += group) {
    float largest = 0;
    for (int64_t d = begin; d < begin + group; ++d) {
      float a = std::fabs(to_float(x[d]));
      if (!(a / 127.0f < kHalfOverflow)) return d;  // NaN too
      largest = std::max(largest, a);
    }
    uint16_t half = float_to_half(largest / 127.0f);
    float scale = half_to_float(half);
    for (int64_t d = begin; d < begin + group; ++d) {
      float code = scale == 0 ? 0 : std::nearbyint(to_float(x[d]) / scale);
      codes[d] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, code)));
    }
    *scales++ = half;
  }
  return -1;
}

}  // namespace

int64_t quantize_cell(const void* x, DType dtype, int64_t dims, int64_t group, int8_t* codes, uint16_t* scales) {
  switch (dtype) {
    case DType::kFloat32:
      return quantize(static_cast<const float*>(x), [](float f) { return f; }, dims, group, codes, scales);
    case DType::kFloat16:
      return quantize(static_cast<const uint16_t*>(x), half_to_float, dims, group, codes, scales);
    default:
      return quantize(static_cast<const uint16_t*>(x), bfloat16_to_float, dims, group, codes, scales);
  }
}

}  // namespace strata_pa
