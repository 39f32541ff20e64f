// What the kernels say in PTX, but for v1, v2 and what sm_90 alone has (hopper.cuh). hip/gpu.h has the first four for AMD;
// the tests that run the kernels on a CPU have them all.
#pragma once
#include <cstdint>

#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#else
namespace strata_pa {
namespace cuda {

// a / b, correctly rounded, without the slow path of the general division (a call, for which every register would be saved): for
// quotients and reciprocals far from overflow and underflow.
__device__ __forceinline__ float divide_ordinary(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  float q = __fmul_rn(a, y);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

__device__ __forceinline__ float half_to_float(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ uint16_t float_to_half(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

__device__ __forceinline__ int64_t sum_of_wide_products(int a, int b, int c, int d) {
  int64_t r;
  asm("mul.wide.s32 %0, %1, %2;\n\tmad.wide.s32 %0, %3, %4, %0;" : "=&l"(r) : "r"(a), "r"(b), "r"(c), "r"(d));
  return r;
}

// base + 16 x bytes, in the one instruction that it takes.
__device__ __forceinline__ const void* sixteenths(const void* base, uint32_t x) {
  uint64_t at;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(at) : "r"(x), "l"(base));
  return reinterpret_cast<const void*>(at);
}

// ---- registers

// The thread's number, not kept in a register.
__device__ __forceinline__ int thread_now() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ int lane_now() {
  int x;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
  return x;
}
// x, which is the same in all lanes, and so that the compiler knows it.
__device__ __forceinline__ int same_in_warp(int x) { return __shfl_sync(~0u, x, 0); }
// The compiler knows nothing of x from here on: it neither keeps what it made of it nor makes something of it earlier.
__device__ __forceinline__ void hide(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void hide(uint32_t& x) { asm volatile("" : "+r"(x)); }
template <class T>
__device__ __forceinline__ void hide(T*& x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void hide(int (&x)[4]) { asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])); }

// ---- shared memory, by its own addresses

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void load_shared(uint32_t& x, uint32_t at) { asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory"); }
template <class T>
__device__ __forceinline__ void load_shared2(T& x, T& y, uint32_t at) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_shared4(int (&x)[4], uint32_t at) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void store_shared2(uint32_t at, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}

// Copies in groups: land_copies waits for all but the `newer` last ones.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16_if(uint32_t to, const void* from, int condition) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(to), "l"(from), "r"(condition) : "memory");
}
// The cache line comes to L2.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int newer>
__device__ __forceinline__ void land_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
}

// *at += x, in global memory, without an answer: the compiler's own additions of 64 bits wait for one.
__device__ __forceinline__ void add_global(unsigned long long* at, unsigned long long x) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

// ---- matrices

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
// d = a b + c
__device__ __forceinline__ void mma_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// d += a b, in place: there is no room for a copy.
__device__ __forceinline__ void add_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void add_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cuda
}  // namespace strata_pa
#endif
