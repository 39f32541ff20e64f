// Partial results (docs/numerics.md, sections 5 and 6): the bytes of cpu::merge_partials, cpu::exact_finish and core/partial.cpp.
#include "../core/exact_keys.h"
#include "common.cuh"
#include "partial_launch.h"

namespace strata_pa {
namespace cuda {
namespace {

constexpr int kDims = 4;  // of a lane at once; with 8, sm_100 and newer spill

__device__ int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * kPartialThreads + threadIdx.x; }

template <int dtype>
__device__ float load(const void* x, int64_t i) {
  if constexpr (dtype == 0) return static_cast<const float*>(x)[i];
  const uint16_t h = static_cast<const uint16_t*>(x)[i];
  return dtype == 1 ? half_to_float(h) : __uint_as_float(static_cast<uint32_t>(h) << 16);
}

template <int dtype>
__device__ void store(void* out, int64_t i, float x) {
  if constexpr (dtype == 0) static_cast<float*>(out)[i] = x;
  else static_cast<uint16_t*>(out)[i] = to_16_bits<dtype>(x);
}

// What a row without cells, or a bad one, holds.
enum class Row { kFinite, kEmpty, kBad };
__device__ float instead(Row row) { return row == Row::kEmpty ? 0.0f : __int_as_float(kNaNBits); }

template <int dtype>
__device__ void merge_row(const PartialParams& p, int64_t row, int lane) {
  float top = kMinusInf, sum = 0.0f;
  bool bad = false;
  for (int i = 0; i < p.parts; ++i) {
    const float lse = p.lses[i][row];
    bad |= !(lse < __int_as_float(0x7f800000));
    top = fmaxf(top, lse);
  }
  const Row kind = bad ? Row::kBad : top == kMinusInf ? Row::kEmpty : Row::kFinite;
  if (kind == Row::kFinite)
    for (int i = 0; i < p.parts; ++i) sum = __fadd_rn(sum, A::merge_weight(p.lses[i][row], top));
  for (int base = lane; base < p.dim; base += 32 * kDims) {
    float x[kDims];
#pragma unroll
    for (int k = 0; k < kDims; ++k) x[k] = 0.0f;
    for (int i = 0; kind == Row::kFinite && i < p.parts; ++i) {
      const float w = A::merge_weight(p.lses[i][row], top);
      if (w == 0.0f) continue;
#pragma unroll
      for (int k = 0; k < kDims; ++k)
        if (base + 32 * k < p.dim) x[k] = __fmaf_rn(w, load<dtype>(p.outs[i], row * p.dim + base + 32 * k), x[k]);
    }
    // All parts' numbers of these places are read: out may be one of them.
#pragma unroll
    for (int k = 0; k < kDims; ++k)
      if (base + 32 * k < p.dim)
        store<dtype>(p.out, row * p.dim + base + 32 * k, kind == Row::kFinite ? __fadd_rn(__fdiv_rn(x[k], sum), 0.0f) : instead(kind));
  }
  if (lane == 0) p.lse[row] = kind == Row::kFinite ? A::merged_lse(top, sum) : kind == Row::kEmpty ? kMinusInf : instead(kind);
}

template <int dtype>
__device__ void finish_row(const PartialParams& p, int64_t row, int lane) {
  const float anchor = p.A[row], total = __ll2float_rn(p.L[row]), unit = shift(1.0f, p.b[row]);
  const Row kind = anchor != anchor ? Row::kBad : anchor == kMinusInf ? Row::kEmpty : Row::kFinite;
  for (int d = lane; d < p.dim; d += 32) {
    const float x = __fadd_rn(__fmul_rn(__fdiv_rn(__ll2float_rn(p.O[row * p.dim + d]), total), unit), 0.0f);
    store<dtype>(p.out, row * p.dim + d, kind == Row::kFinite ? x : instead(kind));
  }
  if (lane == 0) p.lse[row] = kind == Row::kFinite ? A::lse(anchor, __fmul_rn(total, 0x1p-30f)) : kind == Row::kEmpty ? kMinusInf : instead(kind);
}

}  // namespace

#define STRATA_PA_PARTIAL(name) extern "C" __global__ void __launch_bounds__(kPartialThreads) name(const __grid_constant__ PartialParams p)

STRATA_PA_PARTIAL(strata_partial_merge) {
  const int64_t row = global_thread() >> 5;
  const int lane = threadIdx.x & 31;
  if (row >= p.rows) return;
  if (p.dtype == 0) merge_row<0>(p, row, lane);
  else if (p.dtype == 1) merge_row<1>(p, row, lane);
  else merge_row<2>(p, row, lane);
}

STRATA_PA_PARTIAL(strata_partial_finish) {
  const int64_t row = global_thread() >> 5;
  const int lane = threadIdx.x & 31;
  if (row >= p.rows) return;
  if (p.dtype == 0) finish_row<0>(p, row, lane);
  else if (p.dtype == 1) finish_row<1>(p, row, lane);
  else finish_row<2>(p, row, lane);
}

STRATA_PA_PARTIAL(strata_partial_anchors) {
  const int64_t i = global_thread();
  if (i >= p.rows) return;
  const float a = p.A[i], c = p.A2[i];
  if (a != a || c != c) {
    p.A[i] = __int_as_float(kNaNBits), p.b[i] = kBFloor;
    return;
  }
  const float top = fmaxf(a, c);
  float base = kBFloor;
  if (a != kMinusInf) base = fmaxf(base, __fadd_rn(p.b[i], __fsub_rn(a, top)));
  if (c != kMinusInf) base = fmaxf(base, __fadd_rn(p.b2[i], __fsub_rn(c, top)));
  p.A[i] = top, p.b[i] = base;
}

STRATA_PA_PARTIAL(strata_partial_sums) {
  const int64_t i = global_thread();
  if (i < p.rows * p.dim) p.O[i] += p.L[i];
}

STRATA_PA_PARTIAL(strata_partial_to_keys) {
  const int64_t i = global_thread();
  if (i >= p.rows) return;
  const AnchorKeys keys = to_keys(p.A[i], p.b[i]);
  p.L[i] = keys.A, p.L[p.rows + i] = keys.B;
}

STRATA_PA_PARTIAL(strata_partial_from_keys) {
  const int64_t i = global_thread();
  if (i < p.rows) from_keys({p.L[i], p.L[p.rows + i]}, p.A[i], p.b[i]);
}

}  // namespace cuda
}  // namespace strata_pa
