// Runs the blocks of a kernel of hip/ on a CPU, one after another. Shared memory begins as noise.
#include "cpu_machine.h"

#include <cstring>

#include "core/half.h"
#include "hip/launch.h"

namespace {

constexpr uint32_t kMostShared = strata_pa::hip::kMaxShared, kCanary = 4096;

using Kernel = void (*)(const strata_pa::cuda::Params&);
fibers::Meeting block_meeting, warp_meetings[fibers::kMostThreads / 32];
int threads;
Kernel kernel;
const strata_pa::cuda::Params* params;
std::string answer;

}  // namespace

namespace machine {

unsigned block_index;

void block_barrier() { fibers::meet(block_meeting, static_cast<int>(thread()), threads, "a barrier"); }

const int* exchange(int x) { return fibers::exchange(warp_meetings[thread() / 32], x, "a shuffle"); }

void check_global(const void*, size_t) {}
void atomic(void*, size_t, const void*) {}
float half_to_float(uint16_t h) { return strata_pa::half_to_float(h); }
uint16_t float_to_half(float x) { return strata_pa::float_to_half(x); }

}  // namespace machine

namespace strata_pa::hip {
alignas(16) unsigned char raw_shared[kMostShared + kCanary];
}

// "": done. Otherwise what went wrong.
extern "C" const char* run_on_cpu(Kernel body, const strata_pa::cuda::Params* p, unsigned grid, unsigned block, unsigned shared_bytes) {
  using strata_pa::hip::raw_shared;
  if (block % machine::kWave != 0) return "a block of that many threads";
  if (shared_bytes > kMostShared) return "that much shared memory";
  kernel = body, params = p, threads = static_cast<int>(block);
  for (machine::block_index = 0; machine::block_index < grid; ++machine::block_index) {
    std::memset(raw_shared, 0xa5, sizeof raw_shared);
    block_meeting = {};
    for (auto& m : warp_meetings) m = {};
    fibers::seed(machine::block_index);
    answer = fibers::run(threads, [] { kernel(*params); }, nullptr);
    for (uint32_t i = shared_bytes; answer.empty() && i < sizeof raw_shared; ++i)
      if (raw_shared[i] != 0xa5) answer = "it writes past its shared memory";
    if (!answer.empty()) return answer.c_str();
  }
  return "";
}
