#include "fibers.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <vector>

#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif

namespace fibers {
namespace {

constexpr int kStack = 96 << 10, kWarp = 32;

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

struct Thread {
  void* place;
  const unsigned* watched;  // null: it can run
  unsigned value;
  const char* what;
  const void* pc;
  bool done;
};
Thread threads[kMostThreads];
std::vector<char> stacks;
void* scheduler;
void (*body)();
std::string complaint;
unsigned state = 1;
int asleep[kMostThreads / kWarp];  // turns that a warp lets pass

bool ready(const Thread& t) { return !t.done && (!t.watched || *t.watched != t.value); }
void leave() { switch_fiber(&threads[current].place, scheduler); }

void begin() {
  body();
  threads[current].done = true;
  leave();
  __builtin_trap();
}

// "its threads wait for each other: 12 (0, 1, 2, ...) at a barrier of the block; ..."
std::string who_waits(int n) {
  std::map<std::string, std::vector<int>> places;
  for (int t = 0; t < n; ++t) {
    const Thread& x = threads[t];
    places[x.done ? "their end" : x.what + (x.pc ? " (" + place(x.pc) + ")" : "")].push_back(t);
  }
  std::string text = "its threads wait for each other:";
  for (const auto& [what, list] : places) {
    text += " " + std::to_string(list.size()) + " (";
    for (size_t i = 0; i < list.size() && i < 8; ++i) text += (i ? ", " : "") + std::to_string(list[i]);
    text += (list.size() > 8 ? ", ...) at " : ") at ") + what + ";";
  }
  text.pop_back();
  return text;
}

}  // namespace

unsigned current;

void seed(unsigned number) { state = number * 2654435761u + 1; }
unsigned random_below(unsigned n) {
  state = state * 1664525u + 1013904223u;
  return static_cast<unsigned>((static_cast<unsigned long long>(state >> 4) * n) >> 28);
}

bool on_a_stack(const void* at) {
  return static_cast<const char*>(at) >= stacks.data() && static_cast<const char*>(at) < stacks.data() + stacks.size();
}

std::string place(const void* pc) {
  Dl_info info;
  char text[32] = "?";
  if (pc && dladdr(pc, &info)) std::snprintf(text, sizeof text, "@%#zx", static_cast<size_t>(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase)));
  return text;
}

void wait_while(const unsigned& x, unsigned value, const char* what, const void* pc) {
  Thread& t = threads[current];
  if (x != value) return;
  t.watched = &x, t.value = value, t.what = what, t.pc = pc;
  leave();
  t.watched = nullptr;
}

void meet(Meeting& m, int index, int size, const char* what, void* mine, Work work, const void* pc) {
  if (m.arrived == 0) m.what = what;
  else if (m.what != what && std::string(m.what) != what) fail("some of its threads came to " + std::string(m.what) + ", others to " + what);
  m.brought[index] = mine;
  if (++m.arrived < size) return wait_while(m.held, m.held, what, pc);
  m.arrived = 0;
  if (work) work(m.brought);
  ++m.held;
}

const int* exchange(Meeting& m, int x, const char* what, const void* pc) {
  static int shown[kMostThreads / kWarp][2][kWarp];  // two: some lanes may come to the next exchange while others read
  int* const lanes = shown[current / kWarp][m.held & 1];
  lanes[current % kWarp] = x;
  meet(m, static_cast<int>(current % kWarp), kWarp, what, nullptr, nullptr, pc);
  return lanes;
}

void fail(const std::string& text) {
  complaint = "thread " + std::to_string(current) + ": " + text;
  leave();
  __builtin_trap();
}

std::string run(int n, void (*f)(), bool (*idle)(bool stuck)) {
  if (n < 1 || n > kMostThreads || n % kWarp != 0) return "a block of that many threads";
  body = f, complaint.clear();
  stacks.resize(size_t{kMostThreads} * kStack);
  for (int t = 0; t < n; ++t) {
    void** top = reinterpret_cast<void**>(stacks.data() + (t + 1) * kStack - 72);  // as a call leaves it: 8 below a multiple of 16
    *top = nullptr;
    *--top = reinterpret_cast<void*>(begin);
    threads[t] = {top - 6, nullptr, 0, "", nullptr, false};
  }
  const int warps = n / kWarp;
  for (int& turns : asleep) turns = 0;
  for (int left = n; left > 0;) {
    bool ran = false;
    const int first = static_cast<int>(random_below(warps));
    for (int i = 0; i < warps; ++i) {
      const int warp = (first + i) % warps;
      if (asleep[warp] > 0) {
        --asleep[warp], ran = true;
        continue;
      }
      if (random_below(64) == 0) asleep[warp] = static_cast<int>(random_below(64));
      // At times a warp goes as far as it can, at times a step.
      for (unsigned rounds = random_below(4) ? 1 + random_below(8) : 1000; rounds > 0; --rounds) {
        const int lane = static_cast<int>(random_below(kWarp)), turn = random_below(2) ? 1 : kWarp - 1;
        bool moved = false;
        for (int j = 0; j < kWarp; ++j) {
          Thread& t = threads[current = static_cast<unsigned>(warp * kWarp + (lane + j * turn) % kWarp)];
          if (!ready(t)) continue;
          switch_fiber(&scheduler, t.place);
          if (!complaint.empty()) return complaint;
          left -= t.done, moved = true;
        }
        if (!moved) break;
        ran = true;
      }
      if (idle && idle(false)) ran = true;
    }
    if (!ran && left > 0 && !(idle && idle(true))) return who_waits(n);
  }
  return "";
}

}  // namespace fibers
