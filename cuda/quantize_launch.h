// What a host needs to launch strata_quantize (quantize_sm75.cu), without a CUDA header: keys or values to codes and scales, the bytes of
// core/quantize.h. One warp per group of one row; rows are all of x's dimensions but the last.
#pragma once
#include <cstdint>

namespace strata_pa {
namespace cuda {

constexpr int kQuantizeDims = 5;  // of x, without the last one
constexpr uint32_t kQuantizeThreads = 128, kQuantizeGroups = kQuantizeThreads / 32;  // of a block

struct QuantizeParams {
  const void* x;
  int8_t* codes;
  uint16_t* scales;
  const int64_t* slots;  // [n], or null: codes and scales are C-contiguous, in x's shape

  int64_t shape[kQuantizeDims], stride[kQuantizeDims];  // of x, the last ones; unused leading ones: 1, 0
  int64_t rows;
  // With slots x is [n, heads, head_dim]: row (i, head) goes to slot slots[i] % page_size of page slots[i] / page_size. A slot outside the
  // pool is left out.
  int64_t pages, page_size;
  struct Pool {
    int64_t page, head, slot;
  } code_stride, scale_stride;
  int32_t dims, group;
  int32_t dtype;  // 0 FP32, 1 binary16, 2 bfloat16
};

inline int64_t quantize_grid(const QuantizeParams& p) {
  return (p.rows * (p.dims / p.group) + kQuantizeGroups - 1) / kQuantizeGroups;
}

}  // namespace cuda
}  // namespace strata_pa
