// What the kernels share: where a block's query sits, its list of cells, copies into tiles, MMA instructions, q and out.
#pragma once
#include "launch.h"
#include "ops.cuh"

namespace strata_pa {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- the block's query

struct Place {
  int page, slot;  // page -1: the entry is masked
};

struct Query {
  int index, kv;   // of the launch's queries; the KV head
  int first, last; // the cells that it may see
  const int32_t* table;
  const int32_t* ids;  // or null
  int count;       // list entries, the trailing masked ones of a dense list left out
  int begin;       // dense with a window: the first entry that is not masked

  // Late queries come first: of a dense prompt they are the long ones.
  Query() = default;
  __device__ explicit Query(const Params& p) {
    int b = static_cast<int>(blockIdx.x);
    kv = b % p.n_kv;
    index = p.n_q - 1 - b / p.n_kv;
    int low = 0, high = p.n_seq - 1;
    while (low < high) {
      int middle = (low + high) >> 1;
      if (index < p.seq[middle].q_end) high = middle;
      else low = middle + 1;
    }
    int kv_len = p.seq[low].kv_len;
    int pos = kv_len - p.seq[low].q_end + index;
    last = p.causal && pos < kv_len ? pos : kv_len - 1;
    first = p.window_left >= 0 && pos > p.window_left ? pos - p.window_left : 0;
    table = p.page_table + low * p.page_table_stride;
    ids = p.ids ? p.ids + index * p.ids_stride + kv * p.ids_head_stride : nullptr;
    count = last + 1;
    begin = first;
    if (ids) {
      int width = p.widths ? p.widths[index * p.widths_stride] : p.cap;
      count = max(0, min(width, p.cap)) << p.granularity_log2;
      begin = 0;
    }
    if (last < first || p.pages == 0) count = begin = 0;
  }

  // The id (or, dense, the cell) behind entry e.
  __device__ int raw(const Params& p, int e) const {
    if (e >= count) return -1;
    return ids ? __ldg(ids + (e >> p.granularity_log2)) : e;
  }
  // The cell of entry e, -1 where it is masked.
  __device__ int cell(const Params& p, int e, int raw) const {
    if (ids) {
      if (static_cast<uint32_t>(raw) > static_cast<uint32_t>(last) >> p.granularity_log2) return -1;
      raw = (raw << p.granularity_log2) + (e & ((1 << p.granularity_log2) - 1));
    }
    return raw >= first && raw <= last ? raw : -1;
  }
  __device__ int logical_page(const Params& p, int cell) const {
    return p.page_shift < 0 ? cell : static_cast<int>(__umulhi(static_cast<uint32_t>(cell), p.page_magic) >> p.page_shift);
  }
  // The page table's word for a cell, -1 where there is none.
  __device__ int physical(const Params& p, int cell) const {
    if (cell < 0) return -1;
    int page = logical_page(p, cell);
    return page < p.max_pages ? __ldg(table + page) : -1;
  }
  __device__ Place place(const Params& p, int cell, int physical) const {
    if (static_cast<uint32_t>(physical) >= static_cast<uint32_t>(p.pages)) return Place{-1, 0};
    return Place{physical, cell - logical_page(p, cell) * p.page_size};
  }
};

__device__ __forceinline__ int64_t offset(const PoolStride& s, Place at) {
  int64_t r;
  asm("mul.wide.s32 %0, %1, %2;\n\tmad.wide.s32 %0, %3, %4, %0;" : "=&l"(r) : "r"(at.page), "r"(s.page), "r"(at.slot), "r"(s.slot));
  return r;
}

// A block's KV head in the four pools, and its query. Kept in shared memory: in registers they would cost a fourth block per processor.
struct Sources {
  const int8_t* k;
  const int8_t* v;
  const uint16_t* k_scale;
  const uint16_t* v_scale;
  Query query;
  __device__ Sources(const Params& p, const Query& query)
      : k(p.k + query.kv * p.k_stride.head), v(p.v + query.kv * p.v_stride.head), k_scale(p.k_scale + query.kv * p.k_scale_stride.head),
        v_scale(p.v_scale + query.kv * p.v_scale_stride.head), query(query) {}
};
static_assert(sizeof(Sources) <= shared::kSources, "");

// Runs ahead of the chunks of 32 entries: the ids of one chunk and the page table's words of the one before are in flight.
struct Feeder {
  int cell, physical, raw;

  // `entry`: this lane's in the first chunk, then in the chunk that is written.
  __device__ void start(const Params& p, const Query& query, int entry) {
    raw = query.raw(p, entry);
    look_up(p, query, entry);
  }
  // places: [2][32]. masks: [4], a bit per visible entry: still read when the places of two chunks later are written.
  __device__ void write(const Params& p, const Query& query, int entry, Place* places, uint32_t* masks) {
    const Place at = query.place(p, cell, physical);
    places[entry & 63] = at;
    const uint32_t mask = __ballot_sync(~0u, at.page >= 0);
    if ((entry & 31) == 0) masks[entry >> 5 & 3] = mask;
    look_up(p, query, entry + 32);
  }

 private:
  __device__ void look_up(const Params& p, const Query& query, int entry) {
    cell = query.cell(p, entry, raw);
    physical = query.physical(p, cell);
    raw = query.raw(p, entry + 32);
  }
};

// ---- copies: a warp's slice of a tile, 32 cells x 64 bytes

// Where the 16 bytes `part` of a cell lie. Padded: free of bank conflicts for 4-byte reads down columns. Swizzled: for ldmatrix.
struct PaddedTile {
  static constexpr int kBytes = 32 * shared::kTileRow;
  static __device__ __forceinline__ int at(int cell, int part) { return cell * shared::kTileRow + part * 16; }
};
struct SwizzledTile {
  static constexpr int kBytes = 32 * 64;
  static __device__ __forceinline__ int at(int cell, int part) { return cell * 64 + (part ^ (cell >> 1 & 3)) * 16; }
};

template <class Tile>
struct TileCopyAsync {
  __device__ void issue(unsigned char* tile, const int8_t* base, const PoolStride& stride, const Place* places, int lane) {
#ifdef STRATA_PA_SM80
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int cell = i * 8 + (lane >> 2);
      Place at = places[cell];
      at.page = max(at.page, 0);  // a masked cell: any codes will do, its weight is 0
      const int8_t* from = base + offset(stride, at) + (lane & 3) * 16;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile + Tile::at(cell, lane & 3))), "l"(from)
                   : "memory");
    }
#endif
  }
  __device__ void commit() {
#ifdef STRATA_PA_SM80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  // Lands the copy whose commit was followed by `newer` others.
  template <int newer>
  __device__ void land(unsigned char*, int) {
#ifdef STRATA_PA_SM80
    asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
#endif
    __syncwarp();
  }
};

// The same through registers, for sm_75.
template <class Tile>
struct TileCopyRegisters {
  uint4 word[4];
  __device__ void issue(unsigned char*, const int8_t* base, const PoolStride& stride, const Place* places, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Place at = places[i * 8 + (lane >> 2)];
      at.page = max(at.page, 0);
      word[i] = __ldg(reinterpret_cast<const uint4*>(base + offset(stride, at) + (lane & 3) * 16));
    }
  }
  __device__ void commit() {}
  template <int newer>
  __device__ void land(unsigned char* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(tile + Tile::at(i * 8 + (lane >> 2), lane & 3)) = word[i];
    __syncwarp();
  }
};

// The binary16 scale of `group` for a lane's entry, 0 where it is masked.
__device__ __forceinline__ uint16_t load_scale(const uint16_t* base, const PoolStride& stride, Place at, int group) {
  return at.page >= 0 ? __ldg(base + offset(stride, at) + group) : uint16_t{0};
}

// ---- MMA

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

#ifdef STRATA_PA_SM80
__device__ __forceinline__ void mma_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
#endif

// ---- q and out

template <int v>
struct Constant {
  static constexpr int value = v;
};
// Calls f with the type of q and out as a constant, so that the choice is made once and not at every element.
template <class F>
__device__ __forceinline__ void with_dtype(const Params& p, F f) {
  if (p.dtype == 0) f(Constant<0>());
  else if (p.dtype == 1) f(Constant<1>());
  else f(Constant<2>());
}

template <int dtype>
__device__ __forceinline__ float load_q(const Params& p, int64_t at) {
  if constexpr (dtype == 0) return static_cast<const float*>(p.q)[at];
  uint16_t h = static_cast<const uint16_t*>(p.q)[at];
  if constexpr (dtype == 1) return half_to_float(h);
  return __int_as_float(static_cast<int>(static_cast<uint32_t>(h) << 16));
}

// Four elements of q from `at`.
template <int dtype>
__device__ __forceinline__ void load_q4(const Params& p, int64_t at, float* x) {
  if constexpr (dtype == 0) {
    const float* q = static_cast<const float*>(p.q) + at;
    if ((reinterpret_cast<uintptr_t>(q) & 15) == 0) {
      float4 y = *reinterpret_cast<const float4*>(q);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = load_q<dtype>(p, at + i);
}

// FP32 -> q's type, to nearest even; NaN has one form.
template <int dtype>
__device__ __forceinline__ uint16_t to_16_bits(float x) {
  uint32_t bits = static_cast<uint32_t>(__float_as_int(x));
  if constexpr (dtype == 2) return static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return x != x ? uint16_t{0x7e00} : h;
}

// Four elements of out from `at`.
template <int dtype>
__device__ __forceinline__ void store_out4(const Params& p, int64_t at, const float (&x)[4]) {
  if constexpr (dtype == 0) {
    float* out = static_cast<float*>(p.out) + at;
    if ((reinterpret_cast<uintptr_t>(out) & 15) == 0) {
      *reinterpret_cast<float4*>(out) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = x[i];
    }
  } else {
    uint16_t* out = static_cast<uint16_t*>(p.out) + at;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = to_16_bits<dtype>(x[i]);
  }
}

constexpr int kNaNBits = 0x7fc00000;

}  // namespace cuda
}  // namespace strata_pa
