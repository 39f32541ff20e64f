// The cells of exact's tiles on cards from sm_80: the union of the lists of neighbouring queries, each cell with a bit per query that sees
// it, and what a tile needs of each cell: places of its codes, scales, level (docs/numerics.md, section 5). See exact_tile_sm80.h.
#pragma once
#include "exact_tile_sm80.h"
#include "exact_tiles.cuh"

namespace strata_pa {
namespace cuda {

// An item's queries: of one sequence, first .. end - 1.
struct RowsOf {
  int sequence, first, end, kv;
  __device__ RowsOf(const Params& p, const Rows& w, int item) {
    const int tile = w.tiles - 1 - item / p.n_kv;  // late queries first: of a dense prompt they are the long ones
    kv = item % p.n_kv;
    int low = 0, high = p.n_seq - 1;
    while (low < high) {
      const int middle = (low + high + 1) >> 1;
      if (w.first_tile[middle] <= tile) low = middle;
      else high = middle - 1;
    }
    sequence = low;
    first = (low ? p.seq[low - 1].q_end : 0) + (tile - w.first_tile[low]) * w.queries;
    end = min(min(first + w.queries, p.seq[low].q_end), p.n_q);
  }
};

// Is this block's query (as Query in common.cuh has it) one of a flagged item?
__device__ __forceinline__ bool flagged(const Params& p, const Rows& w) {
  const int b = static_cast<int>(blockIdx.x), index = p.n_q - 1 - b / p.n_kv;
  int low = 0, high = p.n_seq - 1;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (index < p.seq[middle].q_end) high = middle;
    else low = middle + 1;
  }
  const int tile = w.first_tile[low] + (index - (low ? p.seq[low - 1].q_end : 0)) / w.queries;
  return w.flags[(w.tiles - 1 - tile) * p.n_kv + b % p.n_kv] != 0;
}

// The cells that a query may see.
struct Reach {
  int first, last;
  __device__ Reach(const Params& p, int sequence, int index) {
    const int kv_len = p.seq[sequence].kv_len, pos = kv_len - p.seq[sequence].q_end + index;
    last = p.causal && pos < kv_len ? pos : kv_len - 1;
    first = p.window_left >= 0 && pos > p.window_left ? pos - p.window_left : 0;
  }
};

// `count` neighbouring scales.
template <int count>
struct Scales {
  static constexpr int kRecord = rows::record_bytes(count), kVPlaces = rows::v_places(count);
  uint16_t x[count];
  __device__ Scales() {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = 0;
  }
  __device__ void load(const uint16_t* at) {
    if (count == 4 && (reinterpret_cast<uintptr_t>(at) & 7) == 0) {
      const uint2 y = __ldg(reinterpret_cast<const uint2*>(at));
      x[0] = static_cast<uint16_t>(y.x), x[1 % count] = static_cast<uint16_t>(y.x >> 16), x[2 % count] = static_cast<uint16_t>(y.y), x[3 % count] = static_cast<uint16_t>(y.y >> 16);
      return;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = __ldg(at + i);
  }
  __device__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < count; ++i) all &= half_is_finite(x[i]);
    return all;
  }
  __device__ int level() const {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) top = max(top, static_cast<uint32_t>(x[i] & 0x7fff));
    const float f = half_to_float(static_cast<uint16_t>(top));
    return top == 0 ? kLeastLevel : ((__float_as_int(f) + 0x7fffff) >> 23) - 127;
  }
};

// Where 16 cells of v_scale stand, so that an MMA fragment's four are neighbours.
__device__ __forceinline__ int v_scale_place(int i) { return (i & ~15) + (i >> 1 & 3) * 4 + (i & 1) + (i >> 3 & 1) * 2; }

// Writes entry i of a list of records: a cell of the sequence, or -1, and a mask of the queries that see it. `heads` KV heads from kv on have
// the same list, `apart` from each other. Flagged, where flags are wanted: the heads that have a scale there that is not finite.
template <int groups>
__device__ __forceinline__ void write_cell(const Params& p, const Rows& w, const int32_t* table, int kv, int heads, unsigned char* records, int64_t apart, int i,
                                           int cell, uint32_t mask, int32_t* flags) {
  constexpr int kRecord = Scales<groups>::kRecord, kVPlaces = Scales<groups>::kVPlaces;
  unsigned char* record = records + static_cast<int64_t>(i >> 6) * kRecord;
  const int position = i & 63;
  Place at{0, 0};
  bool there = false;
  if (cell >= 0) {
    const int page = p.page_shift < 0 ? cell : static_cast<int>(__umulhi(static_cast<uint32_t>(cell), p.page_magic) >> p.page_shift);
    const int physical = page < p.max_pages ? __ldg(table + page) : -1;
    there = static_cast<uint32_t>(physical) < static_cast<uint32_t>(p.pages);
    if (there) at = Place{physical, cell - page * p.page_size};
  }
  const uint32_t k_place = static_cast<uint32_t>(offset(p.k_stride, at) >> 4), v_place = static_cast<uint32_t>(offset(p.v_stride, at) >> 4);
  const uint16_t* k_scale = p.k_scale + kv * p.k_scale_stride.head + offset(p.k_scale_stride, at);
  const uint16_t* v_scale = p.v_scale + kv * p.v_scale_stride.head + offset(p.v_scale_stride, at);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    Scales<groups> k, v;
    if (there) k.load(k_scale), v.load(v_scale);
    const bool finite = k.finite() && v.finite();
    if (!finite) {
      k = v = Scales<groups>();
      if (flags) flags[head] = 1;
    }
    reinterpret_cast<uint32_t*>(record - rows::kBefore * kRecord)[position] = k_place;
    reinterpret_cast<uint32_t*>(record - w.v_ahead * kRecord + kVPlaces)[position] = v_place;
    reinterpret_cast<uint32_t*>(record + rows::kMasks)[position] = there ? mask : 0;
    reinterpret_cast<int*>(record + rows::kLevels)[position] = finite ? v.level() : kBadLevel;
    uint16_t* const k_to = reinterpret_cast<uint16_t*>(record + rows::kScales) + position;
    uint16_t* const v_to = reinterpret_cast<uint16_t*>(record + kVPlaces + 256) + v_scale_place(position);
#pragma unroll
    for (int g = 0; g < groups; ++g) k_to[g * 64] = k.x[g], v_to[g * 64] = v.x[g];
    record += apart, k_scale += p.k_scale_stride.head, v_scale += p.v_scale_stride.head;
  }
}

// Calls f with the number of groups of a cell as a constant.
template <class F>
__device__ __forceinline__ void with_groups(int groups, F f) {
  if (groups == 4) f(Constant<4>());
  else if (groups == 1) f(Constant<1>());
  else if (groups == 2) f(Constant<2>());
  else f(Constant<8>());
}

__device__ __forceinline__ void clear(const Rows& w) {
  uint4* const to = reinterpret_cast<uint4*>(w.cleared);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < w.cleared_bytes >> 4; i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to[i] = make_uint4(0, 0, 0, 0);
}

// One block per item, or per tile where its KV heads share their lists (w.heads of them). The context goes by windows; in each, a mask of 1, 2 or
// 4 bytes per cell gathers the queries' bits.
__device__ __forceinline__ void lists_kernel(const Params& p, const Rows& w) {
  extern __shared__ uint4 seen[];
  __shared__ int warp_sum[16], twice;
  constexpr int kThreads = rows::kListThreads;
  uint32_t* const words = reinterpret_cast<uint32_t*>(seen);
  const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
  const int item = w.first_item + static_cast<int>(blockIdx.x) * w.heads;
  const RowsOf own(p, w, item);
  const int size = w.queries <= 8 ? 0 : w.queries <= 16 ? 1 : 2;  // log2 of a mask's bytes
  const int window = rows::kListShared >> size, kv_len = p.seq[own.sequence].kv_len, groups = w.groups;
  const int32_t* const table = p.page_table + own.sequence * p.page_table_stride;
  const int64_t apart = static_cast<int64_t>(rows::kBefore + w.item_tiles) * w.record_bytes;  // of the heads' records
  unsigned char* const records = w.records + static_cast<int>(blockIdx.x) * w.heads * apart + rows::kBefore * w.record_bytes;
  auto slot = [&](int i) { return reinterpret_cast<uint32_t*>(records + static_cast<int64_t>(i >> 6) * w.record_bytes + rows::kMasks) + (i & 63); };
  if (tid == 0) {
    twice = 0;
    if (blockIdx.x == 0) *w.next = 0;
  }
  if (w.first_item == 0) clear(w);
  int total = 0;
  const int end_cell = Reach(p, own.sequence, own.end - 1).last + 1, begin_cell = Reach(p, own.sequence, own.first).first;
  for (int base = begin_cell / window * window; base < end_cell; base += window) {
    const int chunks = ((min(window, kv_len - base) << size) + 15) >> 4;
    __syncthreads();
    for (int i = tid; i < chunks; i += kThreads) seen[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    bool again = false;
    for (int index = own.first; index < own.end; ++index) {
      const Reach reach(p, own.sequence, index);
      const int32_t* ids = p.ids + index * p.ids_stride + own.kv * p.ids_head_stride;
      const int width = p.widths ? __ldg(p.widths + index * p.widths_stride) : p.cap;
      const int count = reach.last < reach.first ? 0 : max(0, min(width, p.cap)) << p.granularity_log2;
      const int last_id = reach.last >> p.granularity_log2;
      const uint32_t bit = 1u << (index - own.first);
      constexpr int U = 5;
      for (int e = tid; e < count; e += U * kThreads) {
        int raw[U];
#pragma unroll
        for (int u = 0; u < U; ++u) raw[u] = e + u * kThreads < count ? __ldg(ids + ((e + u * kThreads) >> p.granularity_log2)) : -1;
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (static_cast<uint32_t>(raw[u]) > static_cast<uint32_t>(last_id)) continue;
          const int cell = (raw[u] << p.granularity_log2) + (e + u * kThreads & ((1 << p.granularity_log2) - 1)), at = cell - base;
          if (cell < reach.first || cell > reach.last || static_cast<uint32_t>(at) >= static_cast<uint32_t>(window)) continue;
          const uint32_t mine = bit << ((at & (3 >> size)) << (3 + size));
          again |= (atomicOr(words + (at >> (2 - size)), mine) & mine) != 0;
        }
      }
    }
    if (again) twice = 1;
    __syncthreads();
    // Which of a word's cells are seen: a bit each.
    auto present = [&](uint32_t x) -> uint32_t {
      if (size == 2) return x != 0;
      return size == 1 ? __vcmpgtu2(x, 0) & 0x00010001u : __vcmpgtu4(x, 0) & 0x01010101u;
    };
    int mine = 0;
    for (int i = tid; i < chunks; i += kThreads) {
      const uint4 x = seen[i];
      mine += __popc(present(x.x)) + __popc(present(x.y)) + __popc(present(x.z)) + __popc(present(x.w));
    }
    int before = mine;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int x = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before += x;
    }
    if (lane == 31) warp_sum[warp] = before;
    __syncthreads();
    before += total - mine;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) before += warp_sum[i];
      total += warp_sum[i];
    }
    // The list: cells in the place of the levels, beside the masks.
    for (int i = tid; i < chunks; i += kThreads) {
      const uint4 x = seen[i];
      const uint32_t part[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        for (uint32_t found = present(part[j]); found; found &= found - 1) {
          const int bits = __ffs(found) - 1, cell = base + ((i * 4 + j) << (2 - size)) + (bits >> (3 + size));
          const uint32_t mask = size == 2 ? part[j] : part[j] >> bits & (size == 1 ? 0xffffu : 0xffu);
          uint32_t* const to = slot(before++);
          to[0] = mask, to[(rows::kLevels - rows::kMasks) / 4] = static_cast<uint32_t>(cell);
        }
    }
  }
  __syncthreads();
  const bool left = twice != 0;
  if (tid < w.heads) w.flags[item + tid] = left, w.counts[item + tid] = total;
  if (left) return;
  __syncthreads();
  with_groups(groups, [&](auto constant) {
    for (int i = tid; i < (total + 63 & ~63); i += kThreads) {
      const uint32_t* const from = slot(i);
      const bool real = i < total;
      const int cell = real ? static_cast<int>(from[(rows::kLevels - rows::kMasks) / 4]) : -1;
      write_cell<decltype(constant)::value>(p, w, table, own.kv, w.heads, records, apart, i, cell, real ? from[0] : 0, w.flags + item);
    }
  });
}

// Without ids: every cell of the context once per KV head, for all tiles; which query sees it the tiles know by its number.
__device__ __forceinline__ void cells_kernel(const Params& p, const Rows& w) {
  const int b = static_cast<int>(blockIdx.x), kv = b % p.n_kv, i = b / p.n_kv * rows::kCellThreads + static_cast<int>(threadIdx.x);
  if (b == 0 && threadIdx.x == 0) *w.next = 0;
  clear(w);
  for (int j = b * rows::kCellThreads + static_cast<int>(threadIdx.x); j < w.tiles * p.n_kv; j += static_cast<int>(gridDim.x) * rows::kCellThreads) w.flags[j] = 0;
  const int tile = i >> 6, groups = w.groups;
  if (tile >= w.record_tiles) return;
  int s = 0;
  while (s + 1 < p.n_seq && w.first_record[s + 1] <= tile) ++s;
  const int cell = (tile - w.first_record[s]) * 64 + (i & 63);
  with_groups(groups, [&](auto constant) {
    constexpr int N = decltype(constant)::value;
    unsigned char* const records = w.records + (static_cast<int64_t>(kv) * (rows::kBefore + w.record_tiles) + rows::kBefore) * w.record_bytes;
    write_cell<N>(p, w, p.page_table + s * p.page_table_stride, kv, 1, records, 0, i, cell < p.seq[s].kv_len ? cell : -1, ~0u, nullptr);
  });
}

}  // namespace cuda
}  // namespace strata_pa
