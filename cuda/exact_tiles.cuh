// What exact's two tiled forms have in common: exact_tile.cuh for sm_90, exact_tile_sm80.cuh for every card from sm_80.
#pragma once
#include "exact_plain.cuh"

namespace strata_pa {
namespace cuda {

// Of what a word of a score holds; the rest is another kernel's.
constexpr float kLowestScore = -250.0f;
constexpr int kLowestAnchor = -100, kHighestAnchor = 140;
constexpr float kLargestFactor = 0x1p60f;  // no score overflows below it
// A score plus this is rounded as by rint (so it is even), and its low bits hold n - 128. As integers such sums have the order of the n: those of kZeroBits + n.
constexpr float kScoreMagic = kMagic - 128.0f;
constexpr int kZeroBits = kMagicBits - 128;
// A cell that has a scale that is not finite, or not served, has a level that cannot be, with every score that a word holds more than half of it.
constexpr int kBadLevel = 1000, kLeastLevel = -1000;

// The block meets. Is an item left to the last kernel? Its other blocks may say so meanwhile, so one thread asks for the whole block.
__device__ __forceinline__ bool meet_and_ask(const int32_t* flags, int item) {
  return __syncthreads_or(thread_now() == 0 && *static_cast<const volatile int32_t*>(flags + item) != 0);
}
__device__ __forceinline__ void leave(int32_t* flags, int item) { *static_cast<volatile int32_t*>(flags + item) = 1; }

// A value of the output, of O, L and 2^b.
__device__ __forceinline__ float quotient(int64_t o, float total, float unit) {
  return total > 0.0f ? __fadd_rn(__fmul_rn(divide_ordinary(__ll2float_rn(o), total), unit), 0.0f) : 0.0f;
}

// Eight dims of q from `at`.
template <int dtype>
__device__ __forceinline__ void load_q8(const Params& p, int64_t at, float (&x)[8]) {
  load_q4<dtype>(p, at, x);
  load_q4<dtype>(p, at + 4, x + 4);
}

// The greatest of their group, whose dims `lanes` neighbouring lanes have. finite: are these eight?
template <int lanes>
__device__ __forceinline__ float group_top(const float (&x)[8], bool& finite) {
  float top = 0.0f;
  finite = true;
#pragma unroll
  for (int u = 0; u < 8; ++u) top = fmaxf(top, fabsf(x[u])), finite &= is_finite(x[u]);
#pragma unroll
  for (int o = 1; o < lanes; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  return top;
}

// Their digits h, l and m, added to `digit`, which is 0.
__device__ __forceinline__ void digits_of(const float (&x)[8], float scale, uint32_t (&digit)[3][2]) {
#pragma unroll
  for (int u = 0; u < 8; ++u) {
    const int low = A::fixed(x[u], scale), middle = low + (kBiasExact & 255), high = low + kBiasExact;
    digit[0][u >> 2] |= (high >> 16 & 255u) << 8 * (u & 3);
    digit[1][u >> 2] |= (middle >> 8 & 255u) << 8 * (u & 3);
    digit[2][u >> 2] |= (low & 255u) << 8 * (u & 3);
  }
}

}  // namespace cuda
}  // namespace strata_pa
