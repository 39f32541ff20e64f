// What the kernels of every backend share: where a block's query sits, its list of cells, q and out.
#pragma once
#include "launch.h"
#include "ops.cuh"

namespace strata_pa {
namespace cuda {

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
  __device__ explicit Query(const Params& p) : Query(p, static_cast<int>(blockIdx.x)) {}
  __device__ Query(const Params& p, int b) {  // of block b
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
  return sum_of_wide_products(at.page, s.page, at.slot, s.slot);
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

// The binary16 scale of `group` for a lane's entry, 0 where it is masked.
__device__ __forceinline__ uint16_t load_scale(const uint16_t* base, const PoolStride& stride, Place at, int group) {
  return at.page >= 0 ? __ldg(base + offset(stride, at) + group) : uint16_t{0};
}

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
  const uint16_t h = float_to_half(x);
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

// Two elements of out from `at`.
template <int dtype>
__device__ __forceinline__ void store_out2(const Params& p, int64_t at, const float (&x)[2]) {
  if constexpr (dtype == 0) {
    float* out = static_cast<float*>(p.out) + at;
    if ((reinterpret_cast<uintptr_t>(out) & 7) == 0) *reinterpret_cast<float2*>(out) = make_float2(x[0], x[1]);
    else out[0] = x[0], out[1] = x[1];
  } else {
    uint16_t* out = static_cast<uint16_t*>(p.out) + at;
    out[0] = to_16_bits<dtype>(x[0]), out[1] = to_16_bits<dtype>(x[1]);
  }
}

constexpr int kNaNBits = 0x7fc00000;

}  // namespace cuda
}  // namespace strata_pa
