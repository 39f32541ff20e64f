// imma: INT8 products with an exact 24-bit split of the other operand, online softmax (docs/numerics.md, section 4).
#include "digits.h"

namespace strata_pa {
namespace hip {

template <int D, int R>
__device__ __forceinline__ void imma_kernel(const Params& p) {
  using B = DigitBlock<D, R, kBiasImma>;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  B b(p, raw_shared);
  float m = kMinusInf, l = 0.0f;  // of the thread's row
  float acc[B::kRows][4];
#pragma unroll
  for (int r = 0; r < B::kRows; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.0f;
  float* const alphas = b.row_factor;
  float* const units = b.most;

  const int begin = b.first_chunk(), count = b.from->query.count;
  b.look_up(begin);
#pragma unroll 1
  for (int start = begin; start < count; start += B::kChunk) {
    b.place();
    b.look_up(start + B::kChunk);
    __syncthreads();
    b.scores();
    __syncthreads();

    if (b.row() < R) {
      float s[4], top = kMinusInf;
      bool seen[4], finite = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int entry = b.column() + 8 * i;
        s[i] = b.score[b.row() * B::kPitch + entry];
        seen[i] = b.sees(entry);
        finite &= !seen[i] || is_finite(s[i]);
        top = fmaxf(top, seen[i] ? s[i] : kMinusInf);
      }
      if (!finite) atomicOr(b.bad + b.row(), 2);
      const float higher = fmaxf(m, B::row_max(top)), alpha = exp2_portable(__fsub_rn(m, higher));  // 0 also where both are -inf
      m = higher;
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = seen[i] ? exp2_portable(__fsub_rn(s[i], m)) : 0.0f;
      l = __fmaf_rn(l, alpha, B::tree(e));
      if (b.column() == 0) alphas[b.row()] = alpha;
#pragma unroll 1
      for (int g = 0; g < b.groups; ++g) {
        float y[4], most = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[i] = __fmul_rn(e[i], b.v_scale[(b.column() + 8 * i) * b.groups + g]);
          most = fmaxf(most, fabsf(y[i]));
        }
        most = B::row_max(most);
        const float scale = A::digit_scale(most);
        uint32_t digit[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) digit[i] = B::digits(A::fixed(y[i], scale));
        b.store_weights(g, digit);
        if (b.column() == 0) units[b.row() * b.groups + g] = __fmul_rn(most, kInv127);
      }
    }
    __syncthreads();

    uint32_t v[8][4];
    b.load_v(v);
    int codes[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int d = 0; d < 4; ++d) codes[d] = machine::dot4(v[c][d], kOnes, codes[d]);
#pragma unroll
    for (int r = 0; r < B::kRows; ++r) {
      int sum[3][4];
      b.weighted(v, r, sum);
      const int row = min(b.set() + B::kSets * r, R - 1);
      const float alpha = alphas[row], unit = units[row * b.groups + (b.quad() * 4 >> b.group_log2)];
#pragma unroll
      for (int d = 0; d < 4; ++d)
        acc[r][d] = __fmaf_rn(acc[r][d], alpha, __fmul_rn(A::join(sum[2][d], sum[1][d] * 256 + sum[0][d] + 128 * codes[d]), unit));
    }
    __syncthreads();
  }

  __syncthreads();
  b.finish_row(m != kMinusInf, m, l, divide_ordinary(1.0f, l));
  __syncthreads();
  b.store([&](int i, int d, float inverse, int) { return __fmul_rn(acc[i][d], inverse); });
}

}  // namespace hip
}  // namespace strata_pa

#define STRATA_PA_IMMA(D, R) STRATA_PA_KERNEL(strata_imma_d##D##_r##R, 128, strata_pa::hip::imma_kernel<D, R>)
STRATA_PA_EACH_SHAPE(STRATA_PA_IMMA)
