// Which accesses of a block's threads to the same memory nothing orders: happens-before by vector clocks. Of four readers since the last write one more is
// remembered by chance, so that rarely a race is missed; none is reported that is none.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace memory_order {

// Two that are atomic, or marked volatile, never race.
// kAsyncRead, kAsyncWrite: of wgmma and bulk copies, which see what threads wrote only if a fence stands between.
enum Kind { kRead, kWrite, kAtomic, kVolatileRead, kAsyncRead, kAsyncWrite };
// How far each thread is known: to be over, to be fenced in flat memory, to be fenced everywhere.
struct Clock {
  std::vector<uint32_t> of[3];
};

// flat: memory that is looked up faster than other.
void begin(unsigned threads, const void* flat, uint32_t bytes);

// The thread that runs now, or another as far as it was at `time`, accesses `bytes` at an address. pc: where in the code.
void access(const void* at, uint32_t bytes, Kind kind, const void* pc);
void access(const void* at, uint32_t bytes, Kind kind, const void* pc, unsigned thread, uint32_t time);
uint32_t now(unsigned thread);
void end();  // of the thread that runs now
void fence(bool of_flat_memory_alone);

// What this thread did is known to those who acquire.
void release(Clock& to);
void acquire(const Clock& from);
void tell(unsigned from, unsigned first, unsigned end);  // the threads first .. end - 1 know what `from` did

}  // namespace memory_order
