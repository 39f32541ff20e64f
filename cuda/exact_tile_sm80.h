// What a host needs to launch the tiled form of exact on cards from sm_80: its workspace and the launches of one stream, which
// rows::plan lists in order. All take (Params, Rows) and are one-dimensional:
//
// | step    | symbol                       | block | what                                                                      |
// | ------- | ---------------------------- | ----- | ------------------------------------------------------------------------- |
// | kLists  | strata_rows_lists            | 512   | with ids: per item the union of its queries' cells, as records; one block |
// |         |                              |       | for all KV heads that share their lists                                   |
// | kCells  | strata_rows_cells            | 256   | without: records of every cell of the context, per KV head                |
// | kTiles  | strata_exact_rows_d{D}_g{G}  | 3D/2  | scores as words and anchors, the sums, or for each item one after another |
// | kRest   | strata_exact_d{D}_g{G}       | D/2   | the plain form, of the queries of flagged items alone                     |
//
// An item is a tile (neighbouring queries of one sequence: at most 48 rows) and a KV head; its cells go by 64. Where the items fill the card, a
// block takes one item after the other and keeps its scores in words of its own. Otherwise (few items, or contexts so long that every block's words
// would be too many) an item's cells are split over blocks, one launch for all scores of a round and one for its sums, which are added as
// integers; the last block of an item to be done writes it out. Flags are decided and read on the device: a cell twice in a list, scores out of the
// range of one word, values that are not finite. Nothing is allocated or read back.
#pragma once
#include "launch.h"

namespace strata_pa {
namespace cuda {

struct Rows {
  unsigned char* records;  // ids: [items of a round][kBefore + item_tiles], else [n_kv][kBefore + record_tiles]; of record_bytes each
  unsigned char* words;    // [blocks, or items of a round][item_tiles][kWordBytes]
  int32_t* counts;         // [items]: cells of an item; with ids
  int32_t* flags;          // [items]: 1: left to the last kernel
  int32_t* next;           // the next item for a block that is done with its first
  uint32_t* cleared;       // zeroed by the first kernel: tops, sums, outs, done
  uint32_t* tops;          // [2][items][kRows]: greatest score, greatest n + level, as ordered numbers; split only, as the next three
  unsigned long long* sums;  // [items of a round][kRows]: L
  unsigned long long* outs;  // [items of a round][kRows][D]: O
  int32_t* done;             // [items of a round]: splits that have added theirs
  int64_t cleared_bytes;
  int32_t queries, tiles;          // queries of a tile, tiles of all sequences
  int32_t item_tiles, record_tiles;  // of 64 cells
  int32_t first_item, end_item;    // of the round
  int32_t splits, phases;          // phases: 1 scores, 2 sums
  int32_t groups, record_bytes;    // of a cell's scales; of a record
  int32_t v_ahead;                 // how many records before its own a cell's place of V stands
  int32_t heads;                   // KV heads of a block that makes lists: all where they share theirs
  int32_t first_tile[kMaxSequences], first_record[kMaxSequences];
};

namespace rows {
constexpr int kRows = 48, kCells = 64, kListThreads = 512, kCellThreads = 256;
constexpr int kMostListQueries = 32;  // bits of a mask
// Of 64 cells: places of K in 16 bytes, masks, levels, k_scale [groups][64]; places of V, v_scale [groups][64]. The places are those of a later
// record, whose codes are copied when this one has landed: what a stage needs is one run of bytes.
constexpr int kMasks = 256, kLevels = 512, kScales = 768;
constexpr int v_places(int groups) { return kScales + 128 * groups; }
constexpr int record_bytes(int groups) { return 2 * v_places(groups) - kScales + 256; }
constexpr int kWordBytes = kRows * kCells * 4;
// Stages: codes and that run of a record, with the sums words as well.
constexpr int row_bytes(int dim) { return dim + 16; }
constexpr int score_stage(int dim, int groups) { return kCells * row_bytes(dim) + 256 + 512 + 128 * groups; }
constexpr int sum_stage(int dim, int groups) { return kCells * row_bytes(dim) + 256 + kWordBytes + 128 * groups; }
constexpr int kScoreStages = 4;
constexpr int sum_stages(int dim) { return dim == 256 ? 3 : 2; }
constexpr int kBefore = kScoreStages - 1;  // records before a list's first one, for places alone
constexpr int state_bytes(int dim) { return 4096 + 12 * dim; }
constexpr int stages_bytes(int dim, int groups) {
  const int scores = kScoreStages * score_stage(dim, groups), sums = sum_stages(dim) * sum_stage(dim, groups), digits = 3 * kRows * row_bytes(dim);
  return scores > sums ? (scores > digits ? scores : digits) : (sums > digits ? sums : digits);
}
constexpr int shared_bytes(int dim, int groups) { return stages_bytes(dim, groups) + state_bytes(dim); }
constexpr int blocks_per_processor(int dim) { return 256 / dim; }
constexpr int kListShared = 64 * 1024;      // of a window of the context's masks
struct Budget {  // bytes of the workspace for words, and with ids for records
  int64_t words = int64_t{1} << 30, records = int64_t{512} << 20;
};
constexpr int kMostUnitTiles = 1024;        // 65,536 cells: what int32 planes hold
constexpr int64_t kPlaceLimit = int64_t{1} << 36;

enum Step : int32_t { kLists = 0, kCellsOnly = 1, kTiles = 2, kRest = 3 };
struct Launch {
  Step step;
  uint32_t grid, block, shared_bytes;
};

inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Queries of sequence s in this launch.
inline int32_t queries_of(const Params& p, int s) {
  const int32_t begin = s ? p.seq[s - 1].q_end : 0, end = p.seq[s].q_end < p.n_q ? p.seq[s].q_end : p.n_q;
  return end > begin ? end - begin : 0;
}

// Fills all but the pointers and the round.
inline void shape(const Params& p, Rows& r) {
  const int32_t most = p.ids ? kMostListQueries : kRows;
  r.queries = kRows / p.heads_per_kv < most ? kRows / p.heads_per_kv : most;
  int64_t tiles = 0, records = 0, longest = 0;
  for (int s = 0; s < p.n_seq; ++s) {
    r.first_tile[s] = static_cast<int32_t>(tiles), r.first_record[s] = static_cast<int32_t>(records);
    const int32_t n = queries_of(p, s);
    const int64_t cells = ceil_div(p.seq[s].kv_len, kCells);
    tiles += ceil_div(n, r.queries), records += cells;
    if (n && cells > longest) longest = cells;
  }
  if (p.ids) {
    const int64_t listed = ceil_div(int64_t{r.queries} * p.cap << p.granularity_log2, kCells);
    if (listed < longest) longest = listed;
  } else if (p.causal && p.window_left >= 0) {
    const int64_t seen = ceil_div(int64_t{p.window_left} + r.queries, kCells) + 1;
    if (seen < longest) longest = seen;
  }
  r.tiles = static_cast<int32_t>(tiles);
  r.record_tiles = static_cast<int32_t>(records);
  r.item_tiles = static_cast<int32_t>(longest > 1 ? longest : 1);
}

// Does it serve the problem? pool_bytes: what the larger of k and v spans.
inline bool serves(const Params& p, int64_t pool_bytes, const Budget& budget = {}) {
  if (p.pages <= 0 || pool_bytes > kPlaceLimit) return false;
  Rows r;
  shape(p, r);
  return r.tiles > 0 && int64_t{r.item_tiles} * kWordBytes <= budget.words && int64_t{r.tiles} * p.n_kv < (int64_t{1} << 31);
}

// How long a launch of `items` of `tiles` each takes on `blocks` blocks, split into s: in tiles of one block.
inline int64_t cost(int64_t items, int64_t tiles, int64_t blocks, int64_t s) {
  return ceil_div(items * s, blocks) * (ceil_div(tiles, s) + 2 + (s > 1 ? 2 : 0));
}

// Calls launch(Launch, Rows) for each launch in order; returns the workspace's bytes. `at` may be null to ask for the size alone.
template <class F>
int64_t plan(const Params& p, int dim, int32_t processors, int32_t max_shared, uint32_t plain_shared, unsigned char* at, const F& launch,
             const Budget& budget = {}) {
  const int groups = dim / p.group;
  const bool lists = p.ids != nullptr;
  Rows r = {};
  shape(p, r);
  r.groups = groups, r.record_bytes = record_bytes(groups), r.v_ahead = sum_stages(dim) - 1;
  const int64_t items = int64_t{r.tiles} * p.n_kv, words = int64_t{r.item_tiles} * kWordBytes;
  int64_t per_processor = max_shared / (shared_bytes(dim, groups) + 1024);
  if (per_processor > blocks_per_processor(dim)) per_processor = blocks_per_processor(dim);
  if (per_processor < 1) per_processor = 1;
  const int64_t blocks = processors * per_processor;

  int64_t round = items;
  const int64_t list = (int64_t{kBefore} + r.item_tiles) * r.record_bytes;
  if (lists && round * list > budget.records) {
    round = budget.records / list;
    if (round < 1) round = 1;
  }
  int64_t splits = 1, best = cost(round, r.item_tiles, blocks, 1);
  bool together = (round < blocks ? round : blocks) * words <= budget.words && (lists || round == items) && r.item_tiles <= kMostUnitTiles;
  int64_t split_round = budget.words / words < round ? budget.words / words : round;
  int64_t least = ceil_div(r.item_tiles, kMostUnitTiles), split_best = -1;
  for (int64_t s = least; s <= r.item_tiles && s <= 4 * blocks; ++s) {
    const int64_t c = cost(split_round, r.item_tiles, blocks, s);
    if (split_best < 0 || c < split_best) split_best = c, splits = s;
    if (split_round * s > 8 * blocks && s > least) break;
  }
  if (together && (round >= 3 * blocks || best * ceil_div(items, round) <= split_best * ceil_div(items, split_round))) {
    splits = 1;
  } else {
    together = false;
    round = split_round;
  }
  r.splits = static_cast<int32_t>(splits);
  r.heads = lists && p.ids_head_stride == 0 && round >= p.n_kv && r.tiles >= processors && p.n_kv <= kListThreads ? p.n_kv : 1;
  round = round / r.heads * r.heads;

  int64_t used = 0;
  auto take = [&](int64_t bytes) { unsigned char* x = at + used; used += up(bytes, 256); return x; };
  r.records = take(lists ? round * list : p.n_kv * (int64_t{kBefore} + r.record_tiles) * r.record_bytes);
  r.words = take((together ? (round < blocks ? round : blocks) : round) * words);
  r.counts = reinterpret_cast<int32_t*>(take(lists ? items * 4 : 0));
  r.flags = reinterpret_cast<int32_t*>(take(items * 4));
  r.next = reinterpret_cast<int32_t*>(take(4));
  const int64_t begin = used;
  r.cleared = reinterpret_cast<uint32_t*>(at + begin);
  if (!together) {
    r.tops = reinterpret_cast<uint32_t*>(take(items * kRows * 8));
    if (splits > 1) {
      r.sums = reinterpret_cast<unsigned long long*>(take(round * kRows * 8));
      r.outs = reinterpret_cast<unsigned long long*>(take(round * kRows * dim * 8));
      r.done = reinterpret_cast<int32_t*>(take(round * 4));
    }
  }
  r.cleared_bytes = used - begin;

  const uint32_t threads = static_cast<uint32_t>(dim / 2 * 3), shared = static_cast<uint32_t>(shared_bytes(dim, groups));
  for (int64_t first = 0; first < items; first += round) {
    const int64_t end = first + round < items ? first + round : items;
    r.first_item = static_cast<int32_t>(first), r.end_item = static_cast<int32_t>(end);
    if (lists) launch(Launch{kLists, static_cast<uint32_t>((end - first) / r.heads), kListThreads, kListShared}, r);
    else if (first == 0) launch(Launch{kCellsOnly, static_cast<uint32_t>((1 + r.record_tiles * kCells / kCellThreads) * p.n_kv), kCellThreads, 0}, r);
    if (together) {
      r.phases = 3;
      launch(Launch{kTiles, static_cast<uint32_t>(end - first < blocks ? end - first : blocks), threads, shared}, r);
      continue;
    }
    for (int phase = 1; phase <= 2; ++phase) {
      r.phases = phase;
      launch(Launch{kTiles, static_cast<uint32_t>((end - first) * splits), threads, shared}, r);
    }
  }
  r.first_item = 0, r.end_item = static_cast<int32_t>(items);
  launch(Launch{kRest, static_cast<uint32_t>(p.n_q) * static_cast<uint32_t>(p.n_kv), static_cast<uint32_t>(dim / 2), plain_shared}, r);
  return used;
}
}  // namespace rows

}  // namespace cuda
}  // namespace strata_pa
