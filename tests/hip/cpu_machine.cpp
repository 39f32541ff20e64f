// Runs the blocks of a kernel of hip/ on a CPU, one after another, each thread a fiber with its own stack. What a GPU leaves open is made
// to differ: shared memory begins as noise, and the threads of a block take turns in an order of their own.
#include "cpu_machine.h"

#include <cstring>
#include <vector>

#include "core/half.h"
#include "hip/launch.h"

#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif

namespace {

constexpr int kMostThreads = 256, kStack = 128 << 10;
constexpr uint32_t kMostShared = strata_pa::hip::kMaxShared, kCanary = 4096;

// Saves the registers that a function keeps and the stack in `from`, and goes on where `to` was left.
extern "C" void switch_fiber(void** from, void* to);
asm(R"(
.text
switch_fiber:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

struct Warp {
  int lanes[2][32];
  int arrived, generation;
};

using Kernel = void (*)(const strata_pa::cuda::Params&);
std::vector<char> stacks(kMostThreads * kStack);
void* places[kMostThreads];
void* scheduler;
bool done[kMostThreads];
Warp warps[kMostThreads / 32];
int threads, barrier_arrived, barrier_generation;
long progress;
Kernel kernel;
const strata_pa::cuda::Params* params;

void yield() { switch_fiber(&places[machine::thread_index], scheduler); }

void fiber() {
  kernel(*params);
  done[machine::thread_index] = true;
  ++progress;
  yield();
  __builtin_trap();
}

}  // namespace

namespace machine {

unsigned thread_index, block_index;
const uint64_t noise = 0xa5c3f00d5ee7beef;

void block_barrier() {
  ++progress;
  if (++barrier_arrived == threads) {
    barrier_arrived = 0, ++barrier_generation;
    return;
  }
  for (int mine = barrier_generation; mine == barrier_generation;) yield();
}

const int* exchange(int x) {
  ++progress;
  Warp& w = warps[thread_index / 32];
  const int mine = w.generation;
  int* lanes = w.lanes[mine & 1];
  lanes[thread_index & 31] = x;
  if (++w.arrived == 32) w.arrived = 0, ++w.generation;
  while (mine == w.generation) yield();
  return lanes;
}

float half_to_float(uint16_t h) { return strata_pa::half_to_float(h); }
uint16_t float_to_half(float x) { return strata_pa::float_to_half(x); }

}  // namespace machine

namespace strata_pa::hip {
alignas(16) unsigned char raw_shared[kMostShared + kCanary];
}

// "": done. Otherwise what went wrong.
extern "C" const char* run_on_cpu(Kernel body, const strata_pa::cuda::Params* p, unsigned grid, unsigned block, unsigned shared_bytes) {
  using strata_pa::hip::raw_shared;
  if (block > kMostThreads || block % machine::kWave != 0) return "a block of that many threads";
  if (shared_bytes > kMostShared) return "that much shared memory";
  kernel = body, params = p, threads = static_cast<int>(block);
  for (machine::block_index = 0; machine::block_index < grid; ++machine::block_index) {
    std::memset(raw_shared, 0xa5, sizeof raw_shared);
    barrier_arrived = 0;
    for (int t = 0; t < threads; ++t) {
      warps[t / 32].arrived = 0;
      done[t] = false;
      void** top = reinterpret_cast<void**>(stacks.data() + (t + 1) * kStack - 64);
      *top = nullptr;
      *--top = reinterpret_cast<void*>(fiber);
      places[t] = top - 6;
    }
    for (int left = threads; left > 0;) {
      const long before = progress;
      for (int i = 0; i < threads; ++i) {
        const int t = (i * 37 + static_cast<int>(machine::block_index)) % threads;
        if (done[t]) continue;
        machine::thread_index = static_cast<unsigned>(t);
        switch_fiber(&scheduler, places[t]);
        left -= done[t];
      }
      if (progress == before) return "its threads wait for each other: a barrier or a shuffle that not all of them reach";
    }
    for (uint32_t i = shared_bytes; i < sizeof raw_shared; ++i)
      if (raw_shared[i] != 0xa5) return "it writes past its shared memory";
  }
  return "";
}
