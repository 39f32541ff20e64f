// What a host needs to launch the CUDA kernels, without a CUDA header: the one parameter struct, and per kernel its symbol, its
// grid, block and dynamic shared memory as functions of the problem, and what it serves.
//
// Every kernel takes one strata_pa::cuda::Params by value, and exact a Rows after it (exact_tile_sm80.h; empty: all queries are asked for). It writes
// p.out (and p.lse unless null), allocates nothing and reads ids, widths, page table and scales on the device, so that a launch can be captured
// in a graph. One block answers one (query, KV head).
//
// | kernel | symbol                  | file          | least sm | serves                                                          |
// | ------ | ----------------------- | ------------- | -------- | --------------------------------------------------------------- |
// | fp32   | strata_fp32_d{D}_r{R}   | fp32_sm75.cu  | 75       | all; R = heads per KV head rounded up to 4, 8, 12, 16           |
// | v1     | strata_v1_d256_g64      | v1_sm75.cu    | 75       | head_dim 256, group 64, 12 heads per KV head                    |
// | v2     | strata_v2_d256_g64      | v2_sm80.cu    | 80       | head_dim 256, group 64, 12 heads per KV head                    |
// | imma   | strata_imma_d{D}_g{G}   | imma_sm80.cu  | 80       | all                                                             |
// | exact  | strata_exact_d{D}_g{G}  | exact_sm80.cu | 80       | all, lists of at most 2^24 entries                              |
//
// all: head_dim D 64, 128, 256; group G 32, 64, 128 or D; 1 to 16 heads per KV head; any page_size, ids or dense, causal or not,
// window, sequences, q and out in FP32, binary16, bfloat16. k and v (pointer and strides) are multiples of 16 bytes.
#pragma once
#include <cstdint>

namespace strata_pa {
namespace cuda {

constexpr int kMaxSequences = 64;  // of one launch; a host with more makes several launches

// Element strides of a pool. A page and a slot may be at most 2^31 - 1 elements apart.
struct PoolStride {
  int64_t head;
  int32_t page, slot;
};

struct Sequence {
  int32_t q_end;   // one past its last query, counted from the launch's first query
  int32_t kv_len;  // its last query sits at cell kv_len - 1
};

struct Params {
  const void* q;
  void* out;
  float* lse;  // or null
  const int8_t* k;
  const int8_t* v;
  const uint16_t* k_scale;
  const uint16_t* v_scale;
  const int32_t* page_table;
  const int32_t* ids;     // or null: every cell
  const int32_t* widths;  // or null: cap

  int64_t q_stride, q_head_stride, out_stride, out_head_stride, lse_stride;
  int64_t page_table_stride, ids_stride, ids_head_stride, widths_stride;
  PoolStride k_stride, v_stride, k_scale_stride, v_scale_stride;

  int32_t n_q, n_kv, heads_per_kv, group;
  int32_t pages, max_pages, page_size;
  uint32_t page_magic;  // cell / page_size = umulhi(cell, page_magic) >> page_shift; page_shift -1: page_size is 1
  int32_t page_shift;
  int32_t cap, granularity_log2;
  int32_t causal, window_left;
  int32_t dtype;       // of q and out: 0 FP32, 1 binary16, 2 bfloat16
  float score_scale;   // see score_scale() below
  int32_t max_entries; // upper bound of a list's length; exact alone reads it
  int32_t n_seq;
  Sequence seq[kMaxSequences];
};

// The two partial steps of exact, strata_exact_part_d{D}_g{G} (exact_part_sm80.cu), with the grid, block and shared memory of exact: C-contiguous
// [n_q][heads] and [n_q][heads][D]. L null: A and b are written. Otherwise they are read, and L and O written.
struct ExactPart {
  float *A, *b;
  int64_t *L, *O;
};

enum class KernelId : int { kFp32 = 0, kV1 = 1, kV2 = 2, kImma = 3, kExact = 4 };

struct Config {
  uint32_t grid, block, shared_bytes;  // grid and block are one-dimensional; above 48 KB the function's limit must be raised first
};

// Division of a cell index below 2^31 by page_size.
inline void set_page_size(Params& p, int32_t page_size) {
  p.page_size = page_size;
  int log = 0;
  while ((int64_t{1} << log) < page_size) ++log;
  p.page_shift = log - 1;
  p.page_magic = log == 0 ? 0 : static_cast<uint32_t>((uint64_t{1} << (31 + log)) / static_cast<uint32_t>(page_size) + 1);
}

// What the kernels multiply a score with. v1 and v2: the published FP32 product; the portable kernels: c of docs/numerics.md.
inline float score_scale(KernelId id, double sm_scale) {
  if (id == KernelId::kV1 || id == KernelId::kV2) return 1.4426950408889634f * static_cast<float>(sm_scale);
  return static_cast<float>(sm_scale * 0x1.71547652b82fep+0);
}

// Bytes of shared memory. The kernels carve it in the order of the terms.
namespace shared {
constexpr uint32_t kTileRow = 80;  // 64 bytes of a cell in a padded tile
constexpr uint32_t kSources = 96;   // the block's query and KV head
constexpr uint32_t kScoreRow = 36, kSplitRow = 40;  // floats of a row of 32 scores, padded

// v1, v2: K and V tiles, partial scores [4][12], e [16], entries' places [2][32], two scale rows per warp, words, Sources.
constexpr uint32_t split() { return 2 * 4 * 32 * kTileRow + (4 * 12 + 16) * kSplitRow * 4 + 2 * 32 * 8 + 2 * 4 * 32 * 4 + 4 * 16 * 4 + kSources; }

// imma, exact: K and V tiles, partial scores [partials][16] and e [16], k_scale and v_scale [groups], entries' places [2][32], q's tops
// [16][D / 32] and factors [16][groups], five words per row, feeders, masks, Sources. Partials: one array per group, or two per warp
// where a group spans several warps.
constexpr uint32_t partials(uint32_t dim, uint32_t group) { return group <= 64 ? dim / group : 2 * (dim / 64); }
constexpr uint32_t digits(uint32_t dim, uint32_t group) {
  return 2 * (dim / 64) * 32 * 64 + (partials(dim, group) + 1) * 16 * kScoreRow * 4 +
         2 * (dim / group) * kScoreRow * 4 + 2 * 32 * 8 + (16 * (dim / 32) + 16 * (dim / group)) * 4 + 5 * 16 * 4 + 32 * 12 + 4 * 4 + kSources;
}
// exact adds 64-bit sums where a list is too long for 32-bit planes.
constexpr uint32_t kPlaneEntries = 65536;
constexpr uint32_t exact(uint32_t dim, uint32_t group, int64_t max_entries) {
  return digits(dim, group) + (max_entries > kPlaneEntries ? 16 * dim * 8 : 0);
}

// fp32: q [dim][rows], weights [128][rows], partial scores [4 rows][64], places in k and v [128], eight words per row, Sources, k_scale and
// v_scale [128][groups].
constexpr uint32_t fp32(uint32_t dim, uint32_t group, uint32_t rows) {
  return dim * rows * 4 + 128 * rows * 4 + 4 * rows * 64 * 4 + 2 * 128 * 8 + 8 * 16 * 4 + kSources + 2 * 128 * (dim / group) * 4;
}
}  // namespace shared

inline Config config(KernelId id, const Params& p, int32_t head_dim) {
  uint32_t dim = static_cast<uint32_t>(head_dim), group = static_cast<uint32_t>(p.group), rows = static_cast<uint32_t>(p.heads_per_kv);
  Config c{static_cast<uint32_t>(p.n_q) * static_cast<uint32_t>(p.n_kv), 0, 0};
  switch (id) {
    case KernelId::kFp32:
      c.block = 64;
      c.shared_bytes = shared::fp32(dim, group, (rows + 3) / 4 * 4);
      break;
    case KernelId::kV1:
    case KernelId::kV2:
      c.block = 128;
      c.shared_bytes = shared::split();
      break;
    case KernelId::kImma:
      c.block = dim / 2;
      c.shared_bytes = shared::digits(dim, group);
      break;
    case KernelId::kExact:
      c.block = dim / 2;
      c.shared_bytes = shared::exact(dim, group, p.max_entries);
      break;
  }
  return c;
}

}  // namespace cuda
}  // namespace strata_pa
