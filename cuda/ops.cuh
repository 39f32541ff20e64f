// The operations vocabulary of core/arith.h for one GPU thread, and the forms of its steps that a GPU does in fewer instructions.
#pragma once
#include <cstdint>

#ifdef STRATA_PA_WAVE  // AMD
#include "../hip/gpu.h"
#else
#include "ptx.cuh"
#endif

#include "../core/arith.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define STRATA_PA_SM80 1
#endif

namespace strata_pa {
namespace cuda {

constexpr float kMinusInf = -__builtin_huge_valf();
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: an FP32 sum with it is rounded to an integer, which its low bits then hold
constexpr int kMagicBits = 0x4B400000;

struct GpuOps {
  using F = float;
  using I = int;
  static __device__ __forceinline__ F set(float x) { return x; }
  static __device__ __forceinline__ I iset(int x) { return x; }
  static __device__ __forceinline__ F fma(F a, F b, F c) { return __fmaf_rn(a, b, c); }
  static __device__ __forceinline__ F add(F a, F b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ F sub(F a, F b) { return __fsub_rn(a, b); }
  static __device__ __forceinline__ F mul(F a, F b) { return __fmul_rn(a, b); }
  // What arith.h divides: 0 or 2^-25 .. 128 by 2^-100 .. 2^128 (for less than that the caller has another answer).
  static __device__ __forceinline__ F div(F a, F b) {
    const float unit = b > 0x1p64f ? 0x1p-64f : 1.0f;
    return __fmul_rn(divide_ordinary(a, __fmul_rn(b, unit)), unit);
  }
  static __device__ __forceinline__ F rint(F a) { return rintf(a); }
  static __device__ __forceinline__ F to_float(I a) { return __int2float_rn(a); }
  static __device__ __forceinline__ I to_int(F a) { return __float2int_rn(a); }
  static __device__ __forceinline__ I as_int(F a) { return __float_as_int(a); }
  static __device__ __forceinline__ F as_float(I a) { return __int_as_float(a); }
  static __device__ __forceinline__ I iadd(I a, I b) { return a + b; }
  static __device__ __forceinline__ I isub(I a, I b) { return a - b; }
  template <int k>
  static __device__ __forceinline__ I shl(I a) { return static_cast<I>(static_cast<uint32_t>(a) << k); }
  template <int k>
  static __device__ __forceinline__ I sar(I a) { return a >> k; }
  static __device__ __forceinline__ F max(F a, F b) { return fmaxf(a, b); }
  static __device__ __forceinline__ F zero_below(F x, F d, float limit) { return d < limit ? 0.0f : x; }
};
using A = Arith<GpuOps>;

// p with n (an integer plus kMagic) added to its exponent.
__device__ __forceinline__ float add_exponent(float p, float n) {
  return __int_as_float(static_cast<int>(static_cast<uint32_t>(__float_as_int(p)) + (static_cast<uint32_t>(__float_as_int(n)) << 23)));
}

// Arith::shift; also +0 where d is NaN (the difference of two infinite anchors, which nobody looks at).
__device__ __forceinline__ float shift(float p, float d) {
  float r = add_exponent(p, __fadd_rn(d, kMagic));
  return d >= -125.0f ? r : 0.0f;
}

// Arith::exp2. Where y + kMagic is not exact, n is far below -125.
__device__ __forceinline__ float exp2_portable(float y) {
  float t = __fadd_rn(y, kMagic), n = __fsub_rn(t, kMagic);
  float r = add_exponent(A::poly(__fsub_rn(y, n)), t);
  return n >= -125.0f ? r : 0.0f;
}

// The FP32 value of a sum that an accumulator started at kMagicBits holds; exact while the sum is below 2^22.
__device__ __forceinline__ float from_magic(int bits) { return __fsub_rn(__int_as_float(bits), kMagic); }

// Arith::join of digit sums that were started at kMagicBits: h + (256 l + m) * 2^-16. 256 l + m is rounded once, as float(r) is.
__device__ __forceinline__ float join_magic(int h, int l, int m) {
  float r = __fmaf_rn(from_magic(l), 256.0f, from_magic(m));
  return __fmaf_rn(r, 0x1p-16f, from_magic(h));
}

__device__ __forceinline__ bool half_is_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 0x1.fffffep+127f; }

// The same with the sum of r as an integer: one conversion on a slow unit in place of two additions and an fma.
__device__ __forceinline__ float join_half_magic(int h, int r) { return __fmaf_rn(__int2float_rn(r), 0x1p-16f, from_magic(h)); }

// lv of docs/numerics.md, section 5: the least integer with top <= 2^lv; -inf where top is 0.
__device__ __forceinline__ float level(float top) {
  return top == 0.0f ? kMinusInf : static_cast<float>(((__float_as_int(top) + 0x7fffff) >> 23) - 127);
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

__device__ __forceinline__ float warp_max(float x) {
#ifdef STRATA_PA_SM80
  int i = __float_as_int(x);  // made monotone as a signed integer
  i = __reduce_max_sync(~0u, i ^ ((i >> 31) & 0x7fffffff));
  return __int_as_float(i ^ ((i >> 31) & 0x7fffffff));
#else
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
#endif
}

}  // namespace cuda
}  // namespace strata_pa
