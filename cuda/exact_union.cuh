// The cells of exact's tiles: the union of the lists of neighbouring queries, each cell with a bit per query that sees it, and what a tile
// needs of each: places of its codes, scales, level (docs/numerics.md, section 5). See tile_launch.h.
#pragma once
#include "exact_tiles.cuh"
#include "tile_launch.h"

namespace strata_pa {
namespace cuda {

// Late queries first: of a dense prompt they are the long ones.
__device__ __forceinline__ int first_query_of(const Params& p, const Tiles& w, int item) { return (w.tiles - 1 - item / p.n_kv) * w.queries; }

// The cells that a query may see.
struct Span {
  int first, last;
  __device__ Span(const Params& p, int index) {
    const int kv_len = p.seq[0].kv_len, pos = kv_len - p.seq[0].q_end + index;
    last = p.causal && pos < kv_len ? pos : kv_len - 1;
    first = p.window_left >= 0 && pos > p.window_left ? pos - p.window_left : 0;
  }
};

// A cell's place among the words of its 16: a thread of the scores holds cells i and i + 8 and stores them side by side.
__device__ __forceinline__ int word_place(int i) { return (i & ~15) + (i & 7) * 2 + (i >> 3 & 1); }
// V's cells lie so that the fragments of V (transposed by ldmatrix) and of the weights agree; `place`: among the words.
__device__ __forceinline__ int v_row(int place) { return (place & ~15) + (place >> 1 & 1) * 8 + (place >> 2 & 3) * 2 + (place & 1); }

// Of cells whose scales are groups of 4 that 8-byte loads find: one load each. Otherwise 1, 2 or 4 neighbours one by one.
__device__ __forceinline__ bool whole_scales(const Params& p, int groups) {
  auto even = [](const uint16_t* at, const PoolStride& s) {
    return (static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) >> 1) | s.head | s.page | s.slot) % 4 == 0;
  };
  return groups == 4 && even(p.k_scale, p.k_scale_stride) && even(p.v_scale, p.v_scale_stride);
}
template <bool whole>
__device__ __forceinline__ uint2 load_scales(const uint16_t* at, int groups) {
  if (whole) return __ldg(reinterpret_cast<const uint2*>(at));
  uint2 x = make_uint2(__ldg(at), 0);
  if (groups > 1) x.x |= static_cast<uint32_t>(__ldg(at + 1)) << 16;
  if (groups > 2) x.y = __ldg(at + 2) | static_cast<uint32_t>(__ldg(at + 3)) << 16;
  return x;
}
// The signs' places of halves that are not finite, and others: an exponent of ones, and one more, is such a place.
__device__ __forceinline__ uint32_t not_finite(uint2 x) { return (x.x & 0x7c007c00u) + 0x04000400u | (x.y & 0x7c007c00u) + 0x04000400u; }
// Not 0 for scales of a cell that the tiles leave to the plain form, by the same places: also where v_scale has a minus sign, since the highest byte of a weight
// counts as an unsigned one.
__device__ __forceinline__ uint32_t not_served(uint2 k, uint2 v) { return (not_finite(k) | not_finite(v) | v.x | v.y) & 0x80008000u; }

// Where a cell lies; page -1: it is masked.
__device__ __forceinline__ Place place_of(const Params& p, int cell) {
  const int known = max(cell, 0), page = p.page_shift < 0 ? known : static_cast<int>(__umulhi(static_cast<uint32_t>(known), p.page_magic) >> p.page_shift);
  int physical = -1;
  if (cell >= 0 && page < p.max_pages) physical = __ldg(p.page_table + page);
  return {static_cast<uint32_t>(physical) < static_cast<uint32_t>(p.pages) ? physical : -1, known - page * p.page_size};
}

// Where a cell's parts lie in a record: bytes.
struct InRecord {
  int word, pair, v_place;  // pair: the cells that a thread of the scores has are neighbours
  __device__ explicit InRecord(int i) : word(i * 4), pair(word_place(i) * 4), v_place(tile::kVPlaces + v_row(word_place(i)) * 4) { hide(pair), hide(v_place); }
};

// A cell's part of its record.
template <bool whole>
__device__ __forceinline__ void write_cell(unsigned char* record, const InRecord& in, uint32_t k_place, uint32_t v_place, uint32_t mask, uint2 ks, uint2 vs, bool bad,
                                           int groups) {
  const uint32_t top2 = __vmaxu2(vs.x & 0x7fff7fffu, vs.y & 0x7fff7fffu), top = max(top2 & 0xffff, top2 >> 16);
  const uint32_t exponent = static_cast<uint32_t>(__float_as_int(half_to_float(static_cast<uint16_t>(top))) + 0x7fffff) >> 23;
  const int level = top == 0 ? kLeastLevel : static_cast<int>(exponent) - 127;
  *reinterpret_cast<uint32_t*>(record + in.word) = k_place;
  unsigned char* const at = record + in.pair;
  *reinterpret_cast<uint2*>(at + in.pair + tile::kKScales) = ks;
  *reinterpret_cast<uint32_t*>(at + tile::kMasks) = mask;
  *reinterpret_cast<int*>(at + tile::kLevels) = bad ? kBadLevel : level;
  *reinterpret_cast<uint32_t*>(record + in.v_place) = v_place;
  uint16_t* const v = reinterpret_cast<uint16_t*>(record + tile::kVScales + in.pair / 2);
  v[0] = static_cast<uint16_t>(vs.x);
  if (whole || groups > 1) v[64] = static_cast<uint16_t>(vs.x >> 16);
  if (whole || groups > 2) v[128] = static_cast<uint16_t>(vs.y), v[192] = static_cast<uint16_t>(vs.y >> 16);
}

// Writes N cells' parts, H heads at a time, of the records of the KV heads first_kv .. end_kv - 1: entries i, i + step, ... below `end`; step is a
// multiple of 64. records: the first one's; they are `apart` bytes apart. flags: the first one's, set where scales are not served, or null.
template <int N, int H, bool whole>
__device__ __forceinline__ void write_cells(const Params& p, int first_kv, int end_kv, unsigned char* records, int64_t apart, int i, int step, int end,
                                            const InRecord& in, const int (&cell)[N], uint32_t (&mask)[N], int groups, int32_t* flags) {
  Place at[N];
  const uint16_t *k_scale[N], *v_scale[N];
  uint32_t k_place[N], v_place[N];
#pragma unroll
  for (int u = 0; u < N; ++u) at[u] = place_of(p, cell[u]);
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (at[u].page < 0) at[u] = Place{0, 0}, mask[u] = 0;  // nobody looks at what is written of it
    k_scale[u] = p.k_scale + first_kv * p.k_scale_stride.head + offset(p.k_scale_stride, at[u]);
    v_scale[u] = p.v_scale + first_kv * p.v_scale_stride.head + offset(p.v_scale_stride, at[u]);
    k_place[u] = static_cast<uint32_t>(offset(p.k_stride, at[u]) >> 4), v_place[u] = static_cast<uint32_t>(offset(p.v_stride, at[u]) >> 4);
  }
  records += static_cast<int64_t>(i >> 6) * tile::kRecordBytes;
#pragma unroll 1
  for (int kv = first_kv; kv < end_kv; kv += H, records += H * apart) {
    uint2 ks[H][N], vs[H][N];
    uint32_t any = 0;
    const bool both = H == 1 || kv + 1 < end_kv;  // if not, one head twice
    const int64_t k_next = both ? p.k_scale_stride.head : 0, v_next = both ? p.v_scale_stride.head : 0;
#pragma unroll
    for (int u = 0; u < N; ++u)
#pragma unroll
      for (int h = 0; h < H; ++h) {
        ks[h][u] = load_scales<whole>(k_scale[u] + h * k_next, groups), vs[h][u] = load_scales<whole>(v_scale[u] + h * v_next, groups);
        if (h == H - 1) k_scale[u] += H * k_next, v_scale[u] += H * v_next;
      }
#pragma unroll
    for (int u = 0; u < N; ++u)
#pragma unroll
      for (int h = 0; h < H; ++h) any |= not_served(ks[h][u], vs[h][u]);
    uint32_t bad = 0;
    if (any) {
#pragma unroll
      for (int u = 0; u < N; ++u)
#pragma unroll
        for (int h = 0; h < H; ++h) {
          if (!not_served(ks[h][u], vs[h][u])) continue;
          ks[h][u] = vs[h][u] = make_uint2(0, 0);
          bad |= 1u << u * H + h;
          if (flags && mask[u] && (h == 0 || both)) flags[kv - first_kv + h] = 1;
        }
    }
#pragma unroll
    for (int u = 0; u < N; ++u) {
      const int entry = i + u * step;
      if (entry >= end) continue;
      unsigned char* const record = records + u * (step >> 6) * tile::kRecordBytes;
#pragma unroll
      for (int h = 0; h < H; ++h)
        if (h == 0 || both) write_cell<whole>(record + h * apart, in, k_place[u], v_place[u], mask[u], ks[h][u], vs[h][u], bad >> u * H + h & 1, groups);
    }
  }
}

// One block per item, or per tile where all KV heads have the same lists (Tiles::heads); where items are few, Tiles::writers blocks, which all list the cells. The
// context goes by windows; in each, a mask of 1 << size bytes per cell gathers the queries' bits, then its cells are listed in order and their records written. A
// cell twice in a list shows as fewer bits than entries.
template <int size>
__device__ __forceinline__ void union_kernel(const Params& p, const Tiles& w) {
  extern __shared__ uint4 seen[];
  __shared__ int counts[16][8], places[8][tile::kUnionThreads], surplus;  // of cells of a kind: a warp's; a thread's, then where its next one goes
  __shared__ uint32_t thirds[3];
  constexpr int kThreads = tile::kUnionThreads, kWarps = kThreads / 32, kWidth = 8 << size;
  const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
  const int heads = w.heads, item = static_cast<int>(blockIdx.x) / w.writers * heads;
  auto writer = [&] { return static_cast<int>(blockIdx.x) % w.writers; };
  const int kv = item % p.n_kv, first_query = first_query_of(p, w, item), end_query = min(first_query + w.queries, p.n_q);
  const int64_t apart = static_cast<int64_t>(w.record_tiles) * tile::kRecordBytes;
  unsigned char* const records = w.records + item * apart;
  uint32_t* const words = reinterpret_cast<uint32_t*>(seen);
  // A window's list: where its cells lie in it. Behind the masks, or, a long one, in the place of the records' levels.
  uint32_t* const list = words + (w.window << size >> 2);
  const bool near = w.listed > 0;
  auto slot = [&](int i) { return reinterpret_cast<uint32_t*>(records + static_cast<int64_t>(i >> 6) * tile::kRecordBytes + tile::kLevels) + word_place(i & 63); };
  if (tid == 0) {
    surplus = 0;
    if (blockIdx.x == 0) *w.next = 0;
  }
  if (writer() == 0) {
    if (tid < heads) w.flags[item + tid] = 0;
    for (int i = tid; w.splits && i < heads * 2 * tile::kRows; i += kThreads) w.tops[static_cast<int64_t>(item) * (2 * tile::kRows) + i] = 0;
  }
  // Cells of a kind lie together, so that tiles of 64 have few: a tile's rows that see none of its cells are left out later, and where all rows see
  // all cells nobody looks at masks. A kind: a bit for each third of the tile's rows; 7 where all queries see it, 0 where but a part of all thirds does.
  if (tid < 3) {
    const int third = tile::kRows / 3, first = tid * third / p.heads_per_kv, last = ((tid + 1) * third - 1) / p.heads_per_kv;
    thirds[tid] = (last < 31 ? (2u << last) - 1 : ~0u) & (first < 32 ? ~0u << first : 0);
  }
  const int end_cell = Span(p, end_query - 1).last + 1, begin_cell = Span(p, first_query).first;
  int total = 0;  // cells of earlier windows
#pragma unroll 1
  for (int base = begin_cell / w.window * w.window; base < end_cell; base += w.window) {
    const int cells = min(w.window, p.seq[0].kv_len - base), end_word = (cells << size) + 3 >> 2;
    int extra = 0;  // entries less bits
    __syncthreads();
    for (int i = tid; i < end_word + 3 >> 2; i += kThreads) seen[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    auto mark = [&](auto fine) {  // fine: an id is a cell
      constexpr int kAtOnce = 4, U = decltype(fine)::value ? 5 : 2;
      const int shift = decltype(fine)::value ? 0 : p.granularity_log2;
#pragma unroll 1
      for (int query = first_query; query < end_query; query += kAtOnce) {
        int count[kAtOnce], most = 0, first[kAtOnce], reach[kAtOnce];  // of the window's cells the first one that a query may see, and how many others
        const int32_t* ids[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const int index = min(query + r, p.n_q - 1);
          count[r] = p.widths ? __ldg(p.widths + index * p.widths_stride) : p.cap;
          ids[r] = p.ids + index * p.ids_stride + kv * p.ids_head_stride;
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const Span span(p, query + r);
          first[r] = max(span.first, base), reach[r] = min(span.last, base + cells - 1) - first[r];
          count[r] = query + r >= end_query || reach[r] < 0 ? 0 : max(0, min(count[r], p.cap)) << shift;
          if (reach[r] < 0) first[r] = reach[r] = 0;
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
              raw[u][r] = -1;
              if (at < count[r]) raw[u][r] = __ldg(ids[r] + (at >> shift));
            }
#pragma unroll
          for (int u = 0; u < U; ++u)
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
              const int cell = (raw[u][r] << shift) + (e + u * kThreads & (1 << shift) - 1), at = cell - base;
              if (static_cast<uint32_t>(cell - first[r]) > static_cast<uint32_t>(reach[r])) continue;
              if (!decltype(fine)::value && static_cast<uint32_t>(raw[u][r]) > static_cast<uint32_t>(end_cell)) continue;  // of which more is shifted out
              ++extra;
              atomicOr(words + (at >> (2 - size)), 1u << ((at & (3 >> size)) * kWidth + query - first_query + r));
            }
        }
      }
    };
    if (p.granularity_log2 == 0) mark(Constant<1>());
    else mark(Constant<0>());
    __syncthreads();
    const uint32_t bits[3] = {thirds[0], thirds[1], thirds[2]}, every = end_query - first_query < 32 ? (1u << end_query - first_query) - 1 : ~0u;
    auto mask_of = [&](int at) -> uint32_t {
      if (size == 2) return words[at];
      return size == 1 ? reinterpret_cast<const uint16_t*>(seen)[at] : reinterpret_cast<const uint8_t*>(seen)[at];
    };
    // Calls f with every cell of the window that is seen, its mask and this thread's place for its kind. A thread has 8 words at a time, and a bit per cell of theirs.
    int* const own = &places[0][tid];
    auto each_cell = [&](auto f) {
#pragma unroll 1
      for (int from = tid; from < end_word; from += 8 * kThreads) {
        uint32_t found = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const int i = from + k * kThreads;
          const uint32_t x = i < end_word ? words[i] : 0;
          // The top bit of each cell, which no mask has; of a mask that is a whole word, its only one.
          const uint32_t present = size == 0 ? x + 0x7f7f7f7fu & 0x80808080u : size == 1 ? x + 0x7fff7fffu & 0x80008000u : x ? 0x80000000u : 0;
          found |= present >> (kWidth - 1 - k);
        }
        for (; found; found &= found - 1) {
          const uint32_t bit = static_cast<uint32_t>(__ffs(found) - 1);
          const int at = (from << 2 - size) + static_cast<int>(bit & 7) * (kThreads << 2 - size) + static_cast<int>(bit / kWidth);
          const uint32_t mask = mask_of(at);
          const int kind = (mask & bits[0] ? kThreads : 0) | (mask & bits[1] ? 2 * kThreads : 0) | (mask & bits[2] ? 4 * kThreads : 0);
          f(at, mask, own[kind == 7 * kThreads && mask != every ? 0 : kind]);
        }
      }
    };
#pragma unroll
    for (int kind = 0; kind < 8; ++kind) places[kind][tid] = 0;
    each_cell([&](int, uint32_t mask, int& count) {
      ++count;
      extra -= static_cast<int>(__popc(mask));
    });
    if (extra) atomicAdd(&surplus, extra);
    // Two counts in a word: a warp has at most 32 x 384 cells.
    uint32_t upto[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) upto[j] = static_cast<uint32_t>(places[2 * j][tid] | places[2 * j + 1][tid] << 16);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t x = __shfl_up_sync(~0u, upto[j], o);
        if (lane >= o) upto[j] += x;
      }
    if (lane == 31)
#pragma unroll
      for (int kind = 0; kind < 8; ++kind) counts[warp][kind] = static_cast<int>(upto[kind >> 1] >> (kind & 1) * 16 & 0xffff);
    __syncthreads();
    if (surplus != 0) {
      if (writer() == 0 && tid < heads) w.flags[item + tid] = 1, w.counts[item + tid] = 0;
      return;
    }
    // A warp's first place for a kind: a lane adds the counts of a kind in a quarter of the warps.
    int all = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i) {
      const int other = (lane >> 3) * (kWarps / 4) + i, x = counts[other][lane & 7];
      all += x, before += other < warp ? x : 0;
    }
#pragma unroll
    for (int o = 8; o < 32; o <<= 1) all += __shfl_xor_sync(~0u, all, o), before += __shfl_xor_sync(~0u, before, o);
    int through = all;
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) {
      const int x = __shfl_up_sync(~0u, through, o);
      if ((lane & 7) >= o) through += x;
    }
    const int sum = __shfl_sync(~0u, through, 7);
#pragma unroll
    for (int kind = 0; kind < 8; ++kind)
      places[kind][tid] = __shfl_sync(~0u, through - all + before, kind) + static_cast<int>(upto[kind >> 1] >> (kind & 1) * 16 & 0xffff) - places[kind][tid];
    each_cell([&](int at, uint32_t, int& place) {
      const int to = place++;
      if (near) list[to] = static_cast<uint32_t>(at);
      else *slot(total + to) = static_cast<uint32_t>(at);
    });
    __syncthreads();
    const int end = total + sum, padded = base + w.window < end_cell ? end : end + 63 & ~63;
    const InRecord in(tid & 63);
    const int first = (total & ~63) + tid < total ? (total & ~63) + tid + kThreads : (total & ~63) + tid;  // where a thread's place in a record is always the same
    auto write = [&](auto constant) {
      constexpr int N = decltype(constant)::value ? 2 : 1;
      // Flags: of several writers none sets what another is still to clear; the cells' levels say it, too.
#pragma unroll 1
      for (int i = first + writer() * N * kThreads; i < padded; i += w.writers * N * kThreads) {
        int cell[N];
        uint32_t mask[N];
#pragma unroll
        for (int u = 0; u < N; ++u) {
          const int entry = i + u * kThreads;
          const bool real = entry < end;
          const int at = real ? static_cast<int>(near ? list[entry - total] : *slot(entry)) : 0;
          cell[u] = real ? base + at : -1;
          mask[u] = real ? mask_of(at) : 0;
        }
        write_cells<N, 2, decltype(constant)::value>(p, kv, kv + heads, records, apart, i, kThreads, padded, in, cell, mask, w.groups, w.writers == 1 ? w.flags + item : nullptr);
      }
    };
    if (whole_scales(p, w.groups)) write(Constant<1>());
    else write(Constant<0>());
    total = end;
  }
  if (writer() == 0 && tid < heads) w.counts[item + tid] = total;
}

// Without ids: every cell of the context once per KV head, for all tiles; which query sees it the tiles know by its number.
__device__ __forceinline__ void cells_kernel(const Params& p, const Tiles& w) {
  const int b = static_cast<int>(blockIdx.x), kv = b % p.n_kv, i = b / p.n_kv * tile::kCellsThreads + static_cast<int>(threadIdx.x);
  if (b == 0 && threadIdx.x == 0) *w.next = 0;
  const int items = w.tiles * p.n_kv, cells = w.record_tiles * 64;
  const int thread = b * tile::kCellsThreads + static_cast<int>(threadIdx.x), threads = static_cast<int>(gridDim.x) * tile::kCellsThreads;
  for (int j = thread; j < items; j += threads) w.flags[j] = 0;
  for (int64_t j = thread; w.splits && j < int64_t{items} * (2 * tile::kRows); j += threads) w.tops[j] = 0;
  const int cell[1] = {i < p.seq[0].kv_len ? i : -1};
  uint32_t mask[1] = {~0u};
  const InRecord in(i & 63);
  auto write = [&](auto constant) {
    write_cells<1, 1, decltype(constant)::value>(p, kv, kv + 1, w.records + static_cast<int64_t>(kv) * w.record_tiles * tile::kRecordBytes, 0, i, 0, cells,
                                              in, cell, mask, w.groups, nullptr);
  };
  if (whole_scales(p, w.groups)) write(Constant<1>());
  else write(Constant<0>());
}

}  // namespace cuda
}  // namespace strata_pa
