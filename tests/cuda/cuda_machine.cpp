// Runs the blocks of a CUDA kernel on a CPU, one after another (nothing in these kernels waits for another block; what one has written by plain stores, no
// other block of the launch may touch by plain accesses). A block's shared memory begins as noise; copies arrive when they are waited for; memory_order.cpp
// knows which accesses nothing orders, and which lack a fence.
#include "cuda_on_cpu.h"

#include <link.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/half.h"
#include "cuda/exact_tile_sm80.h"
#include "cuda/launch.h"
#include "cuda/partial_launch.h"
#include "cuda/quantize_launch.h"
#include "cuda/tile_launch.h"
#include "fibers.h"
#include "memory_order.h"

using fibers::fail;
using memory_order::kRead;
using memory_order::kWrite;

namespace {

constexpr uint32_t kMostShared = 227 << 10, kBeyond = 4096;  // beyond: nobody's
constexpr unsigned char kNoise = 0xa5;
constexpr int kPoison = 0x5eed5eed;  // of a register that wgmma has not written yet
#define HERE __builtin_return_address(0)  // where a kernel calls the machine

}  // namespace

// Every name that a kernel gives its dynamic shared memory.
extern "C" {
alignas(1024) thread_local unsigned char dynamic_shared[kMostShared + kBeyond];
}
#define NAMED(type, name, symbol) extern thread_local type name[] __asm__(symbol) __attribute__((alias("dynamic_shared")))
NAMED(unsigned char, raw_tile_, "_ZN9strata_pa4cuda8raw_tileE");
NAMED(unsigned char, raw_shared_, "_ZN9strata_pa4cuda10raw_sharedE");
NAMED(unsigned char, raw_rows_, "_ZN9strata_pa4cuda8raw_rowsE");
NAMED(uint4, seen_, "_ZN9strata_pa4cuda4seenE");

namespace {

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
  unsigned thread;  // that issued it,
  uint32_t time;    // then
  const void* pc;
  int group;  // kBulk: it is a bulk copy
};
constexpr int kBulk = -1;

struct Thread {
  std::vector<Copy> copies;  // under way
  int groups;                // committed
};

// Arrivals that come later: of bulk copies, and of threads' copies.
struct Late {
  uint32_t barrier;
  std::vector<Copy> copies;
  int arrivals;
};

struct Barrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;
  unsigned phase = 0;
  std::vector<Copy> here, done;  // copies of the phase; of phases that are over, to be seen by those who wait
  memory_order::Clock arrived, completed[2];
};

struct Sums {  // of a wgmma that is not waited for
  std::vector<int> x;
  int* registers[128];
  int open;  // products
};
struct Order {
  machine::Product of[128];
  int n, group;
  std::vector<unsigned char> a, b;  // as they were
  const void* pc;
};
struct Warpgroup {
  std::vector<Order> orders;
  std::map<int*, Sums> sums;  // by the first thread's registers
  int committed, registers;
  bool fenced;
};

fibers::Meeting block_meeting, warp_meetings[fibers::kMostThreads / 32], group_meetings[fibers::kMostThreads / 128];
struct Named {
  int arrived, size;
  unsigned held;
  memory_order::Clock clocks[2];
} named[16];
unsigned syncwarps[fibers::kMostThreads / 32];
memory_order::Clock block_clocks[2], warp_clocks[fibers::kMostThreads / 32][2];
Thread threads[fibers::kMostThreads];
Warpgroup warpgroups[fibers::kMostThreads / 128];
std::map<uint32_t, Barrier> barriers;
std::vector<Late> late;
uint32_t shared_bytes;
int free_registers;
unsigned registers_changed;
const unsigned char *image, *image_end, *own_memory, *own_memory_end;  // of this library: its variables; a block's shared memory, static or not
bool (*owns)(const void*, size_t);

Thread& me() { return threads[fibers::current]; }
std::string number(const char* what, int64_t x) { return std::string(what) + std::to_string(x); }

// ---- copies

// Copies bring noise where they go, until they arrive.
void depart(const Copy& c) {
  memory_order::access(c.from, c.bytes, c.group == kBulk ? memory_order::kAsyncRead : kRead, c.pc);
  memory_order::access(dynamic_shared + c.to, c.bytes, kWrite, c.pc);
  std::memset(dynamic_shared + c.to, kNoise, c.bytes);
}
void arrive(const Copy& c, uint32_t time) {
  memory_order::access(dynamic_shared + c.to, c.bytes, c.group == kBulk ? memory_order::kAsyncWrite : kWrite, c.pc, c.thread, time);
  std::memcpy(dynamic_shared + c.to, c.from, c.bytes);
}

// ---- barriers

Barrier& barrier(uint32_t at) {
  auto found = barriers.find(at);
  if (found == barriers.end()) fail(number("there is no mbarrier at ", at));
  return found->second;
}
void check(Barrier& b, uint32_t at) {
  if (b.pending < 0) fail(number("more arrivals than it waits for at the mbarrier at ", at));
  if (b.pending > 0 || b.bytes != 0) return;
  b.pending = b.count;
  b.done.insert(b.done.end(), b.here.begin(), b.here.end());
  b.here.clear();
  b.completed[b.phase & 1] = b.arrived;
  ++b.phase;
}
void arrive_late(size_t i) {
  const Late l = late[i];
  late.erase(late.begin() + static_cast<std::ptrdiff_t>(i));
  Barrier& b = barrier(l.barrier);
  for (const Copy& c : l.copies) {
    b.here.push_back(c);
    if (c.group == kBulk) b.bytes -= c.bytes;
  }
  b.pending -= l.arrivals;
  check(b, l.barrier);
}
bool idle(bool stuck) {
  bool any = false;
  while (!late.empty() && (stuck || fibers::random_below(3) == 0)) {
    arrive_late(fibers::random_below(static_cast<unsigned>(late.size())));
    any = true;
    if (stuck) break;
  }
  return any;
}

// ---- wgmma

int warpgroup() { return static_cast<int>(fibers::current) / 128; }
Warpgroup& group() { return warpgroups[warpgroup()]; }

// Rows of 32 bytes of a matrix in shared memory, K-major, by its descriptor: f(place of 16 bytes, which).
template <class F>
void each_part(uint64_t descriptor, int rows, F f) {
  const uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4, mode = static_cast<uint32_t>(descriptor >> 62);
  const uint32_t pitch = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 0;
  if (!pitch) fail("a matrix that is not swizzled: the machine does not know it");
  if (descriptor >> 49 & 7) fail("a matrix with a base offset: the machine does not know it");
  if ((start & (8 * pitch - 1)) >= pitch) fail(number("a matrix must begin where its swizzle does; this one begins at ", start));
  for (int r = 0; r < rows; ++r)
    for (uint32_t part = 0; part < 32; part += 16) {
      uint32_t at = start + static_cast<uint32_t>(r / 8) * stride + static_cast<uint32_t>(r % 8) * pitch + part;
      at ^= at >> 3 & (pitch - 16);
      if (at + 16 > shared_bytes) fail(number("a matrix past the end of shared memory, at ", at));
      f(at, static_cast<size_t>(r) * 32 + part);
    }
}
std::vector<unsigned char> matrix(uint64_t descriptor, int rows) {
  std::vector<unsigned char> x(static_cast<size_t>(rows) * 32);
  each_part(descriptor, rows, [&x](uint32_t at, size_t to) { std::memcpy(&x[to], dynamic_shared + at, 16); });
  return x;
}
// A warp's reads are its first lane's.
void note_read(const Order& o) {
  const machine::Product& p = o.of[0];
  for (int warp = 0; warp < 4; ++warp) {
    const unsigned thread = static_cast<unsigned>(warpgroup() * 128 + warp * 32);
    auto read = [&](uint32_t at, size_t) { memory_order::access(dynamic_shared + at, 16, memory_order::kAsyncRead, o.pc, thread, memory_order::now(thread)); };
    each_part(p.b, p.n, read);
    if (!p.held)
      each_part(p.a, 64, [&](uint32_t at, size_t to) {
        if (static_cast<int>(to) / 32 / 16 == warp) read(at, to);
      });
  }
}
std::vector<unsigned char> rows_of_a(const machine::Product* of) {
  if (!of[0].held) return matrix(of[0].a, 64);
  std::vector<unsigned char> x(64 * 32);
  for (int t = 0; t < 128; ++t)
    for (int r = 0; r < 4; ++r) std::memcpy(&x[(t / 32 * 16 + t % 32 / 4 + 8 * (r & 1)) * 32 + (r >> 1) * 16 + t % 4 * 4], &of[t].held[r], 4);
  return x;
}

int product(const unsigned char* a, bool a_signed, const unsigned char* b, bool b_signed) {
  int16_t x[32], y[32];
  for (int k = 0; k < 32; ++k) x[k] = a_signed ? static_cast<int8_t>(a[k]) : a[k], y[k] = b_signed ? static_cast<int8_t>(b[k]) : b[k];
  int sum = 0;
  for (int k = 0; k < 32; ++k) sum += x[k] * y[k];
  return sum;
}

// A thread's register u of a result: row and column.
int row_of(int t, int u) { return t / 32 * 16 + t % 32 / 4 + (u & 2) * 4; }
int column_of(int t, int u) { return u / 4 * 8 + t % 4 * 2 + (u & 1); }

void order(void* const* all) {
  Warpgroup& g = group();
  Order o;
  for (int t = 0; t < 128; ++t) o.of[t] = *static_cast<machine::Product*>(all[t]);
  const machine::Product& p = o.of[0];
  for (const machine::Product& q : o.of)
    if (q.n != p.n || q.a != p.a || q.b != p.b || q.more != p.more || !q.held != !p.held) fail("wgmma: its threads do not agree");
  if (p.n % 8 != 0 || p.n > 256) fail(number("wgmma of so many columns: ", p.n));
  if (!g.fenced) fail("wgmma without wgmma_fence after the last wgmma_commit");
  o.n = p.n, o.group = g.committed, o.pc = p.pc;
  o.a = rows_of_a(o.of), o.b = matrix(p.b, p.n);
  auto [found, is_new] = g.sums.try_emplace(p.d);
  Sums& s = found->second;
  if (is_new) {
    s.open = 0, s.x.resize(128 * static_cast<size_t>(p.n) / 2);
    for (int t = 0; t < 128; ++t) {
      s.registers[t] = o.of[t].d;
      for (int u = 0; u < p.n / 2; ++u) s.x[static_cast<size_t>(t * (p.n / 2) + u)] = std::exchange(o.of[t].d[u], kPoison);
    }
  }
  if (s.x.size() != 128 * static_cast<size_t>(p.n) / 2) fail("wgmma: registers of another product that is under way");
  ++s.open;
  note_read(o);
  g.orders.push_back(std::move(o));
}

void finish(Warpgroup& g, const Order& o) {
  const machine::Product& p = o.of[0];
  if (rows_of_a(o.of) != o.a || matrix(p.b, p.n) != o.b) fail("wgmma: its operands were changed before it was waited for");
  note_read(o);
  Sums& s = g.sums.at(p.d);
  const int held = p.n / 2;
  std::vector<int> x(64 * static_cast<size_t>(p.n));
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < p.n; ++c) x[static_cast<size_t>(r * p.n + c)] = product(&o.a[static_cast<size_t>(r * 32)], p.a_signed, &o.b[static_cast<size_t>(c * 32)], p.b_signed);
  for (int t = 0; t < 128; ++t)
    for (int u = 0; u < held; ++u) {
      int& sum = s.x[static_cast<size_t>(t * held + u)];
      sum = (p.more ? sum : 0) + x[static_cast<size_t>(row_of(t, u) * p.n + column_of(t, u))];
    }
  if (--s.open > 0) return;
  for (int t = 0; t < 128; ++t)
    for (int u = 0; u < held; ++u) {
      if (s.registers[t][u] != kPoison) fail("wgmma: its sums were touched before it was waited for");
      s.registers[t][u] = s.x[static_cast<size_t>(t * held + u)];
    }
  g.sums.erase(p.d);
}

}  // namespace

namespace machine {

unsigned block_index, block_threads, blocks;

float half_to_float(uint16_t h) { return strata_pa::half_to_float(h); }
uint16_t float_to_half(float x) { return strata_pa::float_to_half(x); }

void check_global(const void* at, size_t bytes) {
  if (owns && !owns(at, bytes)) fail(number("global memory that nobody has allocated, bytes: ", static_cast<int64_t>(bytes)));
  if (reinterpret_cast<uintptr_t>(at) % std::min<size_t>(bytes, 16)) fail(number("an address in global memory that is not a multiple of ", static_cast<int64_t>(bytes)));
}
unsigned char* shared(uint32_t at, uint32_t bytes, uint32_t alignment) {
  if (at > shared_bytes || bytes > shared_bytes - at) fail(number("past the end of shared memory, at ", at));
  if (at % alignment) fail(number("an address in shared memory that is not a multiple of ", alignment) + number(": ", at));
  return dynamic_shared + at;
}
uint32_t shared_place(const void* at) {
  const auto place = static_cast<const unsigned char*>(at) - dynamic_shared;
  if (place < 0 || place > static_cast<std::ptrdiff_t>(shared_bytes)) fail("the address of something that is not in dynamic shared memory");
  return static_cast<uint32_t>(place);
}

void meet_warp(const char* what, void* mine, Work work, const void* pc) {
  fibers::meet(warp_meetings[fibers::current / 32], static_cast<int>(fibers::current % 32), 32, what, mine, work, pc ? pc : HERE);
}
void meet_warpgroup(const char* what, void* mine, Work work, const void* pc) {
  if (block_threads % 128) fail(std::string(what) + " in a block that is not made of warpgroups");
  fibers::meet(group_meetings[fibers::current / 128], static_cast<int>(fibers::current % 128), 128, what, mine, work, pc);
}
void block_barrier() {
  memory_order::Clock& clock = block_clocks[block_meeting.held & 1];
  memory_order::release(clock);
  fibers::meet(block_meeting, static_cast<int>(fibers::current), static_cast<int>(block_threads), "a barrier of the block", nullptr, nullptr, HERE);
  memory_order::acquire(clock);
}
// Nobody comes again before the last one has gone.
struct {
  unsigned came;
  int x, result;
} any;
int block_any(int x) {
  any.x = (any.came == 0 ? 0 : any.x) | (x != 0);
  if (++any.came == block_threads) any.came = 0, any.result = any.x;
  block_barrier();
  return any.result;
}
void warp_barrier() {
  const unsigned warp = fibers::current / 32;
  memory_order::Clock& clock = warp_clocks[warp][syncwarps[warp] & 1];
  memory_order::release(clock);
  meet_warp("a barrier of the warp", nullptr, [](void* const*) { ++syncwarps[fibers::current / 32]; }, HERE);
  memory_order::acquire(clock);
}
void named_barrier(int n, int threads, bool wait) {
  if (n < 1 || n > 15 || threads % 32 || threads > static_cast<int>(block_threads)) fail(number("no such barrier: ", n));
  Named& b = named[n];
  if (b.arrived > 0 && b.size != threads) fail(number("threads do not agree how many meet at barrier ", n));
  b.size = threads;
  static char names[16][16];
  std::snprintf(names[n], sizeof names[n], "barrier %d", n);
  memory_order::Clock& clock = b.clocks[b.held & 1];
  memory_order::release(clock);
  if (++b.arrived == threads) b.arrived = 0, ++b.held;
  else if (wait) fibers::wait_while(b.held, b.held, names[n], HERE);
  if (wait) memory_order::acquire(clock);
}
const int* exchange(int x) { return fibers::exchange(warp_meetings[fibers::current / 32], x, "an exchange of the warp", HERE); }
void copy16(uint32_t to, const void* from) {
  shared(to, 16, 16);
  check_global(from, 16);
  me().copies.push_back({to, from, 16, fibers::current, memory_order::now(fibers::current), HERE, me().groups});
  depart(me().copies.back());
}
void commit_copies() { ++me().groups; }
void land_copies(int newer) {
  Thread& t = me();
  auto last = std::find_if(t.copies.begin(), t.copies.end(), [&](const Copy& c) { return c.group >= t.groups - newer; });
  for (auto i = t.copies.begin(); i != last; ++i) arrive(*i, memory_order::now(fibers::current));
  t.copies.erase(t.copies.begin(), last);
}

void barrier_init(uint32_t at, int count) {
  shared(at, 8, 8);
  barriers[at] = {};
  barriers[at].count = barriers[at].pending = count;
}
void barrier_arrive(uint32_t at, uint32_t bytes) {
  Barrier& b = barrier(at);
  memory_order::release(b.arrived);
  b.bytes += bytes;
  --b.pending;
  check(b, at);
}
void barrier_wait(uint32_t at, uint32_t parity) {
  Barrier& b = barrier(at);
  static std::map<uint32_t, std::string> names;
  std::string& name = names[at];
  if (name.empty()) name = number("the mbarrier at ", at);
  while ((b.phase & 1) == (parity & 1)) fibers::wait_while(b.phase, b.phase, name.c_str(), HERE);
  memory_order::acquire(b.completed[parity & 1]);
  for (const Copy& c : b.done) arrive(c, c.time);
  b.done.clear();
}
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t at) {
  shared(to, bytes, 16);
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) fail("a bulk copy that is not of multiples of 16");
  if (owns && !owns(from, bytes)) fail("a bulk copy from memory that nobody has allocated");
  const Copy c{to, from, bytes, fibers::current, memory_order::now(fibers::current), HERE, kBulk};
  depart(c);
  memory_order::release(barrier(at).arrived);
  late.push_back({at, {c}, 0});
}
void arrive_when_copied(uint32_t at) {
  memory_order::release(barrier(at).arrived);
  late.push_back({at, std::exchange(me().copies, {}), 1});
}
void fence_async(bool of_shared_memory_alone) { memory_order::fence(of_shared_memory_alone); }

void ldmatrix(uint32_t* r, uint32_t row, bool transposed) {
  struct Lane {
    uint32_t* r;
    uint32_t row;
    bool transposed;
  } mine{r, row, transposed};
  memory_order::access(shared(row, 16, 16), 16, kRead, HERE);
  meet_warp("ldmatrix", &mine, [](void* const* all) {
    for (int i = 0; i < 4; ++i) {
      uint16_t x[8][8];
      for (int j = 0; j < 8; ++j) std::memcpy(x[j], dynamic_shared + static_cast<Lane*>(all[i * 8 + j])->row, 16);
      for (int l = 0; l < 32; ++l) {
        Lane& lane = *static_cast<Lane*>(all[l]);
        const int a = l / 4, b = l % 4 * 2;
        lane.r[i] = lane.transposed ? x[b][a] | static_cast<uint32_t>(x[b + 1][a]) << 16 : x[a][b] | static_cast<uint32_t>(x[a][b + 1]) << 16;
      }
    }
  });
}

void mma(int* d, const uint32_t* a, uint32_t b0, uint32_t b1, const int* c, bool a_signed) {
  struct Lane {
    int* d;
    const uint32_t* a;
    uint32_t b[2];
    const int* c;
  } mine{d, a, {b0, b1}, c};
  static const auto work = [](void* const* all, bool is_signed) {
    alignas(64) unsigned char x[16][32], y[8][32];
    for (int l = 0; l < 32; ++l) {
      const Lane& lane = *static_cast<Lane*>(all[l]);
      for (int r = 0; r < 4; ++r) std::memcpy(&x[l / 4 + 8 * (r & 1)][(r >> 1) * 16 + l % 4 * 4], &lane.a[r], 4);
      for (int r = 0; r < 2; ++r) std::memcpy(&y[l / 4][r * 16 + l % 4 * 4], &lane.b[r], 4);
    }
    int sums[16][8];
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) sums[i][j] = product(x[i], is_signed, y[j], true);
    for (int l = 0; l < 32; ++l) {
      const Lane& lane = *static_cast<Lane*>(all[l]);
      for (int u = 0; u < 4; ++u) lane.d[u] = lane.c[u] + sums[l / 4 + (u & 2) * 4][l % 4 * 2 + (u & 1)];
    }
  };
  if (a_signed) meet_warp("mma s8 s8", &mine, [](void* const* all) { work(all, true); });
  else meet_warp("mma u8 s8", &mine, [](void* const* all) { work(all, false); });
}

void wgmma(Product p) {
  p.pc = HERE;
  meet_warpgroup("wgmma", &p, order, HERE);
}
void wgmma_fence() {
  meet_warpgroup("wgmma_fence", nullptr, [](void* const*) { group().fenced = true; }, HERE);
}
void wgmma_commit() {
  meet_warpgroup("wgmma_commit", nullptr, [](void* const*) { ++group().committed, group().fenced = false; }, HERE);
}
void wgmma_wait(int newer) {
  meet_warpgroup("the wait for wgmma", &newer, [](void* const* all) {
    Warpgroup& g = group();
    const int until = g.committed - *static_cast<int*>(all[0]);
    auto last = std::find_if(g.orders.begin(), g.orders.end(), [until](const Order& o) { return o.group >= until; });
    for (auto i = g.orders.begin(); i != last; ++i) finish(g, *i);
    g.orders.erase(g.orders.begin(), last);
    // The lanes of a warp know of its reads.
    for (unsigned first = static_cast<unsigned>(warpgroup()) * 128, w = 0; w < 4; ++w, first += 32) memory_order::tell(first, first, first + 32);
  }, HERE);
}
void set_registers(int count, bool more) {
  Warpgroup& g = group();
  if (count % 8 || count < 24 || count > 256) fail(number("a warpgroup cannot have so many registers: ", count));
  meet_warpgroup("setmaxnreg", nullptr, nullptr, HERE);
  if (fibers::current % 128 == 0) {
    const int extra = (count - g.registers) * 128;
    if (more ? extra < 0 : extra > 0) fail(number("setmaxnreg goes the wrong way, to ", count));
    while (extra > free_registers) fibers::wait_while(registers_changed, registers_changed, "registers that others give back", HERE);
    free_registers -= extra, g.registers = count;
    ++registers_changed;
  }
  meet_warpgroup("setmaxnreg's end", nullptr, nullptr, HERE);
}

}  // namespace machine

namespace {

using strata_pa::cuda::ExactPart;
using strata_pa::cuda::Params;
using strata_pa::cuda::PartialParams;
using strata_pa::cuda::QuantizeParams;
using strata_pa::cuda::Rows;
using strata_pa::cuda::Tiles;

void* kernel;
void** arguments;
std::string answer;

template <class... P, size_t... i>
void call_with(std::index_sequence<i...>) {
  reinterpret_cast<void (*)(P...)>(kernel)(*static_cast<P*>(arguments[i])...);
  memory_order::end();
}
template <class... P>
void call() {
  call_with<P...>(std::index_sequence_for<P...>());
}
// With a kernel's parameters, by its name.
void (*body_of(const std::string& name))() {
  auto begins = [&name](const char* with) { return name.compare(0, std::strlen(with), with) == 0; };
  if (begins("strata_partial_")) return call<PartialParams>;
  if (begins("strata_quantize")) return call<QuantizeParams>;
  if (begins("strata_tile_") || begins("strata_exact_tile_") || begins("strata_exact_rest_")) return call<Params, Tiles>;
  if (begins("strata_exact_part_")) return call<Params, ExactPart>;
  if (begins("strata_rows_") || begins("strata_exact_")) return call<Params, Rows>;
  return call<Params>;
}

// All shared memory: the thread_local variables of this library.
void fill_with_noise() {
  dynamic_shared[0] = 0;  // so that they are there
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      auto* const at = static_cast<unsigned char*>(info->dlpi_tls_data);
      if (part.p_type != PT_TLS || !at || dynamic_shared < at || dynamic_shared >= at + part.p_memsz) continue;
      std::memset(at, kNoise, part.p_memsz);
      own_memory = at, own_memory_end = at + part.p_memsz;
      image = reinterpret_cast<const unsigned char*>(info->dlpi_addr), image_end = image;
      for (int j = 0; j < info->dlpi_phnum; ++j)
        if (const auto& p = info->dlpi_phdr[j]; p.p_type == PT_LOAD) image_end = std::max(image_end, image + p.p_vaddr + p.p_memsz);
    }
    return 0;
  }, nullptr);
}

// Global memory by 4 bytes: which block of the launch wrote there by a plain store, last.
std::unordered_map<uintptr_t, unsigned> written;
void between_blocks(const void* at, uint32_t bytes, bool writes, const void* pc) {
  const auto begin = reinterpret_cast<uintptr_t>(at);
  for (uintptr_t a = begin & ~uintptr_t{3}; a < begin + bytes; a += 4) {
    const auto found = written.find(a);
    if (found != written.end() && found->second != machine::block_index)
      fail(std::string(writes ? "writes (" : "reads (") + fibers::place(pc) + number(") what another block of the launch has written, block ", found->second));
    if (writes) written[a] = machine::block_index;
  }
}

// What a kernel reads and writes by itself.
void plain(const void* at, uint32_t bytes, memory_order::Kind kind, const void* pc) {
  const auto* const place = static_cast<const unsigned char*>(at);
  if (fibers::on_a_stack(at) || (place >= image && place < image_end)) return;
  if (place >= dynamic_shared && place < dynamic_shared + sizeof dynamic_shared) {
    machine::shared(static_cast<uint32_t>(place - dynamic_shared), bytes, 1);
  } else if (place < own_memory || place >= own_memory_end) {
    machine::check_global(at, bytes);
    if (kind == kRead || kind == kWrite) between_blocks(at, bytes, kind == kWrite, pc);
  }
  memory_order::access(at, bytes, kind, pc);
}

}  // namespace

namespace machine {
void atomic(void* at, size_t bytes, const void* pc) { plain(at, static_cast<uint32_t>(bytes), memory_order::kAtomic, pc); }
}  // namespace machine

// The kernels are compiled as for ThreadSanitizer, whose calls come here.
extern "C" {
void __tsan_init() {}
#define SEEN_BY_SIZE(n)                                                                \
  void __tsan_read##n(void* at) { plain(at, n, kRead, HERE); }                         \
  void __tsan_write##n(void* at) { plain(at, n, kWrite, HERE); }                       \
  void __tsan_volatile_read##n(void* at) { plain(at, n, memory_order::kVolatileRead, HERE); } \
  void __tsan_volatile_write##n(void* at) { plain(at, n, memory_order::kAtomic, HERE); } \
  void __tsan_unaligned_read##n(void* at) { plain(at, n, kRead, HERE); }               \
  void __tsan_unaligned_write##n(void* at) { plain(at, n, kWrite, HERE); }
SEEN_BY_SIZE(1)
SEEN_BY_SIZE(2)
SEEN_BY_SIZE(4)
SEEN_BY_SIZE(8)
SEEN_BY_SIZE(16)
void __tsan_read_range(void* at, size_t bytes) { plain(at, static_cast<uint32_t>(bytes), kRead, HERE); }
void __tsan_write_range(void* at, size_t bytes) { plain(at, static_cast<uint32_t>(bytes), kWrite, HERE); }
}

// "": done. Otherwise what went wrong.
extern "C" const char* run_on_cpu(void* function, const char* name, void** parameters, unsigned grid, unsigned block, unsigned shared, unsigned seed,
                                  bool (*is_allocated)(const void*, size_t)) {
  if (shared > kMostShared) return "that much shared memory";
  kernel = function, arguments = parameters, owns = is_allocated, shared_bytes = shared;
  machine::block_threads = block, machine::blocks = grid;
  fibers::seed(seed);
  written.clear();
  for (machine::block_index = 0; machine::block_index < grid; ++machine::block_index) {
    fill_with_noise();
    memory_order::begin(block, dynamic_shared, shared_bytes);
    for (auto& clocks : warp_clocks) clocks[0] = clocks[1] = {};
    block_clocks[0] = block_clocks[1] = {};
    block_meeting = {}, machine::any = {};
    for (auto& m : warp_meetings) m = {};
    for (auto& m : group_meetings) m = {};
    for (Named& n : named) n = {};
    for (Thread& t : threads) t = {{}, 0};
    for (Warpgroup& g : warpgroups) g = {{}, {}, 0, std::min(65536 / static_cast<int>(block) / 8 * 8, 248), false};
    free_registers = 0;
    barriers.clear(), late.clear();
    answer = fibers::run(static_cast<int>(block), body_of(name), idle);
    if (answer.empty() && !late.empty()) answer = "copies that nobody waits for, to an mbarrier";
    for (const Warpgroup& g : warpgroups)
      if (answer.empty() && !g.orders.empty()) answer = "wgmma that nobody waits for";
    if (!answer.empty()) {
      answer = number("block ", machine::block_index) + ": " + answer;
      return answer.c_str();
    }
  }
  return "";
}
