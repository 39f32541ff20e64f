// The threads of a GPU's block on one CPU thread: each is a fiber with a stack of its own that runs until it waits for others. Who runs next is a matter
// of chance, by a seed: warps run ahead of each other, lanes take turns in any order.
#pragma once
#include <string>

namespace fibers {

constexpr int kMostThreads = 1024;

extern unsigned current;  // the number of the thread that runs

// A place where `size` threads come together, again and again; the last one does the work on what all of them brought.
struct Meeting {
  void* brought[kMostThreads];
  int arrived = 0;
  unsigned held = 0;  // so often
  const char* what = nullptr;
};
using Work = void (*)(void* const* brought);
void meet(Meeting& m, int index, int size, const char* what, void* mine = nullptr, Work work = nullptr, const void* pc = nullptr);

// Where a warp meets: every lane's x, by its place in the warp. Good until the warp's next exchange.
const int* exchange(Meeting& m, int x, const char* what, const void* pc = nullptr);

// Until x is no longer `value`. what, pc: for a complaint.
void wait_while(const unsigned& x, unsigned value, const char* what, const void* pc = nullptr);
std::string place(const void* pc);  // in its library: "@0x1234"

// Ends the run.
[[noreturn]] void fail(const std::string& complaint);

unsigned random_below(unsigned n);
bool on_a_stack(const void* at);

// Runs `body` once in each thread. idle: called now and then, and with `stuck` where all threads wait: it returns whether it changed something. "": all
// threads came to their end; else what went wrong.
std::string run(int threads, void (*body)(), bool (*idle)(bool stuck));
void seed(unsigned number);

}  // namespace fibers
