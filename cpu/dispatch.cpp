// Which instruction-set path runs, and the threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "core/arith.h"
#include "cpu/job.h"
#ifdef STRATA_PA_X86
#include <cpuid.h>
#endif

namespace strata_pa::cpu {
namespace {

#ifdef STRATA_PA_X86
// By cpuid and xgetbv: __builtin_cpu_supports is not to be had from every tool-chain.
struct Features {
  bool avx2 = false, avxvnni = false, avx512 = false;
  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
    if (!osxsave) return;
    unsigned lo, hi;
    __asm__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    const bool ymm = (lo & 0x6) == 0x6, zmm = (lo & 0xe6) == 0xe6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = ymm && fma && f16c && (b >> 5 & 1);
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
    avx512 = avx2 && zmm && f && dq && bw && vl && vnni;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) avxvnni = avx2 && (a >> 4 & 1);
  }
};
#endif

const std::vector<Path>& paths() {
  static const std::vector<Path> all = [] {
    std::vector<Path> v{kScalarPath};
    v[0].isa.supported = true;
#ifdef STRATA_PA_X86
    const Features f;
    v.insert(v.end(), {kAvx2Path, kAvxVnniPath, kAvx512Path});
    v[1].isa.supported = f.avx2;
    v[2].isa.supported = f.avxvnni;
    v[3].isa.supported = f.avx512;
#endif
    return v;
  }();
  return all;
}

const Path& path_of(const Isa& isa) {
  for (const Path& p : paths())
    if (&isa == &p.isa || std::string(isa.name) == p.isa.name) return p;
  return paths()[0];
}

Job make_job(const Problem& p, const RunOptions& options) {
  const float c = static_cast<float>(p.sm_scale * kLog2E);
  return {&p, &options, static_cast<int>(p.heads_per_kv()), static_cast<int>(p.head_dim), static_cast<int>(p.group), static_cast<int>(p.groups()), c};
}

// Tiles, the longest first within a sequence, so that threads end together.
std::vector<Tile> make_tiles(const Problem& p, int threads) {
  const int64_t heads = p.heads_per_kv();
  int64_t nq_max = p.ids ? 1 : kMaxTileRows / heads;
  // Small calls: rather more tiles than full ones.
  while (nq_max > 1 && (p.n_q + nq_max - 1) / nq_max * p.n_kv < 4 * threads) nq_max = (nq_max + 1) / 2;
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < p.n_seq; ++s) {
    const int64_t first = p.cu_seqlens_q[s], n = p.cu_seqlens_q[s + 1] - first, kv_len = p.kv_len[s];
    for (int64_t q1 = n; q1 > 0;) {
      const int64_t q0 = q1 > nq_max ? q1 - nq_max : 0;
      Tile t;
      t.seq = static_cast<int>(s);
      t.q0 = first + q0;
      t.nq = q1 - q0;
      t.pos0 = kv_len - n + q0;
      t.begin = 0;
      if (p.ids) {
        t.end = (p.widths ? p.widths[t.q0 * p.widths_stride] : p.cap) * p.granularity;
      } else {
        t.end = p.causal ? std::max<int64_t>(0, std::min(kv_len, kv_len - n + q1)) : kv_len;
        if (p.window_left >= 0) t.begin = std::max<int64_t>(0, std::min(t.end, t.pos0 - p.window_left)) / kBlock * kBlock;
      }
      for (t.head = 0; t.head < p.n_kv; ++t.head) tiles.push_back(t);
      q1 = q0;
    }
  }
  return tiles;
}

struct AlignedBytes {
  explicit AlignedBytes(int64_t bytes) : data(static_cast<char*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64}))) {}
  ~AlignedBytes() { ::operator delete(data, std::align_val_t{64}); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  char* data;
};

int64_t tile_bytes(const Path& path, Kernel kernel, const Job& job, const std::vector<Tile>& tiles) {
  int64_t most = 0, rows = -1, entries = -1;
  for (const Tile& t : tiles) {
    const int64_t r = t.nq * job.heads, e = t.end - t.begin;
    if (r == rows && e == entries) continue;
    rows = r, entries = e;
    most = std::max(most, path.scratch(kernel, job, static_cast<int>(r), e));
  }
  return most;
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = [] {
    std::vector<Isa> v;
    for (const Path& p : paths()) v.push_back(p.isa);
    return v;
  }();
  return all;
}

const Isa& best_isa() {
  const Isa* best = &isas().front();
  for (const Isa& isa : isas())
    if (isa.supported) best = &isa;
  return *best;
}

const Isa* find_isa(const std::string& name) {
  for (const Isa& isa : isas())
    if (name == isa.name) return &isa;
  return nullptr;
}

int64_t scratch_bytes(Kernel kernel, const Problem& p, const Isa& isa, const RunOptions& options) {
  const Job job = make_job(p, options);
  const std::vector<Tile> tiles = make_tiles(p, options.num_threads);
  const int64_t threads = std::min<int64_t>(options.num_threads, static_cast<int64_t>(tiles.size()));
  return threads * tile_bytes(path_of(isa), kernel, job, tiles);
}

int64_t dot_peak(const Isa& isa, int64_t rounds) {
  alignas(64) char bytes[128] = {1};
  const Path& path = path_of(isa);
  return path.peak ? path.peak(rounds, bytes) : 0;
}

void run(Kernel kernel, const Problem& p, const Isa& isa, const RunOptions& options) {
  const Job job = make_job(p, options);
  const Path& path = path_of(isa);
  const std::vector<Tile> tiles = make_tiles(p, options.num_threads);
  if (tiles.empty()) return;
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(options.num_threads, static_cast<int64_t>(tiles.size())));
  const int64_t bytes = tile_bytes(path, kernel, job, tiles);

  // All scratch is allocated before the first row is written, so that running out of memory leaves no half result.
  std::vector<std::unique_ptr<AlignedBytes>> scratch;
  for (int64_t i = 0; i < threads; ++i) scratch.push_back(std::make_unique<AlignedBytes>(bytes));
  std::atomic<size_t> next{0};
  auto work = [&](int64_t i) {
    for (size_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tiles.size();) path.run(kernel, job, tiles[t], scratch[static_cast<size_t>(i)]->data);
  };
  // Threads live for one call: nothing survives into a fork. One that cannot be started is not needed, only slower.
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(work, i);
  } catch (const std::system_error&) {
  }
  work(0);
  for (std::thread& t : others) t.join();
}

}  // namespace strata_pa::cpu
