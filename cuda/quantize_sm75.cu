// Keys or values to int8 codes and binary16 scales, into arrays or into the slots of a paged cache: the bytes of core/quantize.cpp.
//
// Nothing can be refused from here: a group with a value that is not finite, or too large for a binary16 scale, gets the scale NaN and
// codes 0, so that every row that sees the cell is NaN (docs/numerics.md, 1.4).
#include "ops.cuh"
#include "quantize_launch.h"

namespace strata_pa {
namespace cuda {
namespace {

constexpr uint16_t kHalfNaN = 0x7e00;
constexpr float kHalfOverflow = 65520.0f;  // core/half.h

__device__ float load(const QuantizeParams& p, int64_t i) {
  if (p.dtype == 0) return static_cast<const float*>(p.x)[i];
  const uint16_t h = static_cast<const uint16_t*>(p.x)[i];
  return p.dtype == 1 ? half_to_float(h) : __uint_as_float(static_cast<uint32_t>(h) << 16);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kQuantizeThreads) strata_quantize(const QuantizeParams p) {
  const int lane = threadIdx.x & 31, groups = p.dims / p.group;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kQuantizeGroups + (threadIdx.x >> 5);
  if (item >= p.rows * groups) return;  // a whole warp
  const int64_t row = item / groups;
  const int first = static_cast<int>(item - row * groups) * p.group;

  int64_t at = first, rest = row, cell = 0, head = 0;
#pragma unroll
  for (int d = kQuantizeDims - 1; d >= 0; --d) {
    const int64_t up = rest / p.shape[d], index = rest - up * p.shape[d];
    at += index * p.stride[d];
    if (d == kQuantizeDims - 1) head = index;
    if (d == kQuantizeDims - 2) cell = index;
    rest = up;
  }
  int64_t code_at = row * p.dims, scale_at = row * groups;
  if (p.slots) {
    const int64_t place = p.slots[cell];
    if (place < 0 || place >= p.pages * p.page_size) return;
    const int64_t page = place / p.page_size, slot = place - page * p.page_size;
    code_at = page * p.code_stride.page + head * p.code_stride.head + slot * p.code_stride.slot;
    scale_at = page * p.scale_stride.page + head * p.scale_stride.head + slot * p.scale_stride.slot;
  }

  float largest = 0;
  bool bad = false;
  for (int d = lane; d < p.group; d += 32) {
    const float a = fabsf(load(p, at + d));
    bad |= !(__fdiv_rn(a, 127.0f) < kHalfOverflow);  // NaN too
    largest = fmaxf(largest, a);
  }
  bad = __any_sync(~0u, bad);
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const uint16_t half = float_to_half(__fdiv_rn(largest, 127.0f));
  const float scale = bad ? 0.0f : half_to_float(half);
  for (int d = lane; d < p.group; d += 32) {
    const float code = scale == 0 ? 0.0f : rintf(__fdiv_rn(load(p, at + d), scale));
    p.codes[code_at + first + d] = static_cast<int8_t>(fminf(127.0f, fmaxf(-127.0f, code)));
  }
  if (lane == 0) p.scales[scale_at + first / p.group] = bad ? kHalfNaN : half;
}

}  // namespace cuda
}  // namespace strata_pa
