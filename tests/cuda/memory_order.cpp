#include "memory_order.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "fibers.h"

namespace memory_order {
namespace {

constexpr int kReaders = 4;

struct Access {
  uint16_t thread;      // + 1; 0: nobody
  uint8_t bytes, kind;  // a bit for each of the four
  uint32_t time;
  const void* pc;
};
struct Cell {  // four bytes
  Access write, reads[kReaders];
};
// A write of what is there already is no race: the next look at the thread tells.
struct Doubt {
  const void* at;
  uint32_t before, bytes;
  Access other;
  const void* pc;
};

unsigned threads;
std::vector<Clock> clocks;
std::vector<Doubt> doubts;  // of each thread, at most one
std::vector<Cell> flat;
uintptr_t flat_begin;
std::unordered_map<uintptr_t, Cell> others;

uint32_t word(const void* at) {
  uint32_t x;
  std::memcpy(&x, at, 4);
  return x;
}
void report(unsigned thread, const char* does, const void* pc, const char* did, const Access& other) {
  fibers::fail("a race: thread " + std::to_string(thread) + " " + does + " (" + fibers::place(pc) + ") what thread " + std::to_string(other.thread - 1) +
               " " + did + " (" + fibers::place(other.pc) + "), and nothing orders them");
}
void settle(unsigned thread) {
  Doubt& d = doubts[thread];
  if (!d.at) return;
  bool changed = false;
  for (int i = 0; i < 4; ++i) changed |= (d.bytes >> i & 1) && (word(d.at) ^ d.before) >> 8 * i & 255;
  d.at = nullptr;
  if (changed) report(thread, "writes", d.pc, "wrote", d.other);
}

Cell& cell(uintptr_t at) { return at - flat_begin < flat.size() * 4 ? flat[(at - flat_begin) / 4] : others[at]; }

void touch(uintptr_t at, Kind kind, const Access& mine) {
  Cell& c = cell(at);
  const unsigned thread = mine.thread - 1u;
  const Clock& clock = clocks[thread];
  const bool reads = kind != kWrite && kind != kAtomic && kind != kAsyncWrite;
  auto is_atomic = [](int k) { return k == kAtomic || k == kVolatileRead; };
  auto is_known = [&](const Access& a) { return !a.thread || a.time <= clock.of[0][a.thread - 1u]; };
  auto races_with = [&](const Access& a) { return a.thread != mine.thread && (a.bytes & mine.bytes) && !is_known(a) && !(is_atomic(a.kind) && is_atomic(kind)); };
  if (races_with(c.write)) {
    if (reads) report(thread, "reads", mine.pc, "wrote", c.write);
    if (kind == kAtomic || thread != fibers::current) report(thread, "writes", mine.pc, "wrote", c.write);
    const auto* const memory = reinterpret_cast<const void*>(at);
    doubts[thread] = {memory, word(memory), mine.bytes, c.write, mine.pc};
  }
  if (kind == kAsyncRead && c.write.thread && c.write.kind != kAsyncWrite) {
    const unsigned writer = c.write.thread - 1u;
    if (c.write.time > clock.of[at - flat_begin < flat.size() * 4 ? 1 : 2][writer])
      fibers::fail("no fence for wgmma or bulk copies stands between what thread " + std::to_string(writer) + " wrote (" + fibers::place(c.write.pc) +
                   ") and its use (" + fibers::place(mine.pc) + ")");
  }
  if (reads) {
    Access* to = &c.reads[fibers::random_below(kReaders)];
    for (Access& r : c.reads)
      if (is_known(r)) to = &r;
    for (Access& r : c.reads)
      if (r.thread == mine.thread) to = &r;
    *to = mine;
    return;
  }
  for (Access& r : c.reads) {
    if (races_with(r)) report(thread, "writes", mine.pc, "reads", r);
    if (!(r.bytes & ~mine.bytes)) r = {};
  }
  c.write = mine;
}

}  // namespace

void begin(unsigned n, const void* at, uint32_t bytes) {
  threads = n;
  const std::vector<uint32_t> zero(n, 0);
  clocks.assign(n, Clock{{zero, zero, zero}});
  for (unsigned t = 0; t < n; ++t) clocks[t].of[0][t] = 1;
  doubts.assign(n, {});
  flat_begin = reinterpret_cast<uintptr_t>(at);
  flat.assign(bytes / 4, {});
  others.clear();
}

void end() { settle(fibers::current); }
uint32_t now(unsigned thread) { return clocks[thread].of[0][thread]; }

void access(const void* at, uint32_t bytes, Kind kind, const void* pc, unsigned thread, uint32_t time) {
  settle(fibers::current);
  const auto begin = reinterpret_cast<uintptr_t>(at), end = begin + bytes;
  for (uintptr_t a = begin & ~uintptr_t{3}; a < end; a += 4) {
    unsigned mask = 15;
    if (a < begin) mask &= 15u << (begin - a);
    if (end < a + 4) mask &= 15u >> (a + 4 - end);
    touch(a, kind, {static_cast<uint16_t>(thread + 1), static_cast<uint8_t>(mask), static_cast<uint8_t>(kind), time, pc});
  }
}
void access(const void* at, uint32_t bytes, Kind kind, const void* pc) { access(at, bytes, kind, pc, fibers::current, now(fibers::current)); }

namespace {
void join(Clock& to, const Clock& from) {
  for (int k = 0; k < 3; ++k) {
    to.of[k].resize(threads);
    for (unsigned i = 0; i < from.of[k].size(); ++i) to.of[k][i] = std::max(to.of[k][i], from.of[k][i]);
  }
}
}  // namespace

void fence(bool of_flat_memory_alone) {
  Clock& own = clocks[fibers::current];
  own.of[1] = own.of[0];
  if (!of_flat_memory_alone) own.of[2] = own.of[0];
  ++own.of[0][fibers::current];
}
void release(Clock& to) {
  settle(fibers::current);
  join(to, clocks[fibers::current]);
  ++clocks[fibers::current].of[0][fibers::current];
}
void acquire(const Clock& from) { join(clocks[fibers::current], from); }
void tell(unsigned from, unsigned first, unsigned end) {
  for (unsigned t = first; t < end; ++t)
    if (t != from) join(clocks[t], clocks[from]);
  ++clocks[from].of[0][from];
}

}  // namespace memory_order
