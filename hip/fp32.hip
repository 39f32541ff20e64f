// fp32: FP32 arithmetic on dequantized values (docs/numerics.md, section 2).
#include "block.h"

namespace strata_pa {
namespace hip {

// code * scale for the four codes of a word, exact.
__device__ __forceinline__ void dequantize(float* x, uint32_t word, float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(static_cast<float>(static_cast<int8_t>(word >> 8 * i)), scale);
}

template <int D, int R>
struct Fp32Block : Block<D, R, 64> {
  using Base = Block<D, R, 64>;
  using Base::kPitch;
  using Base::kRows;
  using Base::kSets;
  static constexpr int kOwn = R / 4;  // rows of a thread's scores

  float4* q;   // [D / 4][R], times c
  float* low;  // [R][kPitch]: what the last addition of a score rounds away
  __device__ Fp32Block(const Params& p, unsigned char* at) : Base(p, at) {
    q = reinterpret_cast<float4*>(this->rest);
    low = reinterpret_cast<float*>(this->rest + D * R * 4);
    this->each_q([&](int row, int d, const float (&x)[4]) {
      const float c = p.score_scale;
      q[d / 4 * R + row] = make_float4(__fmul_rn(x[0], c), __fmul_rn(x[1], c), __fmul_rn(x[2], c), __fmul_rn(x[3], c));
    });
  }

  // Sums of 16 dims, added in pairs: `half` holds the sum of one half, then `of[i]` that of 32 << i dims until its neighbour is there.
  __device__ __forceinline__ void scores() const {
    const int entry = this->entry(), first = this->part() * kOwn;
    const uint4* const k = this->codes(this->from->k, this->k_at[entry]);
    const float* const scale = this->k_scale + entry * this->groups;
    float of_32[kOwn], of_64[kOwn], of_128[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) of_32[r] = of_64[r] = of_128[r] = 0.0f;
    uint4 next[2] = {__ldg(k), __ldg(k + 1)};
#pragma unroll 1
    for (int d = 0; d < D; d += 32) {
      float sum[kOwn];
      const float s = scale[d >> this->group_log2];
      const uint4 now[2] = {next[0], next[1]};
      const int ahead = (d + 32) % D / 16;
      next[0] = __ldg(k + ahead), next[1] = __ldg(k + ahead + 1);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        float x[16];
        dequantize(x, now[block].x, s), dequantize(x + 4, now[block].y, s), dequantize(x + 8, now[block].z, s), dequantize(x + 12, now[block].w, s);
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
          float b = 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float4 y = q[((d + block * 16) / 4 + i) * R + first + r];
            b = __fmaf_rn(y.w, x[4 * i + 3], __fmaf_rn(y.z, x[4 * i + 2], __fmaf_rn(y.y, x[4 * i + 1], __fmaf_rn(y.x, x[4 * i], b))));
          }
          sum[r] = block ? __fadd_rn(sum[r], b) : b;
        }
      }
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        float& held = D == 64 ? of_32[r] : D == 128 ? of_64[r] : of_128[r];  // of the lower half of the dims
        float x = sum[r];
        if (D > 64) {
          if (!(d & 32)) of_32[r] = x;
          else x = __fadd_rn(of_32[r], x);
        }
        if (D > 128 && (d & 32)) {
          if (!(d & 64)) of_64[r] = x;
          else x = __fadd_rn(of_64[r], x);
        }
        if (d + 32 == D / 2) {
          held = x;
        } else if (d + 32 == D) {
          const float s = __fadd_rn(held, x), u = __fsub_rn(s, held);
          this->score[(first + r) * kPitch + entry] = s;
          low[(first + r) * kPitch + entry] = __fadd_rn(__fsub_rn(held, __fsub_rn(s, u)), __fsub_rn(x, u));
        }
      }
    }
  }
};

template <int D, int R>
__device__ __forceinline__ void fp32_kernel(const Params& p) {
  using B = Fp32Block<D, R>;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  B b(p, raw_shared);
  float m = kMinusInf, l = 0.0f;  // of the thread's row
  float acc[B::kRows][4];
#pragma unroll
  for (int r = 0; r < B::kRows; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.0f;

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
      float s[4], n[4], e[4], top = kMinusInf;
      bool seen[4], finite = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int entry = b.column() + B::kColumns * i;
        s[i] = b.score[b.row() * B::kPitch + entry];
        n[i] = rintf(s[i]);
        seen[i] = b.sees(entry);
        finite &= !seen[i] || is_finite(s[i]);
        top = fmaxf(top, seen[i] ? n[i] : kMinusInf);
      }
      if (!finite) atomicOr(b.bad + b.row(), 2);
      const float higher = fmaxf(m, B::row_max(top)), alpha = shift(1.0f, __fsub_rn(m, higher));  // 0 also where both are -inf
      m = higher;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = b.row() * B::kPitch + b.column() + B::kColumns * i;
        const float low = fabsf(s[i]) < 65536.0f ? b.low[at] : 0.0f;
        e[i] = seen[i] ? shift(A::poly(__fadd_rn(__fsub_rn(s[i], n[i]), low)), __fsub_rn(n[i], m)) : 0.0f;
        b.score[at] = e[i];
      }
      l = __fmaf_rn(l, alpha, B::tree(e));
      if (b.column() == 0) b.row_factor[b.row()] = alpha;
    }
    __syncthreads();

    const int8_t* const v = b.from->v + b.quad() * 4;
    const float* const scale = b.v_scale + (b.quad() * 4 >> b.group_log2);
    float x[B::kRows][4];
#pragma unroll
    for (int r = 0; r < B::kRows; ++r) x[r][0] = x[r][1] = x[r][2] = x[r][3] = 0.0f;
    const int n = min(count - start, B::kChunk);
#pragma unroll 1
    for (int j0 = 0; j0 < n; j0 += 4) {  // what lies past n is masked
      float y[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        dequantize(y[j], __ldg(reinterpret_cast<const uint32_t*>(v + b.v_at[j0 + j])), scale[(j0 + j) * b.groups]);
#pragma unroll
      for (int r = 0; r < B::kRows; ++r) {
        const int row = min(b.set() + B::kSets * r, R - 1);
        const float4 e = *reinterpret_cast<const float4*>(b.score + row * B::kPitch + j0);
#pragma unroll
        for (int c = 0; c < 4; ++c)
          x[r][c] = __fmaf_rn(e.w, y[3][c], __fmaf_rn(e.z, y[2][c], __fmaf_rn(e.y, y[1][c], __fmaf_rn(e.x, y[0][c], x[r][c]))));
      }
    }
#pragma unroll
    for (int r = 0; r < B::kRows; ++r) {
      const float alpha = b.row_factor[min(b.set() + B::kSets * r, R - 1)];
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[r][c] = __fmaf_rn(acc[r][c], alpha, x[r][c]);
    }
    __syncthreads();
  }

  __syncthreads();
  b.finish_row(m != kMinusInf, m, l, l);
  __syncthreads();
  b.store([&](int i, int c, float divisor, int) { return __fdiv_rn(acc[i][c], divisor); });
}

}  // namespace hip
}  // namespace strata_pa

#define STRATA_PA_FP32(D, R) STRATA_PA_KERNEL(strata_fp32_d##D##_r##R, 256, strata_pa::hip::fp32_kernel<D, R>)
STRATA_PA_EACH_SHAPE(STRATA_PA_FP32)
