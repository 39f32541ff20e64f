// What nvcc knows and ptx.cuh and hopper.cuh say in PTX, for the tests that run the CUDA kernels' own source on a CPU: cuda_machine.cpp does what is
// below. Stricter than a card: what an instruction has not brought yet is noise, and what a card would leave undefined is an error.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define STRATA_PA_WAVE 32
#include "hip/gpu.h"

#undef __shared__
#define __shared__ thread_local  // one CPU thread runs all fibers; all that a library of kernels keeps this way is a block's shared memory
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace machine {

extern unsigned block_threads, blocks;

using Bytes16 = struct { alignas(16) unsigned char x[16]; };
using Work = void (*)(void* const*);

void check_global(const void* at, size_t bytes);
unsigned char* shared(uint32_t at, uint32_t bytes, uint32_t alignment);  // checked
uint32_t shared_place(const void* at);
// All lanes of the warp, or all threads of the warpgroup, come together; the last one does the work on what they brought.
void meet_warp(const char* what, void* mine, Work work, const void* pc = nullptr);
void meet_warpgroup(const char* what, void* mine, Work work, const void* pc);
void warp_barrier();
int block_any(int x);  // a barrier of the block, too
void named_barrier(int number, int threads, bool wait);

void copy16(uint32_t to, const void* from);
void commit_copies();
void land_copies(int newer);

void barrier_init(uint32_t at, int count);
void barrier_arrive(uint32_t at, uint32_t bytes);
void barrier_wait(uint32_t at, uint32_t parity);
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void arrive_when_copied(uint32_t barrier);
void fence_async(bool of_shared_memory_alone);

void ldmatrix(uint32_t* r, uint32_t row, bool transposed);
void mma(int* d, const uint32_t* a, uint32_t b0, uint32_t b1, const int* c, bool a_signed);

// d: 64 rows by n columns of a warpgroup. a: a descriptor, or where `held` four registers of A's rows.
struct Product {
  int* d;
  int n;
  uint64_t a, b;
  const uint32_t* held;
  bool more, a_signed, b_signed;
  const void* pc = nullptr;
};
void wgmma(Product p);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int newer);
void set_registers(int count, bool more);

template <class T>
T exchanged(T x, int lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "");
  struct Lane {
    T x, got;
    int from;
  } mine{x, x, lane};
  meet_warp("a shuffle", &mine, [](void* const* all) {
    auto at = [all](int i) { return static_cast<Lane*>(all[i]); };
    for (int i = 0; i < 32; ++i)
      if (const int from = at(i)->from; from >= 0 && from < 32) at(i)->got = at(from)->x;
  });
  return mine.got;
}
template <class F>
int reduced(int x, F f) {
  struct Lane {
    int x;
    F f;
  } mine{x, f};
  meet_warp("a reduction", &mine, [](void* const* all) {
    auto at = [all](int i) { return static_cast<Lane*>(all[i]); };
    for (int i = 1; i < 32; ++i) at(0)->x = at(0)->f(at(0)->x, at(i)->x);
    for (int i = 1; i < 32; ++i) at(i)->x = at(0)->x;
  });
  return mine.x;
}

}  // namespace machine

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(8) int2 { int x, y; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
#define blockDim (Index{machine::block_threads})
#define gridDim (Index{machine::blocks})

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
namespace strata_pa {
namespace cuda {
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
}  // namespace cuda
}  // namespace strata_pa

inline float __uint_as_float(uint32_t x) { return __int_as_float(static_cast<int>(x)); }
inline uint32_t __popc(uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __viaddmax_s32(int a, int b, int c) {
  const int sum = static_cast<int>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  return sum > c ? sum : c;
}
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
template <class T, class F>
uint32_t each(uint32_t a, uint32_t b, F f) {  // of the halves or bytes of a word
  uint32_t x = 0;
  for (unsigned i = 0; i < 32; i += 8 * sizeof(T)) x |= static_cast<uint32_t>(static_cast<T>(f(static_cast<T>(a >> i), static_cast<T>(b >> i)))) << i;
  return x;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return each<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return x > y ? x : y; }); }
inline uint32_t __vcmpgtu2(uint32_t a, uint32_t b) { return each<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return x > y ? 0xffff : 0; }); }
inline uint32_t __vcmpgtu4(uint32_t a, uint32_t b) { return each<uint8_t>(a, b, [](uint8_t x, uint8_t y) { return x > y ? 0xff : 0; }); }

template <class T, class U>
STRATA_PA_ATOMIC T atomicAdd(T* at, U x) {
  machine::atomic(at, sizeof x, __builtin_return_address(0));
  const T old = *at;
  *at = static_cast<T>(old + static_cast<T>(x));
  return old;
}
STRATA_PA_ATOMIC inline uint32_t atomicOr(uint32_t* at, uint32_t x) {
  machine::atomic(at, sizeof x, __builtin_return_address(0));
  const uint32_t old = *at;
  *at = old | x;
  return old;
}
STRATA_PA_ATOMIC inline void atomicMax(uint32_t* at, uint32_t x) {
  machine::atomic(at, sizeof x, __builtin_return_address(0));
  *at = *at > x ? *at : x;
}
template <class T>
T __ldcg(const T* at) {
  return __ldg(at);
}
template <class T>
void __stcg(T* at, T x) {
  machine::check_global(at, sizeof x);
  *at = x;
}
inline void __trap() { fibers::fail("a trap"); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __syncwarp() { machine::warp_barrier(); }
inline int __syncthreads_or(int x) { return machine::block_any(x); }
inline unsigned long long __shfl_xor_sync(uint32_t, unsigned long long x, int o) { return machine::exchanged(x, (static_cast<int>(machine::thread()) & 31) ^ o); }
template <class T>
T __shfl_up_sync(uint32_t, T x, int o) {
  const int lane = static_cast<int>(machine::thread()) & 31;
  return machine::exchanged(x, lane < o ? lane : lane - o);
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return machine::exchanged(x, lane); }
inline bool __any_sync(uint32_t, bool x) {
  return machine::reduced(x, [](int a, int b) { return a | b; }) != 0;
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t x) {
  return static_cast<uint32_t>(machine::reduced(static_cast<int>(x), [](int a, int b) { return a | b; }));
}
inline bool __all_sync(uint32_t, bool x) {
  return machine::reduced(x, [](int a, int b) { return a & b; }) != 0;
}
inline int __reduce_max_sync(uint32_t, int x) {
  return machine::reduced(x, [](int a, int b) { return a > b ? a : b; });
}

namespace strata_pa {
namespace cuda {

inline const void* sixteenths(const void* base, uint32_t x) { return static_cast<const unsigned char*>(base) + uint64_t{x} * 16; }
inline int thread_now() { return static_cast<int>(threadIdx.x); }
inline int same_in_warp(int x) { return __shfl_sync(~0u, x, 0); }
inline int lane_now() { return thread_now() & 31; }
inline void hide(int&) {}
inline void hide(uint32_t&) {}
template <class T>
void hide(T*&) {}
inline void hide(int (&)[4]) {}
inline void still_read(const uint32_t (&)[4]) {}

STRATA_PA_ATOMIC inline void add_global(unsigned long long* at, unsigned long long x) {
  machine::atomic(at, sizeof x, __builtin_return_address(0));
  *at += x;
}
inline uint32_t shared_address(const void* p) { return machine::shared_place(p); }
template <class T>
void load_from_shared(T* x, int count, uint32_t at) {
  std::memcpy(x, machine::shared(at, count * 4u, count * 4u), count * 4u);
}
inline void load_shared(uint32_t& x, uint32_t at) { load_from_shared(&x, 1, at); }
template <class T>
void load_shared2(T& x, T& y, uint32_t at) {
  T both[2];
  load_from_shared(both, 2, at);
  x = both[0], y = both[1];
}
inline void load_shared4(int (&x)[4], uint32_t at) { load_from_shared(x, 4, at); }
inline void store_shared2(uint32_t at, uint32_t x, uint32_t y) {
  const uint32_t both[2] = {x, y};
  std::memcpy(machine::shared(at, 8, 8), both, 8);
}

inline void prefetch_l2(const void*) {}
inline void copy16(uint32_t to, const void* from) { machine::copy16(to, from); }
inline void copy16_if(uint32_t to, const void* from, int condition) {
  if (condition) machine::copy16(to, from);
}
inline void commit_copies() { machine::commit_copies(); }
template <int newer>
void land_copies() {
  machine::land_copies(newer);
}

inline void ldmatrix4(uint32_t (&r)[4], uint32_t row) { machine::ldmatrix(r, row, false); }
inline void ldmatrix4_trans(uint32_t (&r)[4], uint32_t row) { machine::ldmatrix(r, row, true); }
inline void mma_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) { machine::mma(d, a, b0, b1, c, true); }
inline void mma_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) { machine::mma(d, a, b0, b1, c, false); }
inline void add_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { machine::mma(d, a, b0, b1, d, true); }
inline void add_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { machine::mma(d, a, b0, b1, d, false); }

// ---- hopper.cuh

inline int uniform(int x) { return static_cast<int>(__reduce_or_sync(~0u, static_cast<uint32_t>(x))); }
inline void barrier_init(uint32_t at, int count) { machine::barrier_init(at, count); }
inline void barrier_arrive(uint32_t at) { machine::barrier_arrive(at, 0); }
inline void barrier_arrive_if(uint32_t at, int condition) {
  if (condition) machine::barrier_arrive(at, 0);
}
inline void barrier_wait(uint32_t at, uint32_t parity) { machine::barrier_wait(at, parity); }
template <uint32_t bytes>
void expect_bytes(uint32_t at) {
  machine::barrier_arrive(at, bytes);
}
template <uint32_t bytes>
void bulk_copy(uint32_t to, const void* from, uint32_t barrier) {
  machine::bulk_copy(to, from, bytes, barrier);
}
inline void arrive_when_copied(uint32_t barrier) { machine::arrive_when_copied(barrier); }
inline void fence_async_shared() { machine::fence_async(true); }
inline void fence_async() { machine::fence_async(false); }
inline void join_warpgroup(int group) { machine::named_barrier(group + 1, 128, true); }
inline void join_threads(int barrier, int threads) { machine::named_barrier(barrier, threads, true); }
inline void announce_threads(int barrier, int threads) { machine::named_barrier(barrier, threads, false); }
template <int count>
void more_registers() {
  machine::set_registers(count, true);
}
template <int count>
void fewer_registers() {
  machine::set_registers(count, false);
}

inline void wgmma_fence() { machine::wgmma_fence(); }
inline void wgmma_commit() { machine::wgmma_commit(); }
template <int n>
void wgmma(int (&d)[n], uint64_t a, uint64_t b, int more) {
  machine::wgmma({d, 2 * n, a, b, nullptr, more != 0, true, true});
}
template <int n>
void wgmma_rs(int (&d)[n], const uint32_t (&a)[4], uint64_t b, int more) {
  machine::wgmma({d, 2 * n, 0, b, a, more != 0, true, true});
}
template <int n>
void wgmma_rs_s8u8(int (&d)[n], const uint32_t (&a)[4], uint64_t b, int more) {
  machine::wgmma({d, 2 * n, 0, b, a, more != 0, true, false});
}
template <int newer>
void wait_products() {
  machine::wgmma_wait(newer);
}
template <int newer, int n>
void wait_for(int (&)[n]) {
  machine::wgmma_wait(newer);
}

}  // namespace cuda
}  // namespace strata_pa
