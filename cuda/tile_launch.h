// What a host needs to launch the tiled form of exact: its workspace, and four launches on one stream, in this order:
//
// | symbol                       | grid                     | block | dynamic shared memory | parameters      | when            |
// | ---------------------------- | ------------------------ | ----- | --------------------- | --------------- | --------------- |
// | strata_tile_union            | union_grid()             | 512   | kv_len, rounded to 16 | Params, Tiles   | ids             |
// | strata_tile_cells            | n_kv * ceil(kv_len/256)  | 256   | 0                     | Params, Tiles   | no ids          |
// | strata_exact_tile_d256_g64   | Tiles::blocks            | 384   | kSharedBytes          | Params, Tiles   | always          |
// | strata_exact_rest_d256_g64   | rest_grid()              | 128   | that of exact         | Params, Tiles   | always          |
//
// An item is a tile (kQueries neighbouring queries) and a KV head. The first kernel writes, per item or, without ids, per KV head, one record
// per 64 cells. The last one answers the items that the others flag, query by query: a cell twice in a list, more cells than kept, scores out of
// the range of one word, values that are not finite. Nothing is allocated or read back.
#pragma once
#include "launch.h"

namespace strata_pa {
namespace cuda {

struct Tiles {
  unsigned char* records;  // [items or n_kv][item_cells / 64][kRecordBytes]
  uint32_t* scores;        // [blocks][item_cells / 64][48][64]
  int32_t* counts;         // [items]: cells of an item
  int32_t* flags;          // [items]: 1: left to the last kernel
  int32_t* next;           // the next item for a block that is done with its first
  int64_t item_cells;      // kept per item, a multiple of 64
  int32_t tiles, blocks;
};

namespace tile {
constexpr int kQueries = 4, kHeads = 12, kRows = kQueries * kHeads;
constexpr int kThreads = 384, kUnionThreads = 512, kCellsThreads = 256;
// Of 64 cells: K's places in 16 bytes [64], k_scale [64][4], levels with masks [64], V's places [64], v_scale [4][64].
constexpr int kKScales = 256, kLevels = 768, kVPlaces = 1024, kVScales = 1280, kRecordBytes = 1792;
// A stage: 64 cells of codes, their scores, and of a record k_scale and levels, or v_scale.
constexpr int kCodeBytes = 64 * 256, kWordBytes = kRows * 64 * 4, kStageBytes = kCodeBytes + kWordBytes + 1024, kStages = 6;
constexpr int kDigitBytes = 3 * kRows * 256;
constexpr uint32_t kSharedBytes = kDigitBytes + kStages * kStageBytes + 8192;
constexpr int64_t kMostCells = 196608;     // of a context with ids: a byte each in shared memory
constexpr int64_t kMostEntries = 65536;    // that a query sees: 32-bit sums of 255 * 128 hold 65,793 terms
constexpr int64_t kMostDense = 16384;      // of a context without ids: the scores of all blocks stay below half a gigabyte
constexpr int64_t kPlaceLimit = int64_t{1} << 36;

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Does it serve the problem? head_dim 256 is known. pool_bytes: what the larger of k and v spans.
inline bool serves(const Params& p, int64_t pool_bytes) {
  if (p.seq[0].kv_len > kMostEntries && int64_t{p.cap} << p.granularity_log2 > kMostEntries) return false;
  return p.group == 64 && p.heads_per_kv == kHeads && p.n_seq == 1 && p.pages > 0 && p.seq[0].kv_len > 0 && pool_bytes <= kPlaceLimit &&
         p.seq[0].kv_len <= (p.ids ? kMostCells : kMostDense);
}

// Sets all of t; returns the workspace's bytes. t's pointers are offsets from `at`, which may be null to ask for the size alone.
inline int64_t plan(const Params& p, int32_t processors, unsigned char* at, Tiles& t) {
  t.tiles = (p.n_q + kQueries - 1) / kQueries;
  const int64_t items = int64_t{t.tiles} * p.n_kv, kv_len = p.seq[0].kv_len;
  const int64_t most = kQueries * (int64_t{p.cap} << p.granularity_log2);
  t.item_cells = round_up(p.ids && most < kv_len ? most : kv_len, 64);
  t.blocks = static_cast<int32_t>(items < processors ? items : processors);
  int64_t used = 0;
  auto take = [&](int64_t bytes) { unsigned char* x = at + used; used += round_up(bytes, 256); return x; };
  t.records = take((p.ids ? items : p.n_kv) * (t.item_cells / 64) * kRecordBytes);
  t.scores = reinterpret_cast<uint32_t*>(take(t.blocks * (t.item_cells / 64) * kWordBytes));
  t.counts = reinterpret_cast<int32_t*>(take(items * 4));
  t.flags = reinterpret_cast<int32_t*>(take(items * 4));
  t.next = reinterpret_cast<int32_t*>(take(4));
  return used;
}

inline uint32_t union_shared_bytes(const Params& p) { return static_cast<uint32_t>(round_up(p.seq[0].kv_len, 16)); }
inline uint32_t cells_grid(const Params& p) {
  return static_cast<uint32_t>(p.n_kv * ((p.seq[0].kv_len + kCellsThreads - 1) / kCellsThreads));
}
inline uint32_t union_grid(const Params& p, const Tiles& t) { return static_cast<uint32_t>(p.ids_head_stride == 0 ? t.tiles : t.tiles * p.n_kv); }
inline uint32_t rest_grid(const Params& p, const Tiles& t, int32_t processors) {  // two blocks per processor
  const int32_t most = 2 * processors / p.n_kv > 0 ? 2 * processors / p.n_kv : 1;
  return static_cast<uint32_t>((t.tiles < most ? t.tiles : most) * p.n_kv);
}
}  // namespace tile

}  // namespace cuda
}  // namespace strata_pa
