// What the fake drivers of both vendors share: they report the cards they are told to have, record launches, and fail where they are told to.
// Device memory is host memory; a launch calls a function of the test, which may compute the answer.
#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Launch {
  int ordinal;
  unsigned grid, block, shared;
  uint64_t stream;
  char symbol[64];
};
struct Failure {
  std::string call, symbol;  // symbol: a prefix; "": any
  int status, skip;
};

std::recursive_mutex mutex;
std::vector<Launch> launches;
std::vector<Failure> failures;
std::map<std::string, int> calls;
std::map<uint64_t, std::pair<uint64_t, int>> memory;  // address -> bytes, ordinal
int (*hook)(const Launch*, void**) = nullptr;
thread_local int capture_mode = 0;

int enter(const char* call, const std::string& symbol = "") {
  ++calls[call];
  for (Failure& f : failures)
    if (f.call == call && symbol.compare(0, f.symbol.size(), f.symbol) == 0 && f.skip-- <= 0) return f.status;
  return 0;
}

#define ENTER(...)                                       \
  std::lock_guard<std::recursive_mutex> lock(mutex);     \
  if (int status = enter(__func__, std::string{__VA_ARGS__})) return status

// The card of an address, or -1.
int card_of(uint64_t address, size_t cards) {
  auto found = memory.upper_bound(address);
  if (found != memory.begin() && address < (--found)->first + found->second.first) return found->second.second;
  // Addresses that nothing stands behind: 2^40 for each card.
  const uint64_t ordinal = address >> 40;
  return ordinal < cards ? static_cast<int>(ordinal) : -1;
}
void* allocate(size_t bytes, int ordinal) {
  void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (p) memory[reinterpret_cast<uint64_t>(p)] = {bytes, ordinal};
  return p;
}
bool release(void* p) {
  if (!memory.erase(reinterpret_cast<uint64_t>(p))) return false;
  std::free(p);
  return true;
}
int record(int ordinal, unsigned grid, unsigned block, unsigned shared, void* stream, const std::string& symbol, void** parameters) {
  Launch l = {ordinal, grid, block, shared, reinterpret_cast<uint64_t>(stream), {}};
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    std::strncpy(l.symbol, symbol.c_str(), sizeof l.symbol - 1);
    launches.push_back(l);
  }
  return hook ? hook(&l, parameters) : 0;
}

}  // namespace

EXPORT void fake_fail(const char* call, const char* symbol, int status, int skip) { failures.push_back({call, symbol, status, skip}); }
EXPORT void fake_heal() { failures.clear(); }
EXPORT void fake_hook(int (*f)(const Launch*, void**)) { hook = f; }
// Is all of it device memory that was allocated?
EXPORT bool fake_owns(const void* at, size_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto address = reinterpret_cast<uint64_t>(at);
  auto found = memory.upper_bound(address);
  return found != memory.begin() && address + bytes <= (--found)->first + found->second.first;
}
EXPORT int fake_calls(const char* call) { return calls[call]; }
EXPORT int fake_launches() { return static_cast<int>(launches.size()); }
EXPORT const Launch* fake_launch(int i) { return &launches[i]; }
EXPORT void fake_forget() { launches.clear(), calls.clear(); }
EXPORT int fake_allocations() { return static_cast<int>(memory.size()); }
EXPORT int fake_capture_mode() { return capture_mode; }
