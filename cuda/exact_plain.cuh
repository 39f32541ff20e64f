// exact: order-free integer sums (docs/numerics.md, section 5), in its plain form: one query per block, the scores computed twice, first for the
// anchors, then for the sums. With kPart one of the two steps alone, to or from arrays.
#pragma once
#include "digits.cuh"

namespace strata_pa {
namespace cuda {

#ifdef STRATA_PA_SM80
template <int D, int G>
struct ExactBlock : DigitBlock<D, G> {
  using Base = DigitBlock<D, G>;
  using Base::S;
  using Base::kThreads;
  __device__ ExactBlock(const Params& p, unsigned char* at) : Base(p, at) {}

  // f(row, is it one of the rows, run, scores of the entries run + 8 i) for every row of this warp.
  template <class F>
  __device__ __forceinline__ void each_row(F f) {
#pragma unroll
    for (int step = 0; step < Base::kRowSteps; ++step) {
      const int first = this->warp * 4 + step * (kThreads / 8), run = this->lane & 7;
      if (first >= this->rows) break;
      const int asked = first + (this->lane >> 3), row = min(asked, this->rows - 1);
      float s[4];
      this->scores(s, row, run);
      f(step, row, asked < this->rows, run, s);
    }
  }
};

// Bytes of W, the top one signed: four digits as MMA fragments over the chunk's 32 entries, rows g and g + 8.
struct WeightBytes {
  uint32_t plane[4][4];
  __device__ __forceinline__ WeightBytes(const float* e, const float* v_scale, int stride, int g, int t) {
    float v[8];
    load8(v, v_scale + 8 * t);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float w[8];
      load8(w, e + (g + 8 * r) * stride + 8 * t);
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // entries 2t, 2t + 1, 8 + 2t, 9 + 2t, then 16 further
        int x[4];
        const int order[4] = {2 * k, 2 * k + 4, 2 * k + 1, 2 * k + 5};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __float2int_rn(__fmul_rn(w[order[i]], v[order[i]]));
        const uint32_t a = byte_permute(x[0], x[1], 0x5140), b = byte_permute(x[2], x[3], 0x5140);
        const uint32_t c = byte_permute(x[0], x[1], 0x7362), d = byte_permute(x[2], x[3], 0x7362);
        plane[0][2 * k + r] = byte_permute(a, b, 0x5410);
        plane[1][2 * k + r] = byte_permute(a, b, 0x7632);
        plane[2][2 * k + r] = byte_permute(c, d, 0x5410);
        plane[3][2 * k + r] = byte_permute(c, d, 0x7632);
      }
    }
  }
  static __device__ __forceinline__ void load8(float (&x)[8], const float* at) {
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
};

template <int D, int G, bool kPart = false>
__device__ __forceinline__ void exact_kernel(const Params& p, const ExactPart& part = {}, int block = static_cast<int>(blockIdx.x)) {
  using Block = ExactBlock<D, G>;
  constexpr int S = Block::S, kSteps = Block::kRowSteps, kOwn = Block::kOwn;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  Block b(p, raw_shared);
  b.template start<kBiasExact>(block);
  const int begin = b.first_chunk(), count = b.from->query.count;

  // The anchors A and base of each thread's entries; the merge of docs/numerics.md moves base along with A.
  float anchor[kSteps], base[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) anchor[i] = kMinusInf, base[i] = kBFloor;
  // A thread's row in step i, and where the row lies in the arrays of partial state.
  auto row_of = [&](int i) { return b.warp * 4 + i * (Block::kThreads / 8) + (b.lane >> 3); };
  auto place_of = [&](int row) { return (static_cast<int64_t>(b.from->query.index) * p.n_kv + b.from->query.kv) * b.rows + row; };
  const bool sums_only = kPart && part.L;
  if (!sums_only) {
    b.issue_k(begin);
    b.load_scales(b.vs, b.from->v_scale, p.v_scale_stride, b.places[(begin & 32) + b.lane]);
    for (int start = begin; start < count; start += 32) {
      b.forget();
      b.copy.template land<0>(b.k_tile(), b.lane);
      b.store_scales(b.ks, b.k_scale);
      b.store_scales(b.vs, b.v_scale);
      b.template partial_scores<kBiasExact>();
      __syncthreads();
      b.forget();
      b.issue_k(start + 32);
      b.load_scales(b.vs, b.from->v_scale, p.v_scale_stride, b.places[(~start & 32) + b.lane]);
      const uint32_t mask = b.masks[start >> 5 & 3];
      b.each_row([&](int step, int row, bool, int run, const float (&s)[4]) {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float top = 0.0f;
#pragma unroll
          for (int group = 0; group < Block::kGroups; ++group) top = fmaxf(top, fabsf(b.v_scale[group * S + 4 * run + i]));
          if (mask >> (run + 8 * i) & 1) {
            const float n = rintf(s[i]), higher = fmaxf(anchor[step], n);
            finite &= is_finite(s[i]);
            const float moved = __fadd_rn(base[step], __fsub_rn(anchor[step], higher));
            base[step] = fmaxf(fmaxf(moved, kBFloor), __fadd_rn(__fsub_rn(n, higher), level(top)));
            anchor[step] = higher;
          }
        }
        if (!finite) atomicOr(b.bad + row, 2);
      });
      b.feed(start);
      __syncthreads();
    }
    b.copy.template land<0>(b.k_tile(), b.lane);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float higher = anchor[i];
      for (int o = 1; o < 8; o <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, o));
      base[i] = fmaxf(__fadd_rn(base[i], __fsub_rn(anchor[i], higher)), kBFloor);  // -inf - -inf is NaN: the floor
      for (int o = 1; o < 8; o <<= 1) base[i] = fmaxf(base[i], __shfl_xor_sync(~0u, base[i], o));
      anchor[i] = higher;
    }
  }
  if constexpr (kPart) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = row_of(i);
      if (row >= b.rows) break;
      const int64_t at = place_of(row);
      if (sums_only) {
        anchor[i] = part.A[at], base[i] = part.b[at];
      } else if ((b.lane & 7) == 0) {
        const int bad = b.bad[row];
        const bool is_bad = bad && (anchor[i] != kMinusInf || bad & 2);
        part.A[at] = is_bad ? __int_as_float(kNaNBits) : anchor[i];
        part.b[at] = is_bad ? kBFloor : base[i];
      }
    }
    if (!sums_only) return;
  }

  // The sums.
  __syncthreads();
  b.feed();
  __syncthreads();
  b.issue_k(begin);
  b.issue_v(begin);
  int64_t sum[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) sum[i] = 0;
  int plane[4][4][2][4];  // [byte][16 dims][odd dims][fragment]
  auto clear = [&]() {
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) plane[d][u][odd][0] = plane[d][u][odd][1] = plane[d][u][odd][2] = plane[d][u][odd][3] = 0;
  };
  auto joined = [&](int u, int odd, int c) {
    int64_t x = plane[3][u][odd][c];
    x = (x << 8) + plane[2][u][odd][c];
    x = (x << 8) + plane[1][u][odd][c];
    return (x << 8) + plane[0][u][odd][c];
  };
  auto hold = [&](int u, int odd, int c) {  // no joining earlier: it doubles the registers
#pragma unroll
    for (int d = 0; d < 4; ++d) hide(plane[d][u][odd][c]);
  };
  int64_t* const long_sums = reinterpret_cast<int64_t*>(b.rest) + b.tid;  // [32][threads], only if a list may be that long
  const bool is_long = p.max_entries > static_cast<int>(shared::kPlaneEntries);
  clear();
  if (is_long)
    for (int i = 0; i < 32; ++i) long_sums[i * Block::kThreads] = 0;

  for (int start = begin; start < count; start += 32) {
    b.forget();
    b.copy.template land<1>(b.k_tile(), b.lane);
    b.store_scales(b.ks, b.k_scale);
    b.template partial_scores<kBiasExact>();
    __syncthreads();
    b.forget();
    b.issue_k(start + 32);
    b.store_scales(b.vs, b.v_scale);
    const uint32_t mask = b.masks[start >> 5 & 3];
    b.each_row([&](int step, int row, bool real, int run, float (&s)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool visible = mask >> (run + 8 * i) & 1;
        const float n = rintf(s[i]), d = __fsub_rn(n, anchor[step]), e = A::poly(__fsub_rn(s[i], n));
        sum[step] += visible ? __float2int_rn(shift(e, __fadd_rn(d, kFixedPoint))) : 0;
        s[i] = visible ? shift(e, __fadd_rn(__fsub_rn(d, base[step]), kFixedPoint)) : 0.0f;
      }
      if (real) *reinterpret_cast<float4*>(b.e + row * S + 4 * run) = make_float4(s[0], s[1], s[2], s[3]);
    });
    b.feed(start);
    __syncthreads();

    b.forget();
    b.copy.template land<1>(b.v_tile(), b.lane);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const WeightBytes w(b.e, b.v_scale + b.group(own) * S, S, b.g, b.t);
#pragma unroll
      for (int u = own * (4 / kOwn); u < (own + 1) * (4 / kOwn); ++u) {
        uint32_t v[4];
        ldmatrix4_trans(v, shared_address(b.v_tile() + SwizzledTile::at(b.lane, u)));
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t selector = odd ? 0x7531 : 0x6420, b0 = byte_permute(v[0], v[1], selector), b1 = byte_permute(v[2], v[3], selector);
          mma_s8s8(plane[3][u][odd], w.plane[3], b0, b1, plane[3][u][odd]);
#pragma unroll
          for (int d = 0; d < 3; ++d) mma_u8s8(plane[d][u][odd], w.plane[d], b0, b1, plane[d][u][odd]);
        }
      }
    }
    __syncwarp();
    b.forget();
    b.issue_v(start + 32);
    if (is_long && ((start - begin + 32) & (shared::kPlaneEntries - 1)) == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) long_sums[i * Block::kThreads] += joined(i >> 3, i >> 2 & 1, i & 3);
      clear();
    }
  }

  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = row_of(i);
    for (int o = 1; o < 8; o <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
    if constexpr (kPart) {
      if (row < b.rows && (b.lane & 7) == 0) part.L[place_of(row)] = sum[i];
    } else if (row < b.rows && (b.lane & 7) == 0) {
      const int bad = b.bad[row];
      const bool seen = anchor[i] != kMinusInf || bad & 2;
      const float total = __ll2float_rn(sum[i]);
      float lse = kMinusInf;
      if (seen) lse = bad ? __int_as_float(kNaNBits) : A::lse(anchor[i], __fmul_rn(total, 0x1p-30f));
      b.alpha[row] = !seen ? 0.0f : bad ? __int_as_float(kNaNBits) : total;
      b.extra[row] = shift(1.0f, base[i]);
      if (p.lse) p.lse[b.from->query.index * p.lse_stride + b.from->query.kv * b.rows + row] = lse;
    }
  }
  if constexpr (kPart) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (b.g + 8 * r >= b.rows) break;
      int64_t* const to = part.O + place_of(b.g + 8 * r) * D + b.warp * 64 + b.t * 4;
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int odd = i & 1, c = 2 * r + (i >> 1);
          hold(u, odd, c);
          to[u * 16 + i] = joined(u, odd, c) + (is_long ? long_sums[(u * 8 + odd * 4 + c) * Block::kThreads] : 0);
        }
    }
    return;
  }
  __syncthreads();
  float out[4][2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = b.alpha[b.g + 8 * r], unit = b.extra[b.g + 8 * r];
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int odd = i & 1, c = 2 * r + (i >> 1);
        hold(u, odd, c);
        int64_t o = joined(u, odd, c);
        if (is_long) o += long_sums[(u * 8 + odd * 4 + c) * Block::kThreads];
        const float x = __fadd_rn(__fmul_rn(divide_ordinary(__ll2float_rn(o), total), unit), 0.0f);
        out[u][r][i] = total > 0.0f ? x : total;  // +0: saw nothing; NaN
      }
  }
  b.store_out(out);
}
#endif

}  // namespace cuda
}  // namespace strata_pa
