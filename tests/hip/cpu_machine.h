// hip/gpu.h's `machine` on a CPU: every thread of a block is a fiber.
#pragma once
#include <cstddef>
#include <cstdint>

#include "fibers.h"

#define __device__
#define __shared__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))

namespace machine {

constexpr int kWave = STRATA_PA_WAVE;
static_assert(kWave == 32 || kWave == 64, "a wave has 32 or 64 lanes");

extern unsigned block_index;
constexpr uint64_t noise = 0xa5c3f00d5ee7beef;

void block_barrier();
void check_global(const void* at, size_t bytes);
void atomic(void* at, size_t bytes, const void* pc);  // it is about to be changed atomically
// Waits until all 32 lanes of the warp are here; every lane's x is in the result, by its place in the warp.
const int* exchange(int x);

inline unsigned thread() { return fibers::current; }
inline unsigned block() { return block_index; }
// The halves of a wave of 64 need not be at one place: what one sees of the other is noise.
inline uint64_t ballot(bool x) {
  const int* lanes = exchange(x);
  uint64_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint64_t{lanes[i] != 0} << i;
  if constexpr (kWave == 32) return mask;
  else return thread() & 32 ? mask << 32 | (noise & 0xffffffff) : mask | (noise << 32);
}
inline int permute(int x, int lane) {
  const int* lanes = exchange(x);
  const bool own = lane >= 0 && lane < kWave && (lane & ~31) == static_cast<int>(thread() & (kWave - 1) & ~31u);
  return own ? lanes[lane & 31] : static_cast<int>(noise);
}
#define STRATA_PA_ATOMIC __attribute__((noinline, no_sanitize("thread")))
STRATA_PA_ATOMIC inline void atomic_or(int* at, int x) {
  atomic(at, sizeof x, __builtin_return_address(0));
  *at |= x;
}
STRATA_PA_ATOMIC inline void atomic_max(int* at, int x) {
  atomic(at, sizeof x, __builtin_return_address(0));
  *at = x > *at ? x : *at;
}
template <class T>
T load_global(const T* at) {
  check_global(at, sizeof(T));
  return *at;
}
inline uint32_t select_bytes(uint32_t high, uint32_t low, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t x = 0;
  for (int i = 0; i < 4; ++i) x |= static_cast<uint32_t>(both >> 8 * (selector >> 8 * i & 7) & 255) << 8 * i;
  return x;
}
inline int dot4(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return sum;
}
float half_to_float(uint16_t h);
uint16_t float_to_half(float x);
inline void in_order() {}

}  // namespace machine
