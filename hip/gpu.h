// AMD's instructions by CUDA's names, as far as the kernels use them, without a header of ROCm. What a processor does itself is in `namespace machine`;
// tests/hip/cpu_machine.h has the same for a CPU, where
// the rest of this file stays as it is.
//
// A warp is 32 lanes everywhere: a wave of 32, or half of a wave of 64 (kWave), whose halves may diverge.
#pragma once
#include <cstdint>

#ifdef __AMDGCN__
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

namespace machine {

constexpr int kWave = STRATA_PA_WAVE;  // ci/matrix.toml; the compiler is told the same
static_assert(kWave == 32 || kWave == 64, "a wave has 32 or 64 lanes");

__device__ __forceinline__ unsigned thread() { return __builtin_amdgcn_workitem_id_x(); }
__device__ __forceinline__ unsigned block() { return __builtin_amdgcn_workgroup_id_x(); }
// One bit for each lane of the wave; those of lanes that are elsewhere are 0.
__device__ __forceinline__ uint64_t ballot(bool x) {
  if constexpr (kWave == 32) return __builtin_amdgcn_ballot_w32(x);
  else return __builtin_amdgcn_ballot_w64(x);
}
// x of another lane of the wave.
__device__ __forceinline__ int permute(int x, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, x); }
// Of LDS alone: loads from elsewhere stay under way.
__device__ __forceinline__ void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
__device__ __forceinline__ void atomic_or(int* at, int x) { __hip_atomic_fetch_or(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
__device__ __forceinline__ void atomic_max(int* at, int x) { __hip_atomic_fetch_max(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
template <class T>
__device__ __forceinline__ T load_global(const T* at) {
  return *(const __attribute__((address_space(1))) T*)at;
}
// Byte i of the result is byte (selector >> 8 i) & 7 of low (0 .. 3) and high (4 .. 7).
__device__ __forceinline__ uint32_t select_bytes(uint32_t high, uint32_t low, uint32_t selector) { return __builtin_amdgcn_perm(high, low, selector); }
// sum + the four products of signed bytes.
__device__ __forceinline__ int dot4(int a, int b, int sum) {
#if defined(__GFX11__) || defined(__GFX12__)
  return __builtin_amdgcn_sudot4(true, a, true, b, sum, false);
#else
  return __builtin_amdgcn_sdot4(a, b, sum, false);
#endif
}
__device__ __forceinline__ float half_to_float(uint16_t h) { return static_cast<float>(__builtin_bit_cast(_Float16, h)); }
__device__ __forceinline__ uint16_t float_to_half(float x) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x)); }
// The compiler moves no instruction across: all loads of an unrolled loop at its head would take more registers than there are.
__device__ __forceinline__ void in_order() { __builtin_amdgcn_sched_barrier(0); }

}  // namespace machine
#else
#include "cpu_machine.h"
#endif

static_assert(sizeof(void*) == 8, "");

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
__device__ __forceinline__ float2 make_float2(float x, float y) { return {x, y}; }
__device__ __forceinline__ float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
__device__ __forceinline__ int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

struct Index {
  unsigned x;
};
#define threadIdx (Index{machine::thread()})
#define blockIdx (Index{machine::block()})

// One IEEE-754 operation each: the compiler contracts nothing (-ffp-contract=off) and keeps denormals.
__device__ __forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__device__ __forceinline__ float __fsub_rn(float a, float b) { return a - b; }
__device__ __forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__device__ __forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__device__ __forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __forceinline__ float __int2float_rn(int a) { return static_cast<float>(a); }
__device__ __forceinline__ float __ll2float_rn(int64_t a) { return static_cast<float>(a); }
__device__ __forceinline__ float __int_as_float(int a) { return __builtin_bit_cast(float, a); }
__device__ __forceinline__ int __float_as_int(float a) { return __builtin_bit_cast(int, a); }
namespace strata_pa {
namespace cuda {
__device__ __forceinline__ float rintf(float a) { return __builtin_rintf(a); }
__device__ __forceinline__ float fabsf(float a) { return __builtin_fabsf(a); }
__device__ __forceinline__ float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ __forceinline__ int max(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int min(int a, int b) { return a < b ? a : b; }
}  // namespace cuda
}  // namespace strata_pa
// Of a number that is not finite, or too large: any integer.
__device__ __forceinline__ int __float2int_rn(float a) { return __builtin_fabsf(a) < 0x1p31f ? static_cast<int>(__builtin_rintf(a)) : 0; }

__device__ __forceinline__ uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
__device__ __forceinline__ int __clz(int a) { return __builtin_clz(static_cast<unsigned>(a)); }
// Four selectors of 4 bits: bytes 0 .. 3 of a, 4 .. 7 of b.
__device__ __forceinline__ uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  return machine::select_bytes(b, a, (s & 7) | (s << 4 & 0x700) | (s << 8 & 0x70000) | (s << 12 & 0x7000000));
}

template <class T>
__device__ __forceinline__ T __ldg(const T* at) {
  return machine::load_global(at);
}
__device__ __forceinline__ void atomicOr(int* at, int x) { machine::atomic_or(at, x); }
__device__ __forceinline__ void atomicMax(int* at, int x) { machine::atomic_max(at, x); }
__device__ __forceinline__ void __syncthreads() { machine::block_barrier(); }

// Of a whole warp: the mask is for CUDA's sake.
__device__ __forceinline__ int warp_begin() { return static_cast<int>(machine::thread()) & (machine::kWave - 1) & ~31; }
__device__ __forceinline__ uint32_t __ballot_sync(uint32_t, bool x) { return static_cast<uint32_t>(machine::ballot(x) >> warp_begin()); }
__device__ __forceinline__ int __shfl_sync(uint32_t, int x, int lane) { return machine::permute(x, warp_begin() + lane); }
__device__ __forceinline__ float __shfl_sync(uint32_t mask, float x, int lane) { return __int_as_float(__shfl_sync(mask, __float_as_int(x), lane)); }
__device__ __forceinline__ int64_t __shfl_sync(uint32_t mask, int64_t x, int lane) {
  const int low = __shfl_sync(mask, static_cast<int>(x), lane), high = __shfl_sync(mask, static_cast<int>(x >> 32), lane);
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
}
template <class T>
__device__ __forceinline__ T __shfl_xor_sync(uint32_t mask, T x, int o) {
  return __shfl_sync(mask, x, (static_cast<int>(machine::thread()) & 31) ^ o);
}

namespace strata_pa {
namespace cuda {

__device__ __forceinline__ float half_to_float(uint16_t h) { return machine::half_to_float(h); }
__device__ __forceinline__ uint16_t float_to_half(float x) { return machine::float_to_half(x); }
__device__ __forceinline__ float divide_ordinary(float a, float b) { return a / b; }
__device__ __forceinline__ int64_t sum_of_wide_products(int a, int b, int c, int d) { return int64_t{a} * b + int64_t{c} * d; }

}  // namespace cuda
}  // namespace strata_pa
