// What the kernels share. One block per (query, KV head); the list's entries in chunks, four threads for each entry of a chunk. In a chunk:
//   place()   thread e < kChunk: where entry e lies, its scales
//   scores    thread (entry, part): the scores of R / 4 rows
//   rows      thread (row, column): running maximum and sum of a row, weights of the entries column + kColumns i
//   values    thread (four dims, set): the weighted sums of those dims for the rows set, set + kSets, ...
// with a barrier between. R is the number of query heads of a KV head, rounded up to 4, 8, 12, 16.
#pragma once
#include "../cuda/query.cuh"
#include "kernel.h"
#include "launch.h"

namespace strata_pa {
namespace hip {
using namespace cuda;

template <int D_, int R_, int chunk>
struct Block {
  static constexpr int D = D_, R = R_;
  static constexpr int kChunk = chunk, kThreads = 4 * kChunk, kColumns = kChunk / 4;
  static constexpr int kQuads = D / 4, kSets = kThreads / kQuads, kRows = (R + kSets - 1) / kSets;
  static constexpr int kPitch = shared::pitch(kChunk);  // floats between two rows of scores
  static_assert(kThreads % machine::kWave == 0, "whole waves");

  const Params& p;
  const int rows, groups, group_log2;
  const int tid;

  int64_t *k_at, *v_at;      // [kChunk]: where the entry's cell begins in k and v
  float *k_scale, *v_scale;  // [kChunk][groups], 0 where masked
  float* score;              // [R][kPitch]
  float* row_out;            // [16]: at the end, what the row's sums are divided by (NaN: a bad row, 0: it saw nothing)
  float* row_factor;         // [16]
  int* bad;                  // [16]: 1: a q or a scale of the row is not finite, 2: a score
  uint32_t* visible;         // [kChunk / 32]: a bit for each entry
  Sources* from;
  unsigned char* rest;       // what the kernel asked for beyond

  __device__ Block(const Params& p, unsigned char* at)
      : p(p), rows(p.heads_per_kv), groups(D / p.group), group_log2(31 - __clz(p.group)), tid(static_cast<int>(threadIdx.x)) {
    auto take = [&at](int bytes) { unsigned char* x = at; at += bytes; return x; };
    auto floats = [&take](int n) { return reinterpret_cast<float*>(take(n * 4)); };
    k_at = reinterpret_cast<int64_t*>(take(kChunk * 8));
    v_at = reinterpret_cast<int64_t*>(take(kChunk * 8));
    from = reinterpret_cast<Sources*>(take(shared::kSources));
    row_out = floats(16);
    row_factor = floats(16);
    bad = reinterpret_cast<int*>(take(16 * 4));
    visible = reinterpret_cast<uint32_t*>(take(16));
    score = floats(R * kPitch);
    k_scale = floats(kChunk * groups);
    v_scale = floats(kChunk * groups);
    rest = at;
    if (tid == 0) *from = Sources(p, Query(p));
    if (tid < 16) bad[tid] = 0;
    __syncthreads();
  }

  __device__ int entry() const { return tid & (kChunk - 1); }
  __device__ int part() const { return tid / kChunk; }
  __device__ int row() const { return tid / kColumns; }
  __device__ int column() const { return tid & (kColumns - 1); }
  __device__ int quad() const { return tid & (kQuads - 1); }
  __device__ int set() const { return tid / kQuads; }
  __device__ int first_chunk() const { return from->query.begin & ~(kChunk - 1); }
  __device__ bool sees(int entry) const { return visible[entry >> 5] >> (entry & 31) & 1; }
  __device__ const uint4* codes(const int8_t* pool, int64_t at) const { return reinterpret_cast<const uint4*>(pool + at); }

  // f(row, d, four elements of q there) for every row and every fourth dim; rows that there are not are zeros.
  template <class F>
  __device__ __forceinline__ void each_q(F f) const {
    const int64_t base = from->query.index * p.q_stride + from->query.kv * rows * p.q_head_stride;
#pragma unroll 1
    for (int i = tid; i < R * kQuads; i += kThreads) {
      const int row = i / kQuads, d = i % kQuads * 4;
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < rows) with_dtype(p, [&](auto dtype) { load_q4<decltype(dtype)::value>(p, base + row * p.q_head_stride + d, x); });
      if (!(is_finite(x[0]) && is_finite(x[1]) && is_finite(x[2]) && is_finite(x[3]))) atomicOr(bad + row, 1);
      f(row, d, x);
    }
  }

  // The page of this thread's entry is asked for in the chunk before.
  __device__ void look_up(int start) {
    if (tid >= kChunk) return;
    const Query& query = from->query;
    cell_ = query.cell(p, start + tid, query.raw(p, start + tid));
    physical_ = query.physical(p, cell_);
  }
  __device__ void place() {
    if (tid >= kChunk) return;
    Place at = from->query.place(p, cell_, physical_);
    const bool seen = at.page >= 0;
    const uint32_t mask = __ballot_sync(~0u, seen);
    if ((tid & 31) == 0) visible[tid >> 5] = mask;
    at.page = max(at.page, 0);  // masked: the codes of some cell, with the scale 0
    k_at[tid] = offset(p.k_stride, at);
    v_at[tid] = offset(p.v_stride, at);
    const uint16_t* k = from->k_scale + offset(p.k_scale_stride, at);
    const uint16_t* v = from->v_scale + offset(p.v_scale_stride, at);
    bool finite = true;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      const uint16_t of_k = seen ? __ldg(k + g) : uint16_t{0}, of_v = seen ? __ldg(v + g) : uint16_t{0};
      finite &= half_is_finite(of_k) && half_is_finite(of_v);
      k_scale[tid * groups + g] = half_to_float(of_k);
      v_scale[tid * groups + g] = half_to_float(of_v);
    }
    if (!finite)
      for (int row = 0; row < 16; ++row) atomicOr(bad + row, 1);
  }

  // Over the columns of a row.
  __device__ static float row_max(float x) {
#pragma unroll
    for (int o = 1; o < kColumns; o <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
  }
  // tree() of docs/numerics.md over the chunk, of which a thread has the entries column + kColumns i.
  __device__ static float tree(const float (&x)[4]) {
    float sum = __fadd_rn(__fadd_rn(x[0], x[2]), __fadd_rn(x[1], x[3]));
    if (kColumns == 16) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, o));
    return sum;
  }

  // The row's log-sum-exp, and what its sums become: `seen` is false where it has no visible entry.
  __device__ void finish_row(bool seen, float anchor, float sum, float divisor) const {
    if (row() >= rows || column() != 0) return;
    const int is_bad = bad[row()];
    seen |= (is_bad & 2) != 0;
    row_out[row()] = !seen ? 0.0f : is_bad ? __int_as_float(kNaNBits) : divisor;
    float lse = kMinusInf;
    if (seen) lse = is_bad ? __int_as_float(kNaNBits) : A::lse(anchor, sum);
    if (p.lse) p.lse[from->query.index * p.lse_stride + from->query.kv * rows + row()] = lse;
  }
  // f(i, c, divisor, row): the output of row set + kSets i in the dim quad * 4 + c.
  template <class F>
  __device__ __forceinline__ void store(F f) const {
    float x[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = min(set() + kSets * i, 15);
      const float divisor = row < rows ? row_out[row] : 0.0f;
#pragma unroll
      for (int c = 0; c < 4; ++c) x[i][c] = divisor > 0.0f ? __fadd_rn(f(i, c, divisor, row), 0.0f) : divisor;
    }
    with_dtype(p, [&](auto dtype) {
      const int64_t base = from->query.index * p.out_stride + from->query.kv * rows * p.out_head_stride + quad() * 4;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = set() + kSets * i;
        if (row < rows) store_out4<decltype(dtype)::value>(p, base + row * p.out_head_stride, x[i]);
      }
    });
  }

 private:
  int cell_ = -1, physical_ = -1;
};

}  // namespace hip
}  // namespace strata_pa
