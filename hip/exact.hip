// exact: order-free integer sums (docs/numerics.md, section 5). The scores are computed twice, first for the anchors, then for the sums.
#include "digits.h"

namespace strata_pa {
namespace hip {

template <int D, int R>
__device__ __forceinline__ void exact_kernel(const Params& p) {
  using B = DigitBlock<D, R, kBiasExact>;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  B b(p, raw_shared);
  auto scale_of = [&](int i, int g) { return b.v_scale[(b.column() + 8 * i) * b.groups + g]; };

  // The anchors A and base: of the thread's entries, which the merge of docs/numerics.md joins, then of the row.
  float anchor = kMinusInf, base = kBFloor;
  auto find_anchors = [&](const bool (&seen)[4], const float (&s)[4]) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!seen[i]) continue;
      float top = 0.0f;
#pragma unroll 1
      for (int g = 0; g < b.groups; ++g) top = fmaxf(top, fabsf(scale_of(i, g)));
      const float n = rintf(s[i]), higher = fmaxf(anchor, n);
      finite &= is_finite(s[i]);
      const float moved = __fadd_rn(base, __fsub_rn(anchor, higher));
      base = fmaxf(fmaxf(moved, kBFloor), __fadd_rn(__fsub_rn(n, higher), level(top)));
      anchor = higher;
    }
    if (!finite) atomicOr(b.bad + b.row(), 2);
  };
  auto join_anchors = [&] {
    const float highest = B::row_max(anchor);
    base = B::row_max(fmaxf(__fadd_rn(base, __fsub_rn(anchor, highest)), kBFloor));  // -inf - -inf is NaN: the floor
    anchor = highest;
  };

  int64_t sum = 0, acc[B::kRows][4];
#pragma unroll
  for (int r = 0; r < B::kRows; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0;
  auto weigh = [&](const bool (&seen)[4], const float (&s)[4]) {
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float n = rintf(s[i]), d = __fsub_rn(n, anchor), p = A::poly(__fsub_rn(s[i], n));
      sum += seen[i] ? __float2int_rn(shift(p, __fadd_rn(d, kFixedPoint))) : 0;
      e[i] = seen[i] ? shift(p, __fadd_rn(__fsub_rn(d, base), kFixedPoint)) : 0.0f;
    }
#pragma unroll 1
    for (int g = 0; g < b.groups; ++g) {
      uint32_t digit[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)  // four signed bytes
        digit[i] = (static_cast<uint32_t>(__float2int_rn(__fmul_rn(e[i], scale_of(i, g)))) + 0x808080) ^ 0x808080;
      b.store_weights(g, digit);
    }
  };
  auto add_values = [&] {
    uint32_t v[8][4];
    b.load_v(v);
#pragma unroll
    for (int r = 0; r < B::kRows; ++r) {
      int part[4][4];
      b.weighted(v, r, part);
#pragma unroll
      for (int d = 0; d < 4; ++d) acc[r][d] += int64_t{part[3][d] * 256 + part[2][d]} * 65536 + (part[1][d] * 256 + part[0][d]);
    }
  };

  const int begin = b.first_chunk(), count = b.from->query.count;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) join_anchors();
    b.look_up(begin);
#pragma unroll 1
    for (int start = begin; start < count; start += B::kChunk) {
      b.place();
      b.look_up(start + B::kChunk);
      __syncthreads();
      b.scores();
      __syncthreads();
      if (b.row() < R) {
        float s[4];
        bool seen[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int entry = b.column() + 8 * i;
          s[i] = b.score[b.row() * B::kPitch + entry];
          seen[i] = b.sees(entry);
        }
        if (pass == 0) find_anchors(seen, s);
        else weigh(seen, s);
      }
      __syncthreads();
      if (pass == 0) continue;
      add_values();
      __syncthreads();
    }
  }

#pragma unroll
  for (int o = 1; o < B::kColumns; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  const float total = __ll2float_rn(sum);
  __syncthreads();
  b.finish_row(anchor != kMinusInf, anchor, __fmul_rn(total, 0x1p-30f), total);
  if (b.column() == 0) b.row_factor[b.row()] = shift(1.0f, base);
  __syncthreads();
  b.store([&](int i, int d, float divisor, int row) { return __fmul_rn(divide_ordinary(__ll2float_rn(acc[i][d]), divisor), b.row_factor[row]); });
}

}  // namespace hip
}  // namespace strata_pa

#define STRATA_PA_EXACT(D, R) STRATA_PA_KERNEL(strata_exact_d##D##_r##R, 128, strata_pa::hip::exact_kernel<D, R>)
STRATA_PA_EACH_SHAPE(STRATA_PA_EXACT)
