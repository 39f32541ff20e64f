// The cells of exact's tiles: the union of the lists of neighbouring queries, each cell with a bit per query that sees it, and what a tile
// needs of each: places of its codes, scales, level (docs/numerics.md, section 5). See tile_launch.h.
#pragma once
#include "common.cuh"
#include "tile_launch.h"

namespace strata_pa {
namespace cuda {

// The cells that a query may see.
struct Span {
  int first, last;
  __device__ Span(const Params& p, int index) {
    const int kv_len = p.seq[0].kv_len, pos = kv_len - p.seq[0].q_end + index;
    last = p.causal && pos < kv_len ? pos : kv_len - 1;
    first = p.window_left >= 0 && pos > p.window_left ? pos - p.window_left : 0;
  }
};

// Levels stand as FP32 numbers; a cell that has a scale that is not finite has one that cannot be.
constexpr float kBadLevel = 1000.0f, kLeastLevel = -1000.0f;

// A cell's place among the words of its 16: a thread of the scores holds cells i and i + 8 and stores them side by side.
__device__ __forceinline__ int word_place(int i) { return (i & ~15) + (i & 7) * 2 + (i >> 3 & 1); }
// V's cells lie so that the fragments of V (transposed by ldmatrix) and of the weights agree; `place`: among the words.
__device__ __forceinline__ int v_row(int place) { return (place & ~15) + (place >> 1 & 1) * 8 + (place >> 2 & 3) * 2 + (place & 1); }

// A cell's scales: 1, 2 or 4 neighbours.
__device__ __forceinline__ uint2 load_scales(const uint16_t* at, int groups) {
  if (groups == 4 && (reinterpret_cast<uintptr_t>(at) & 7) == 0) return __ldg(reinterpret_cast<const uint2*>(at));
  uint2 x = make_uint2(__ldg(at), 0);
  if (groups > 1) x.x |= static_cast<uint32_t>(__ldg(at + 1)) << 16;
  if (groups > 2) x.y = __ldg(at + 2) | static_cast<uint32_t>(__ldg(at + 3)) << 16;
  return x;
}
__device__ __forceinline__ bool any_not_finite(uint2 h) {
  auto pair = [](uint32_t x) { return (x & 0x7c00u) == 0x7c00u || (x & 0x7c000000u) == 0x7c000000u; };
  return pair(h.x) || pair(h.y);
}

// Physical page of a cell, -1 where it is masked.
__device__ __forceinline__ int page_of(const Params& p, int cell) {
  if (cell < 0) return -1;
  const int page = p.page_shift < 0 ? cell : static_cast<int>(__umulhi(static_cast<uint32_t>(cell), p.page_magic) >> p.page_shift);
  const int physical = page < p.max_pages ? __ldg(p.page_table + page) : -1;
  return static_cast<uint32_t>(physical) < static_cast<uint32_t>(p.pages) ? physical : -1;
}

// A cell's part of its record. False: a scale is not finite.
__device__ __forceinline__ bool write_cell(const Params& p, unsigned char* record, int i, Place at, uint32_t mask, uint2 ks, uint2 vs, int groups) {
  const bool bad = any_not_finite(ks) || any_not_finite(vs);
  if (bad) ks = vs = make_uint2(0, 0);
  const uint32_t top2 = __vmaxu2(vs.x & 0x7fff7fffu, vs.y & 0x7fff7fffu), top = max(top2 & 0xffff, top2 >> 16);
  const float f = half_to_float(static_cast<uint16_t>(top));
  const float level = top == 0 ? kLeastLevel : static_cast<float>(((__float_as_int(f) + 0x7fffff) >> 23) - 127);
  reinterpret_cast<uint32_t*>(record)[i] = static_cast<uint32_t>(offset(p.k_stride, at) >> 4);
  reinterpret_cast<uint2*>(record + tile::kKScales)[i] = ks;
  reinterpret_cast<uint32_t*>(record + tile::kMasks)[i] = mask;
  reinterpret_cast<float*>(record + tile::kLevels)[i] = bad ? kBadLevel : level;
  const int place = word_place(i);
  reinterpret_cast<uint32_t*>(record + tile::kVPlaces)[v_row(place)] = static_cast<uint32_t>(offset(p.v_stride, at) >> 4);
  uint16_t* const v = reinterpret_cast<uint16_t*>(record + tile::kVScales) + place;
  v[0] = static_cast<uint16_t>(vs.x);
  if (groups > 1) v[64] = static_cast<uint16_t>(vs.x >> 16);
  if (groups > 2) v[128] = static_cast<uint16_t>(vs.y), v[192] = static_cast<uint16_t>(vs.y >> 16);
  return !bad || mask == 0;
}

// Writes N cells' parts of the records of the KV heads first_kv .. end_kv - 1: entries i, i + step, ... below `end`. records: the first one's;
// they are `apart` bytes apart. flags: the first one's, set where a scale is not finite, or null.
template <int N>
__device__ __forceinline__ void write_cells(const Params& p, int first_kv, int end_kv, unsigned char* records, int64_t apart, int i, int step, int end,
                                            const int (&cell)[N], const uint32_t (&mask)[N], int groups, int32_t* flags) {
  int page[N];
  Place at[N];
#pragma unroll
  for (int u = 0; u < N; ++u) page[u] = page_of(p, cell[u]);
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const int logical = p.page_shift < 0 ? cell[u] : static_cast<int>(__umulhi(static_cast<uint32_t>(cell[u]), p.page_magic) >> p.page_shift);
    at[u] = page[u] >= 0 ? Place{page[u], cell[u] - logical * p.page_size} : Place{0, 0};
  }
  constexpr int H = 2;  // heads whose scales are on their way at once
  for (int kv = first_kv; kv < end_kv; kv += H, records += H * apart) {
    uint2 ks[H][N], vs[H][N];
#pragma unroll
    for (int h = 0; h < H; ++h)
#pragma unroll
      for (int u = 0; u < N; ++u) {
        ks[h][u] = vs[h][u] = make_uint2(0, 0);
        if (page[u] >= 0 && kv + h < end_kv) {
          ks[h][u] = load_scales(p.k_scale + (kv + h) * p.k_scale_stride.head + offset(p.k_scale_stride, at[u]), groups);
          vs[h][u] = load_scales(p.v_scale + (kv + h) * p.v_scale_stride.head + offset(p.v_scale_stride, at[u]), groups);
        }
      }
#pragma unroll
    for (int h = 0; h < H; ++h)
#pragma unroll
      for (int u = 0; u < N; ++u) {
        const int entry = i + u * step;
        if (entry >= end || kv + h >= end_kv) continue;
        unsigned char* const record = records + h * apart + static_cast<int64_t>(entry >> 6) * tile::kRecordBytes;
        if (!write_cell(p, record, entry & 63, at[u], page[u] >= 0 ? mask[u] : 0, ks[h][u], vs[h][u], groups) && flags) flags[kv - first_kv + h] = 1;
      }
  }
}

// One block per item, or per tile where all KV heads have the same lists. The context goes by windows; in each, a mask of 1 << size bytes per cell
// gathers the queries' bits. A cell twice in a list shows as fewer bits than entries.
template <int size>
__device__ __forceinline__ void union_kernel(const Params& p, const Tiles& w) {
  extern __shared__ uint4 seen[];
  __shared__ int places[16][8], surplus, sum;  // per warp and kind of cell
  constexpr int kThreads = tile::kUnionThreads, kWidth = 8 << size;
  const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
  const int heads = p.ids_head_stride == 0 ? p.n_kv : 1, item = static_cast<int>(blockIdx.x) * heads;
  const int kv = item % p.n_kv, first_query = (w.tiles - 1 - item / p.n_kv) * w.queries, end_query = min(first_query + w.queries, p.n_q);
  const int64_t apart = static_cast<int64_t>(w.record_tiles) * tile::kRecordBytes;
  unsigned char* const records = w.records + item * apart;
  auto slot = [&](int i) { return reinterpret_cast<uint32_t*>(records + static_cast<int64_t>(i >> 6) * tile::kRecordBytes + tile::kMasks) + (i & 63); };
  if (tid == 0) {
    surplus = 0;
    if (item == 0) *w.next = 0;
  }
  // Cells of a kind lie together, so that tiles of 64 have few: a tile's rows that see none of its cells are left out later, and where all rows see
  // all cells nobody looks at masks. A kind: a bit for each third of the tile's rows; 7 where all queries see it, 0 where but a part of all thirds does.
  const int third = (w.groups == 1 ? 2 : 1) * tile::kRows / 3;
  auto queries_of = [&](int i) {
    const int first = i * third / p.heads_per_kv, last = ((i + 1) * third - 1) / p.heads_per_kv;
    return (last < 31 ? (2u << last) - 1 : ~0u) & (first < 32 ? ~0u << first : 0);
  };
  const uint32_t bits[3] = {queries_of(0), queries_of(1), queries_of(2)}, every = end_query - first_query < 32 ? (1u << end_query - first_query) - 1 : ~0u;
  const int end_cell = Span(p, end_query - 1).last + 1, begin_cell = Span(p, first_query).first;
  int extra = 0, total = 0;  // entries less bits; cells
#pragma unroll 1
  for (int base = begin_cell / w.window * w.window; base < end_cell; base += w.window) {
    const int chunks = ((min(w.window, p.seq[0].kv_len - base) << size) + 15) >> 4;
    __syncthreads();
    for (int i = tid; i < chunks; i += kThreads) seen[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    constexpr int kAtOnce = 4, U = 2;
#pragma unroll 1
    for (int query = first_query; query < end_query; query += kAtOnce) {
      int count[kAtOnce], most = 0;
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int index = min(query + r, p.n_q - 1);
        count[r] = p.widths ? __ldg(p.widths + index * p.widths_stride) : p.cap;
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const Span span(p, query + r);
        count[r] = query + r >= end_query || span.last < span.first ? 0 : max(0, min(count[r], p.cap)) << p.granularity_log2;
        most = max(most, count[r]);
      }
#pragma unroll 1
      for (int e = tid; e < most; e += U * kThreads) {
        int raw[U][kAtOnce];
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r) {
            const int at = e + u * kThreads;
            raw[u][r] = at < count[r] ? __ldg(p.ids + (query + r) * p.ids_stride + kv * p.ids_head_stride + (at >> p.granularity_log2)) : -1;
          }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const Span span(p, query + r);
#pragma unroll
          for (int u = 0; u < U; ++u) {
            if (static_cast<uint32_t>(raw[u][r]) > static_cast<uint32_t>(span.last >> p.granularity_log2)) continue;
            const int cell = (raw[u][r] << p.granularity_log2) + (e + u * kThreads & (1 << p.granularity_log2) - 1), at = cell - base;
            if (cell < span.first || cell > span.last || static_cast<uint32_t>(at) >= static_cast<uint32_t>(w.window)) continue;
            ++extra;
            atomicOr(reinterpret_cast<uint32_t*>(seen) + (at >> (2 - size)), 1u << ((at & (3 >> size)) * kWidth + query - first_query + r));
          }
        }
      }
    }
    __syncthreads();
    // Which of a word's cells are seen: the top bit of each, which no mask has, or of a whole word the lowest one.
    auto present = [](uint32_t x) -> uint32_t { return size == 0 ? x + 0x7f7f7f7fu & 0x80808080u : size == 1 ? x + 0x7fff7fffu & 0x80008000u : x != 0; };
    // Calls f with every cell that is seen, its mask and its kind.
    auto each_cell = [&](auto f) {
      for (int i = tid; i < chunks; i += kThreads) {
        const uint4 x = seen[i];
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          for (uint32_t found = present(words[j]); found; found &= found - 1) {
            const int from = (__ffs(found) - 1) / kWidth * kWidth;
            const uint32_t mask = size == 2 ? words[j] : words[j] >> from & (1u << (kWidth & 31)) - 1;
            const int kind = (mask & bits[0] ? 1 : 0) | (mask & bits[1] ? 2 : 0) | (mask & bits[2] ? 4 : 0);
            f(base + (i * 4 + j << 2 - size) + from / kWidth, mask, kind == 7 && mask != every ? 0 : kind);
          }
      }
    };
    // Eight counts of 16 bits; a warp has at most 32 x 384 cells.
    unsigned long long low = 0, high = 0;
    auto count_of = [&](int kind) { return static_cast<int>((kind & 4 ? high : low) >> (kind & 3) * 16 & 0xffff); };
    auto add = [&](int kind) {
      const unsigned long long one = 1ull << (kind & 3) * 16;
      low += kind & 4 ? 0 : one, high += kind & 4 ? one : 0;
    };
    each_cell([&](int, uint32_t mask, int kind) {
      add(kind);
      extra -= static_cast<int>(__popc(mask));
    });
    const unsigned long long own[2] = {low, high};
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const unsigned long long x = __shfl_up_sync(~0u, low, o), y = __shfl_up_sync(~0u, high, o);
      if (lane >= o) low += x, high += y;
    }
    if (lane == 31)
      for (int kind = 0; kind < 8; ++kind) places[warp][kind] = count_of(kind);
    low -= own[0], high -= own[1];
    __syncthreads();
    if (warp == 0) {
      const int kind = lane & 7;
      int all = 0;
#pragma unroll
      for (int i = 0; i < kThreads / 32; ++i) all += places[i][kind];
      int before = all;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) {
        const int x = __shfl_up_sync(~0u, before, o);
        if (kind >= o) before += x;
      }
      if (lane == 7) sum = before;
      before += total - all;
      __syncwarp();
      if (lane < 8)
        for (int i = 0; i < kThreads / 32; ++i) {
          const int x = places[i][kind];
          places[i][kind] = before;
          before += x;
        }
    }
    __syncthreads();
    total += sum;
    // The list: cells in the place of the levels, beside the masks.
    each_cell([&](int cell, uint32_t mask, int kind) {
      uint32_t* const to = slot(places[warp][kind] + count_of(kind));
      to[0] = mask, to[(tile::kLevels - tile::kMasks) / 4] = static_cast<uint32_t>(cell);
      add(kind);
    });
  }
  if (extra) atomicAdd(&surplus, extra);
  __syncthreads();
  const bool left = surplus != 0;
  if (tid < heads) w.flags[item + tid] = left, w.counts[item + tid] = total;
  if (left) return;
  __syncthreads();
  constexpr int N = 2;
  const int end = (total + 63) & ~63;
  for (int i = tid; i < end; i += N * kThreads) {
    int cell[N];
    uint32_t mask[N];
#pragma unroll
    for (int u = 0; u < N; ++u) {
      const int entry = i + u * kThreads;
      const uint32_t* const from = slot(min(entry, end - 1));
      const bool real = entry < total;
      cell[u] = real ? static_cast<int>(from[(tile::kLevels - tile::kMasks) / 4]) : -1;
      mask[u] = real ? from[0] : 0;
    }
    write_cells<N>(p, kv, kv + heads, records, apart, i, kThreads, end, cell, mask, w.groups, w.flags + item);
  }
}

// Without ids: every cell of the context once per KV head, for all tiles; which query sees it the tiles know by its number.
__device__ __forceinline__ void cells_kernel(const Params& p, const Tiles& w) {
  const int b = static_cast<int>(blockIdx.x), kv = b % p.n_kv, i = b / p.n_kv * tile::kCellsThreads + static_cast<int>(threadIdx.x);
  if (b == 0 && threadIdx.x == 0) *w.next = 0;
  const int items = w.tiles * p.n_kv, cells = w.record_tiles * 64;
  for (int j = b * tile::kCellsThreads + static_cast<int>(threadIdx.x); j < items; j += static_cast<int>(gridDim.x) * tile::kCellsThreads) w.flags[j] = 0;
  const int cell[1] = {i < p.seq[0].kv_len ? i : -1};
  const uint32_t mask[1] = {~0u};
  write_cells<1>(p, kv, kv + 1, w.records + static_cast<int64_t>(kv) * w.record_tiles * tile::kRecordBytes, 0, i, 0, cells, cell, mask, w.groups, nullptr);
}

}  // namespace cuda
}  // namespace strata_pa
