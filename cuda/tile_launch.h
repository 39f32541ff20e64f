// What a host needs to launch the tiled form of exact for sm_90 (head_dim D 64, 128, 256, groups of 64 dims): its workspace and the launches of one
// stream, which tile::plan lists in order. All take (Params, Tiles) and are one-dimensional:
//
// | step    | symbol                            | block      | what                                                                                |
// | ------- | --------------------------------- | ---------- | ----------------------------------------------------------------------------------- |
// | kUnion  | union_symbol()                    | 512        | with ids: per item the union of its queries' cells, as records of 64 cells          |
// | kCells  | strata_tile_cells                 | 256        | without: records of every cell of the context, per KV head                          |
// | kTile   | strata_exact_tile_d{D}_g64        | threads(D) | items one after another, each by one block                                          |
// | kScores | strata_exact_tile_scores_d{D}_g64 | threads(D) | or a round of items, the cells of each split over blocks: scores and anchors' maxima |
// | kSums   | strata_exact_tile_sums_d{D}_g64   | threads(D) | the sums of that round                                                              |
// | kRest   | strata_exact_rest_d{D}_g64        | D / 2      | the plain form, of flagged items alone                                              |
//
// An item is a tile (neighbouring queries, at most 48 rows) and a KV head. The last kernel answers the items that the others flag, query by query: a cell
// twice in a list, scores out of the range of one word, a scale of V with a minus sign, values that are not finite. Nothing is allocated or read back.
#pragma once
#include "launch.h"

namespace strata_pa {
namespace cuda {

struct Tiles {
  unsigned char* records;  // [items or n_kv][record_tiles][kRecordBytes]
  unsigned char* words;    // [blocks][block_tiles][kWordBytes]
  int32_t* counts;         // [items]: cells of an item; with ids
  int32_t* flags;          // [items]: 1: left to the last kernel
  int32_t* next;           // the next item for a block that is done with its first
  int32_t queries, tiles, blocks;
  int32_t record_tiles, block_tiles;  // of 64 cells: an item's records, what a block has of it at most
  int32_t window;                    // cells that the union looks at at once
  int32_t groups;                    // of a cell's scales
  int32_t listed;                    // cells of a window that it lists in shared memory; 0: too many
  int32_t heads;                     // KV heads of a block of it: all, where they share lists and the items are more than the processors
  int32_t writers;                   // blocks that make an item's union, each writes a part of the records
  int32_t splits, first_item;        // blocks of an item, 0: each item is one block's; the first item of a round. Split only, as all that follows
  uint32_t* tops;                    // [items][2][kRows]: kZeroBits + greatest n, greatest n + level; zeroed by the first kernel
  unsigned long long* sums;          // [items of a round][kRows]: L; zeroed by the scores' kernel, as the next two
  unsigned long long* outs;          // [items of a round][kRows][D]: O
  int32_t* done;                     // [items of a round]: blocks that have added theirs
};

namespace tile {
constexpr int kRows = 48;  // of an item
constexpr int kUnionThreads = 512, kCellsThreads = 256;
// Groups of 64 dims that the sums take at once, each with a warpgroup that multiplies and one's worth of weights. Where it is one, a processor has two
// blocks: the scores of one run beside the sums of the other. For more groups the words would be read as many times.
constexpr int at_once(int dim) { return dim == 64 ? 1 : 2; }
constexpr int resident(int dim) { return 2 / at_once(dim); }  // blocks of a processor
constexpr int threads(int dim) { return 256 * at_once(dim); }
constexpr int makers(int dim) { return 4 * at_once(dim); }  // warps that make weights
constexpr int halves(int dim) { return dim == 256 ? 2 : 1; }  // of 128 dims

// Of 64 cells: K's places in 16 bytes [64], k_scale [64][4], masks [64], levels [64], V's places [64], v_scale [4][64].
// All but the places of K in the order of word_place.
constexpr int kKScales = 256, kMasks = 768, kLevels = 1024, kVPlaces = 1280, kVScales = 1536, kRecordBytes = 2048;
constexpr int kWordBytes = kRows * 64 * 4;

// The scores: digits of q, then per warpgroup two stages of 64 cells: codes; of a record k_scale to levels, and places of a tile to come.
constexpr int kExtraBytes = 1024 + 256;
constexpr int score_stages(int dim) { return 4 * at_once(dim); }
constexpr int digit_bytes(int dim) { return halves(dim) * 3 * kRows * 128; }
constexpr int code_bytes(int dim) { return halves(dim) * 64 * 128; }
// The sums, in the same place: weights of 64 cells, bytes of each group of 64 dims by 48 rows. A warp makes half of them.
constexpr int weight_bytes(int dim) { return at_once(dim) * 4 * kRows * 64; }
constexpr int weight_slots(int dim) { return at_once(dim) == 1 ? 5 : 6; }  // as many as there is room for
// Behind them, per warp that makes weights, words of 32 cells and 48 rows, masks and scales.
constexpr int kStagedBytes = kWordBytes / 2 + 256;
constexpr int staged_at(int dim) { return weight_slots(dim) * weight_bytes(dim); }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int first_bytes(int dim) { return larger(digit_bytes(dim) + score_stages(dim) * (code_bytes(dim) + kExtraBytes), staged_at(dim) + makers(dim) * kStagedBytes); }
// Behind them V's codes of 64 cells by 64 dims, per multiplying warpgroup; the places of V of 64 cells, twice weight_slots times; and the state.
constexpr int kValueBytes = 64 * 64, kValueSlots = 3;
constexpr int kStateBytes = 5120;
constexpr int places_at(int dim) { return first_bytes(dim) + at_once(dim) * kValueSlots * kValueBytes; }
constexpr int state_at(int dim) { return places_at(dim) + 2 * weight_slots(dim) * 256; }
constexpr uint32_t shared_bytes(int dim) { return static_cast<uint32_t>(state_at(dim) + kStateBytes); }

constexpr int kMostWindow = 192 * 1024;    // bytes of a window of the context's masks, in the union
constexpr int kMostListed = 48 * 1024;     // bytes of its list
constexpr int kMostBlockTiles = 1024;      // 65,536 cells: 32-bit sums of 255 * 128 hold 65,793 terms
constexpr int64_t kMostWords = int64_t{2} << 30;  // bytes, of all blocks
constexpr int kMostSplits = 64;
constexpr int kMostWaves = 4;  // of the blocks that a card has room for: so many a round has at most; more items are not split where they need not be
constexpr int64_t kPlaceLimit = int64_t{1} << 36;

inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Of a cell's mask in the union; its top bit is free, or it is a whole word.
inline int32_t mask_bytes(const Tiles& t) { return t.queries <= 7 ? 1 : t.queries <= 15 ? 2 : 4; }

// How long it takes, in tiles of 64 cells of a block: `items` of `tiles` each, one block an item; or each over `splits` blocks, by rounds. An item's start and
// end take as long as kEnds tiles; longer with splits, which have two kernels and add their sums to memory.
constexpr int kEnds = 9, kSplitEnds = 12;
inline int64_t whole_cost(int64_t items, int64_t tiles, int64_t room) { return ceil_div(items, room) * (tiles + kEnds); }
inline int64_t split_cost(int64_t items, int64_t tiles, int64_t room, int64_t round, int64_t splits) {
  const int64_t full = items / round, others = items % round;
  return (full * ceil_div(round * splits, room) + ceil_div(others * splits, room)) * (ceil_div(tiles, splits) + kSplitEnds + splits / 8);
}

// Whether it serves a problem, and what of a plan follows from it. round: items of a round.
struct Shape {
  bool served = false;
  Tiles t = {};
  int64_t items = 0, round = 0;
};
// pool_bytes: what the larger of k and v spans.
inline Shape shape(const Params& p, int dim, int32_t processors, int64_t pool_bytes, int64_t most_words = kMostWords) {
  Shape s;
  const int64_t kv_len = p.seq[0].kv_len;
  if (p.group != 64 || p.heads_per_kv > kRows || p.n_seq != 1 || p.pages <= 0 || kv_len <= 0 || pool_bytes > kPlaceLimit) return s;
  Tiles& t = s.t;
  const int32_t most = kRows / p.heads_per_kv;
  t.queries = most < 32 ? most : 32;
  t.tiles = (p.n_q + t.queries - 1) / t.queries;
  t.groups = dim / 64;
  t.window = static_cast<int32_t>(up(kv_len, 16) * mask_bytes(t) < kMostWindow ? up(kv_len, 16) : kMostWindow / mask_bytes(t));
  int64_t seen = ceil_div(kv_len, 64), records = seen, likely = seen;  // likely: neighbours' lists are much alike
  if (p.ids) {
    const int64_t entries = int64_t{p.cap} << p.granularity_log2, listed = ceil_div(t.queries * entries, 64);
    if (listed < seen) seen = listed;
    records = seen, likely = ceil_div(entries, 64) < seen ? ceil_div(entries, 64) : seen;
  } else if (p.causal) {
    const int64_t reach = p.window_left < 0 ? seen : ceil_div(int64_t{p.window_left} + t.queries, 64) + 1;
    if (reach < seen) seen = reach;
    const int64_t mean = ceil_div(kv_len - (p.n_q < kv_len ? p.n_q : kv_len) / 2, 64);  // of the queries
    likely = mean < seen ? mean : seen;
  }
  t.record_tiles = static_cast<int32_t>(records);
  t.listed = records * 64 * 4 <= kMostListed && t.window * mask_bytes(t) + records * 64 * 4 <= kMostWindow ? t.record_tiles * 64 : 0;
  s.items = int64_t{t.tiles} * p.n_kv;
  t.heads = p.ids_head_stride == 0 && s.items > processors ? p.n_kv : 1;
  const int64_t parts = ceil_div(likely, 2 * kUnionThreads / 64), idle = processors / s.items;
  t.writers = static_cast<int32_t>(!t.listed || idle < 2 ? 1 : parts < idle ? parts : idle);

  const int64_t room = resident(dim) * processors, at_once = s.items < room ? s.items : room;
  int64_t best = -1;
  if (seen <= kMostBlockTiles && at_once * seen * kWordBytes <= most_words) {
    s.served = true, s.round = s.items;
    t.blocks = static_cast<int32_t>(at_once), t.block_tiles = static_cast<int32_t>(seen);
    if (s.items > kMostWaves * room) return s;
    best = whole_cost(s.items, likely, room);
  }
  for (int64_t splits = seen > kMostBlockTiles ? ceil_div(seen, kMostBlockTiles) : 1; splits <= kMostSplits && splits <= seen; ++splits) {
    const int64_t share = ceil_div(seen, splits), wave = room > splits ? room / splits : 1;  // items at once
    int64_t round = most_words / (splits * share * kWordBytes);
    if (round < 1) return s;
    if (s.served && s.items * splits > 2 * kMostWaves * room) break;
    if (round > kMostWaves * wave) round = kMostWaves * wave;
    if (round > wave) round = round / wave * wave;
    if (round > s.items) round = s.items;
    const int64_t cost = split_cost(s.items, likely, room, round, splits);
    if (best >= 0 && cost >= best) continue;
    best = cost, s.served = true, s.round = round;
    t.splits = static_cast<int32_t>(splits), t.blocks = static_cast<int32_t>(round * splits), t.block_tiles = static_cast<int32_t>(share);
  }
  return s;
}

inline uint32_t union_shared_bytes(const Tiles& t) { return static_cast<uint32_t>(t.window * mask_bytes(t) + t.listed * 4); }
inline const char* union_symbol(const Tiles& t) { return mask_bytes(t) == 1 ? "strata_tile_union8" : mask_bytes(t) == 2 ? "strata_tile_union16" : "strata_tile_union32"; }
inline uint32_t cells_grid(const Params& p) {
  return static_cast<uint32_t>(p.n_kv * ((p.seq[0].kv_len + kCellsThreads - 1) / kCellsThreads));
}
inline uint32_t union_grid(const Params& p, const Tiles& t) { return static_cast<uint32_t>(t.tiles * p.n_kv / t.heads * t.writers); }
inline uint32_t rest_grid(const Params& p, const Tiles& t, int32_t processors) {  // two blocks per processor
  const int64_t items = int64_t{t.tiles} * p.n_kv;
  return static_cast<uint32_t>(items < 2 * processors ? items : 2 * processors);
}

enum Step : int32_t { kUnion = 0, kCells = 1, kTile = 2, kScores = 3, kSums = 4, kRest = 5 };
struct Launch {
  Step step;
  uint32_t grid, block, shared_bytes;
};

// Of a problem that it serves, with its shape: calls launch(Launch, Tiles) for each launch in order; returns the workspace's bytes. `at` may be null to ask for the
// size alone. plain_shared: what the plain form takes.
template <class F>
int64_t plan(const Params& p, int dim, int32_t processors, const Shape& s, uint32_t plain_shared, unsigned char* at, const F& launch) {
  Tiles t = s.t;
  int64_t used = 0;
  auto take = [&](int64_t bytes) { unsigned char* x = at + used; used += up(bytes, 256); return x; };
  t.records = take((p.ids ? s.items : p.n_kv) * t.record_tiles * kRecordBytes);
  t.words = take(int64_t{t.blocks} * t.block_tiles * kWordBytes);
  t.counts = reinterpret_cast<int32_t*>(take(s.items * 4));
  t.flags = reinterpret_cast<int32_t*>(take(s.items * 4));
  t.next = reinterpret_cast<int32_t*>(take(4));
  if (t.splits) {
    t.tops = reinterpret_cast<uint32_t*>(take(s.items * kRows * 8));
    t.sums = reinterpret_cast<unsigned long long*>(take(s.round * kRows * 8));
    t.outs = reinterpret_cast<unsigned long long*>(take(s.round * kRows * dim * 8));
    t.done = reinterpret_cast<int32_t*>(take(s.round * 4));
  }
  if (p.ids) launch(Launch{kUnion, union_grid(p, t), kUnionThreads, union_shared_bytes(t)}, t);
  else launch(Launch{kCells, cells_grid(p), kCellsThreads, 0}, t);
  const uint32_t block = static_cast<uint32_t>(threads(dim));
  if (!t.splits) launch(Launch{kTile, static_cast<uint32_t>(t.blocks), block, shared_bytes(dim)}, t);
  for (int64_t first = 0; t.splits && first < s.items; first += s.round) {
    const int64_t items = s.items - first < s.round ? s.items - first : s.round;
    t.first_item = static_cast<int32_t>(first);
    const uint32_t grid = static_cast<uint32_t>(items * t.splits);
    launch(Launch{kScores, grid, block, shared_bytes(dim)}, t), launch(Launch{kSums, grid, block, shared_bytes(dim)}, t);
  }
  launch(Launch{kRest, rest_grid(p, t, processors), static_cast<uint32_t>(dim / 2), plain_shared}, t);
  return used;
}
}  // namespace tile

}  // namespace cuda
}  // namespace strata_pa
