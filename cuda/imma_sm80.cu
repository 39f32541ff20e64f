// imma: both products in INT8 MMA, chunks of 32 entries under an online softmax (docs/numerics.md, section 4).
#include "digits.cuh"

namespace strata_pa {
namespace cuda {

#ifdef STRATA_PA_SM80
// Digits of the weights e * v_scale of one group, rows g and g + 8: MMA fragments over the chunk's 32 entries, and the tops / 127.
struct WeightDigits {
  uint32_t h[4], l[4], m[4];
  float unit[2];

  __device__ __forceinline__ WeightDigits(const float* e, const float* v_scale, int stride, int g, int t) {
    float v[8];
    load8(v, v_scale + 8 * t);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float y[8], top = 0.0f;
      load8(y, e + (g + 8 * r) * stride + 8 * t);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        y[i] = __fmul_rn(y[i], v[i]);
        top = fmaxf(top, fabsf(y[i]));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      unit[r] = __fmul_rn(top, kInv127);
      // (y * scale) * 65536 = y * (scale * 65536) in every bit that rint leaves.
      const float scale = top < kDigitFloor ? 0.0f : __fmul_rn(divide_ordinary(127.0f, top), 65536.0f);
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // entries 2t, 2t + 1, 8 + 2t, 9 + 2t, then 16 further
        int x[4], high[4];
        const int order[4] = {2 * k, 2 * k + 4, 2 * k + 1, 2 * k + 5};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = __float2int_rn(__fmul_rn(y[order[i]], scale));
          high[i] = x[i] + kBiasImma;
        }
        const uint32_t a = byte_permute(x[0], x[1], 0x5140), b = byte_permute(x[2], x[3], 0x5140);
        m[2 * k + r] = byte_permute(a, b, 0x5410);
        l[2 * k + r] = byte_permute(a, b, 0x7632);
        h[2 * k + r] = byte_permute(byte_permute(high[0], high[1], 0x62), byte_permute(high[2], high[3], 0x62), 0x5410);
      }
    }
  }
  static __device__ __forceinline__ void load8(float (&x)[8], const float* at) {
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
};

template <int D, int G>
__device__ __forceinline__ void imma_kernel(const Params& p) {
  using Block = DigitBlock<D, G>;
  constexpr int S = Block::S;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  Block b(p, raw_shared);
  if (b.tid < 16) b.state[b.tid] = make_float2(kMinusInf, 0.0f);
  b.template start<kBiasImma>();
  const int begin = b.first_chunk(), count = b.from->query.count;
  b.issue_k(begin);
  b.issue_v(begin);

  float acc[4][2][4];  // [16 dims][row g, g + 8][dims 4t .. 4t + 3 of them]
#pragma unroll
  for (int u = 0; u < 4; ++u)
#pragma unroll
    for (int r = 0; r < 2; ++r) acc[u][r][0] = acc[u][r][1] = acc[u][r][2] = acc[u][r][3] = 0.0f;

  for (int start = begin; start < count; start += 32) {
    b.forget();
    b.copy.template land<1>(b.k_tile(), b.lane);
    b.store_scales(b.ks, b.k_scale);
    b.template partial_scores<kBiasImma>();
    __syncthreads();

    b.forget();
    b.issue_k(start + 32);
    b.store_scales(b.vs, b.v_scale);
    const uint32_t mask = b.masks[start >> 5 & 3];
#pragma unroll
    for (int step = 0; step < Block::kRowSteps; ++step) {
      const int first = b.warp * 4 + step * (Block::kThreads / 8), run = b.lane & 7;
      if (first >= b.rows) break;
      const int asked = first + (b.lane >> 3), row = min(asked, b.rows - 1);
      const uint32_t shown = mask >> run;
      float s[4], top = kMinusInf, check = 0.0f;
      b.scores(s, row, run);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // entry run + 8 i
        const bool visible = shown & 1u << 8 * i;
        check = __fmaf_rn(visible ? s[i] : 0.0f, 0.0f, check);  // NaN from the first score on that is not finite
        s[i] = visible ? s[i] : kMinusInf;
        top = fmaxf(top, s[i]);
      }
      if (check != 0.0f) atomicOr(b.bad + row, 2);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
      const float2 old = b.state[row];
      const float m = fmaxf(old.x, top);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = exp2_portable(__fsub_rn(s[i], m));
      // -inf - -inf is NaN, of which exp2_portable makes +0 too
      const float alpha = exp2_portable(__fsub_rn(old.x, m));
      float sum = __fadd_rn(__fadd_rn(s[0], s[2]), __fadd_rn(s[1], s[3]));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
      __syncwarp();
      if (asked < b.rows) {
        *reinterpret_cast<float4*>(b.e + row * S + 4 * run) = make_float4(s[0], s[1], s[2], s[3]);
        if (run == 0) {
          b.alpha[row] = alpha;
          b.state[row] = make_float2(m, __fmaf_rn(old.y, alpha, sum));
        }
      }
    }
    b.feed(start);
    __syncthreads();

    b.forget();
    b.copy.template land<1>(b.v_tile(), b.lane);
    const float alpha[2] = {b.alpha[b.g], b.alpha[b.g + 8]};
#pragma unroll
    for (int own = 0; own < Block::kOwn; ++own) {
      const WeightDigits w(b.e, b.v_scale + b.group(own) * S, S, b.g, b.t);
      const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits}, zero[4] = {0, 0, 0, 0};
#pragma unroll
      for (int u = own * (4 / Block::kOwn); u < (own + 1) * (4 / Block::kOwn); ++u) {
        uint32_t v[4];  // entries 2t, 2t + 1 of the four eights, dims 2g, 2g + 1 of sixteen
        // Never true, but it makes tile u wait for the sums of tile u - 2: all eight at once would not fit the registers.
        const bool wait = u >= 2 && __float_as_int(acc[u >= 2 ? u - 2 : 0][1][3]) == 0x7f812345;
        ldmatrix4_trans(v, shared_address(b.v_tile() + SwizzledTile::at(b.lane, u) + (wait ? 1024 : 0)));
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t selector = odd ? 0x7531 : 0x6420, b0 = byte_permute(v[0], v[1], selector), b1 = byte_permute(v[2], v[3], selector);
          int h[4], l[4], m[4];
          mma_s8s8(l, w.l, b0, b1, zero);
          mma_u8s8(m, w.m, b0, b1, zero);
          mma_s8s8(h, w.h, b0, b1, magic);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& a = acc[u][c >> 1][2 * (c & 1) + odd];
            a = __fmaf_rn(a, alpha[c >> 1], __fmul_rn(join_half_magic(h[c], l[c] * 256 + m[c]), w.unit[c >> 1]));
          }
        }
      }
    }
    __syncwarp();
    b.forget();
    if (__float_as_int(acc[3][1][3]) == 0x7f812345) __trap();  // never: the last tile's sums, too, come before what follows
    b.issue_v(start + 32);
  }

  __syncthreads();
  if (b.tid < b.rows) {
    const int row = b.tid, bad = b.bad[row];
    const float2 end = b.state[row];
    float factor = 0.0f, lse = kMinusInf;
    if (end.x != kMinusInf || bad & 2) {  // saw an entry: its score is finite, or it is not
      factor = bad ? __int_as_float(kNaNBits) : divide_ordinary(1.0f, end.y);
      lse = bad ? __int_as_float(kNaNBits) : A::lse(end.x, end.y);
    }
    b.alpha[row] = factor;
    if (p.lse) p.lse[b.from->query.index * p.lse_stride + b.from->query.kv * b.rows + row] = lse;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = b.alpha[b.g + 8 * r];
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[u][r][i] = factor != factor ? factor : __fadd_rn(__fmul_rn(acc[u][r][i], factor), 0.0f);
  }
  b.store_out(acc);
}
#endif

}  // namespace cuda
}  // namespace strata_pa

using strata_pa::cuda::Params;
// Warps per processor: 12 where shared memory holds no more, or the registers of 16 would not do.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
constexpr int kMostWarps = 16;
#else
constexpr int kMostWarps = 12;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1030
constexpr bool kFewer = true;
#else
constexpr bool kFewer = false;
#endif
constexpr int warps(int dim, int group) { return dim == 256 && group == 64 ? kMostWarps : group == 32 || kFewer ? 8 : 12; }

#ifdef STRATA_PA_SM80
#define STRATA_PA_BODY(D, G) strata_pa::cuda::imma_kernel<D, G>(p)
#else
#define STRATA_PA_BODY(D, G)
#endif
#define STRATA_PA_IMMA(D, G) \
  extern "C" __global__ void __launch_bounds__(D / 2, warps(D, G) / (D / 64)) strata_imma_d##D##_g##G(const __grid_constant__ Params p) { STRATA_PA_BODY(D, G); }

STRATA_PA_IMMA(64, 32)
STRATA_PA_IMMA(64, 64)
STRATA_PA_IMMA(128, 32)
STRATA_PA_IMMA(128, 64)
STRATA_PA_IMMA(128, 128)
STRATA_PA_IMMA(256, 32)
STRATA_PA_IMMA(256, 64)
STRATA_PA_IMMA(256, 128)
STRATA_PA_IMMA(256, 256)
