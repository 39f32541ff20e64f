// v1 and v2: both products in FP16 MMA with FP32 accumulation, q and p split into hi + lo. Every FP32 step is pinned to one
// instruction, in the published order, so that no compiler can move a bit.
//
// One block per (query, KV head): 12 heads are rows 0..11 of 16-row MMA tiles. Warp w owns dims 64w .. 64w + 63, one scale group. A chunk
// is 32 list entries. Within a warp lane = 4 g + t, as in the MMA fragments.
#pragma once
#include <cuda_fp16.h>

#include "common.cuh"

namespace strata_pa {
namespace cuda {

constexpr int kSplitRows = 12;

// Exact binary16 of two signed codes: the bytes `selector` of `word`, whose sign bits are flipped already, above 0x64: 1024 + (code + 128).
__device__ __forceinline__ uint32_t codes_to_half2(uint32_t word, uint32_t selector) {
  uint32_t biased = byte_permute(word, 0x64646464, selector), codes;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(codes) : "r"(biased), "r"(0x64806480));  // 1152
  return codes;
}

// hi = fp16(x), lo = fp16(x - hi), for two values.
__device__ __forceinline__ void split2(float x, float y, uint32_t& hi, uint32_t& lo) {
  __half hx = __float2half_rn(x), hy = __float2half_rn(y);
  __half lx = __float2half_rn(__fsub_rn(x, __half2float(hx))), ly = __float2half_rn(__fsub_rn(y, __half2float(hy)));
  hi = static_cast<uint32_t>(__half_as_ushort(hx)) | static_cast<uint32_t>(__half_as_ushort(hy)) << 16;
  lo = static_cast<uint32_t>(__half_as_ushort(lx)) | static_cast<uint32_t>(__half_as_ushort(ly)) << 16;
}

// The hardware's 2^x with denormals kept: below -126 the argument is halved and the result squared.
__device__ __forceinline__ float exp2_hardware(float x) {
  bool low = x < -126.0f;
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fmul_rn(x, low ? 0.5f : 1.0f)));
  return __fmul_rn(r, low ? r : 1.0f);
}

// One k-step of 16: the hi, then the lo part of A. A's registers are those of m16n8k16; m16n8k8 takes them two by two.
struct MmaK16 {
  static __device__ __forceinline__ void one(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef STRATA_PA_SM80
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
  }
  static __device__ __forceinline__ void step(float (&c)[4], const uint32_t (&hi)[4], const uint32_t (&lo)[4], uint32_t b0, uint32_t b1) {
    one(c, hi, b0, b1);
    one(c, lo, b0, b1);
  }
};
struct MmaK8 {
  static __device__ __forceinline__ void one(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
  static __device__ __forceinline__ void step(float (&c)[4], const uint32_t (&hi)[4], const uint32_t (&lo)[4], uint32_t b0, uint32_t b1) {
    one(c, hi[0], hi[1], b0);
    one(c, lo[0], lo[1], b0);
    one(c, hi[2], hi[3], b1);
    one(c, lo[2], lo[3], b1);
  }
};

// Blocks per processor: what shared memory of 100 KB holds, and where it is larger, what the registers give without a spill.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
constexpr int kV2Blocks = 4;
#else
constexpr int kV2Blocks = 3;
#endif

struct SplitShared {
  unsigned char* k;   // [4][32] rows
  unsigned char* v;
  float* partial;     // [4][12][kSplitRow]
  float* e;           // [16][kSplitRow], rows 12..15 zero
  Place* places;      // [2][32]
  float* k_scale;     // [4][32]
  float* weight;      // [4][32]: v_scale, brought to [0, 16384]
  float* row;         // [16]: alpha, at the end 1 / l
  float* word;        // [4]: a word per warp
  uint32_t* mask;     // [4]: of the chunks
  float2* state;      // [16]: running max and sum of a row
  Sources* from;
  __device__ explicit SplitShared(unsigned char* at) {
    auto take = [&at](uint32_t bytes) { unsigned char* p = at; at += bytes; return p; };
    k = take(4 * 32 * shared::kTileRow);
    v = take(4 * 32 * shared::kTileRow);
    partial = reinterpret_cast<float*>(take(4 * kSplitRows * shared::kSplitRow * 4));
    e = reinterpret_cast<float*>(take(16 * shared::kSplitRow * 4));
    places = reinterpret_cast<Place*>(take(2 * 32 * 8));
    k_scale = reinterpret_cast<float*>(take(4 * 32 * 4));
    weight = reinterpret_cast<float*>(take(4 * 32 * 4));
    row = reinterpret_cast<float*>(take(16 * 4));
    word = reinterpret_cast<float*>(take(4 * 4));
    mask = reinterpret_cast<uint32_t*>(take(4 * 4));
    state = reinterpret_cast<float2*>(take(16 * 8));
    from = reinterpret_cast<Sources*>(take(shared::kSources));
  }
};

template <class Mma, class Copy>
__device__ __forceinline__ void split_kernel(const Params& p) {
  constexpr int S = shared::kSplitRow;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  const SplitShared sh(raw_shared);
  int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  if (tid == 0) *sh.from = Sources(p, Query(p));
  __syncthreads();
  const Query& query = sh.from->query;
  const int64_t q_base = query.index * p.q_stride + query.kv * kSplitRows * p.q_head_stride;
  const int begin = query.begin & ~31, count = query.count;

  Feeder feeder;
  if (warp == 3) {
    feeder.start(p, query, begin + lane);
    feeder.write(p, query, begin + lane, sh.places, sh.mask);
    feeder.write(p, query, begin + 32 + lane, sh.places, sh.mask);
  }

  // q: rows g and g + 8; per k-step dims 2t, 2t + 1, 2t + 8, 2t + 9 of row g, then of row g + 8
  uint32_t q_hi[4][4], q_lo[4][4];
  float q_down;
  {
    float x[4][8], top = 0.0f;
    with_dtype(p, [&](auto dtype) {
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          int row = g + (i >= 4 ? 8 : 0), d = warp * 64 + s * 16 + 2 * t + (i & 1) + (i & 2 ? 8 : 0);
          x[s][i] = row < kSplitRows ? load_q<decltype(dtype)::value>(p, q_base + row * p.q_head_stride + d) : 0.0f;
          top = fmaxf(top, fabsf(x[s][i]));
        }
    });
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    if (lane == 0) sh.word[warp] = top;
    for (int i = tid; i < 4 * S; i += 128) sh.e[kSplitRows * S + i] = 0.0f;
    if (tid < 4) sh.row[kSplitRows + tid] = 0.0f;
    if (tid < 16) sh.state[tid] = make_float2(kMinusInf, 0.0f);
    __syncthreads();
    top = fmaxf(fmaxf(sh.word[0], sh.word[1]), fmaxf(sh.word[2], sh.word[3]));
    const bool tiny = top < 0x1p-126f;
    int exponent = (__float_as_int(tiny ? __fmul_rn(top, 0x1p64f) : top) >> 23) - (tiny ? 126 + 64 : 126);
    if (!(top > 0.0f) || !is_finite(top)) exponent = 0;
    // 2^(14 - exponent) may be out of range; its two halves are not.
    const int half = (14 - exponent) >> 1, rest = 14 - exponent - half;
    const float up0 = __int_as_float((127 + half) << 23), up1 = __int_as_float((127 + rest) << 23);
    q_down = __fmul_rn(__fmul_rn(p.score_scale, __int_as_float((127 - half) << 23)), __int_as_float((127 - rest) << 23));
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[s][i] = __fmul_rn(__fmul_rn(x[s][i], up0), up1);
      split2(x[s][0], x[s][1], q_hi[s][0], q_lo[s][0]);
      split2(x[s][4], x[s][5], q_hi[s][1], q_lo[s][1]);
      split2(x[s][2], x[s][3], q_hi[s][2], q_lo[s][2]);
      split2(x[s][6], x[s][7], q_hi[s][3], q_lo[s][3]);
    }
  }

  unsigned char* const k_tile = sh.k + warp * 32 * shared::kTileRow;
  unsigned char* const v_tile = k_tile + 4 * 32 * shared::kTileRow;
  float* k_scale = sh.k_scale + warp * 32;
  float* weight = k_scale + 4 * 32;
  Copy k_copy, v_copy;

  k_copy.issue(k_tile, sh.from->k + warp * 64, p.k_stride, sh.places + (begin & 32), lane);
  k_copy.commit();
  v_copy.issue(v_tile, sh.from->v + warp * 64, p.v_stride, sh.places + (begin & 32), lane);
  v_copy.commit();
  const Place mine = sh.places[(begin & 32) + lane];
  uint16_t ks = load_scale(sh.from->k_scale, p.k_scale_stride, mine, warp), vs = load_scale(sh.from->v_scale, p.v_scale_stride, mine, warp);

  float acc[8][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
  for (int start = begin; start < count; start += 32) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    // Computes the thread's places in shared memory anew: kept through the loop, all of them, they cost more registers than there are.
    asm volatile("" : "+r"(tid));
    lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
#endif
    // scores of this warp's dims
    k_copy.template land<1>(k_tile, lane);
    k_scale[lane] = half_to_float(ks);
    __syncwarp();
    {
      float* partial = sh.partial + warp * kSplitRows * S;
      const uint32_t selector = t & 1 ? 0x4342 : 0x4140;
      float c[4][4];  // four tiles side by side: the sums of one are a chain
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned char* cell = k_tile + (i * 8 + g) * shared::kTileRow + (t >> 1) * 4 + s * 16;
          uint32_t low = *reinterpret_cast<const uint32_t*>(cell) ^ 0x80808080;
          uint32_t high = *reinterpret_cast<const uint32_t*>(cell + 8) ^ 0x80808080;
          Mma::step(c[i], q_hi[s], q_lo[s], codes_to_half2(low, selector), codes_to_half2(high, selector));
        }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = i * 8 + 2 * t;
        float2 scale = *reinterpret_cast<const float2*>(k_scale + at);
        *reinterpret_cast<float2*>(partial + g * S + at) = make_float2(__fmul_rn(c[i][0], scale.x), __fmul_rn(c[i][1], scale.y));
        if (g < kSplitRows - 8)
          *reinterpret_cast<float2*>(partial + (g + 8) * S + at) = make_float2(__fmul_rn(c[i][2], scale.x), __fmul_rn(c[i][3], scale.y));
      }
    }
    __syncthreads();

    const Place* next = sh.places + (~start & 32);
    k_copy.issue(k_tile, sh.from->k + warp * 64, p.k_stride, next, lane);
    k_copy.commit();
    ks = load_scale(sh.from->k_scale, p.k_scale_stride, next[lane], warp);

    if (warp < 3) {  // 12 rows x 8 threads, each a run of four entries
      const int row = tid >> 3, run = tid & 7;
      const float* from = sh.partial + row * S + run * 4;
      float x[4], y[4][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float4 z = *reinterpret_cast<const float4*>(from + w * kSplitRows * S);
        y[w][0] = z.x, y[w][1] = z.y, y[w][2] = z.z, y[w][3] = z.w;
      }
      const uint32_t visible = sh.mask[start >> 5 & 3] >> run * 4;
      float top = kMinusInf;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = __fmul_rn(__fadd_rn(__fadd_rn(__fadd_rn(y[0][i], y[1][i]), y[2][i]), y[3][i]), q_down);
        if (!(visible >> i & 1)) x[i] = kMinusInf;
        top = fmaxf(top, x[i]);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
      const float m = sh.state[row].x;
      float m_new = fmaxf(m, top), e[4], sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[i] = x[i] == kMinusInf ? 0.0f : exp2_hardware(__fsub_rn(x[i], m_new));
        sum = __fadd_rn(sum, e[i]);
      }
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
      float alpha = m == kMinusInf ? 0.0f : exp2_hardware(__fsub_rn(m, m_new));
      *reinterpret_cast<float4*>(sh.e + row * S + run * 4) = make_float4(e[0], e[1], e[2], e[3]);
      __syncwarp();
      if (run == 0) {
        sh.row[row] = alpha;
        sh.state[row] = make_float2(m_new, __fmaf_rn(sh.state[row].y, alpha, sum));
      }
    } else {
      feeder.write(p, query, start + 64 + lane, sh.places, sh.mask);
    }
    float scale = half_to_float(vs), top = warp_max(scale);
    weight[lane] = top == 0.0f ? 0.0f : __fmul_rn(scale, divide_ordinary(16384.0f, top));
    const float down = __fmul_rn(top, 1.0f / 16384.0f);
    __syncthreads();

    // the weighted sum of this warp's dims: column n of tile 4 h + i is dim 32 h + 4 n + i
    v_copy.template land<1>(v_tile, lane);
    {
      uint32_t hi[2][4], lo[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int at = s * 16 + h * 8 + 2 * t;
          float2 w = *reinterpret_cast<const float2*>(weight + at);
          float2 a = *reinterpret_cast<const float2*>(sh.e + g * S + at), b = *reinterpret_cast<const float2*>(sh.e + (g + 8) * S + at);
          split2(__fmul_rn(a.x, w.x), __fmul_rn(a.y, w.y), hi[s][2 * h], lo[s][2 * h]);
          split2(__fmul_rn(b.x, w.x), __fmul_rn(b.y, w.y), hi[s][2 * h + 1], lo[s][2 * h + 1]);
        }
      const float alpha0 = sh.row[g], alpha1 = sh.row[g + 8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        __syncwarp();
        uint32_t pair[2][2][2];  // [k-step][cells 2t.. or 2t + 8..][dims 0, 1 or 2, 3]: the bytes of two cells interleaved
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const unsigned char* cell = v_tile + (s * 16 + h * 8 + 2 * t) * shared::kTileRow + half * 32 + g * 4;
            uint32_t a = *reinterpret_cast<const uint32_t*>(cell) ^ 0x80808080;
            uint32_t b = *reinterpret_cast<const uint32_t*>(cell + shared::kTileRow) ^ 0x80808080;
            pair[s][h][0] = byte_permute(a, b, 0x5140);
            pair[s][h][1] = byte_permute(a, b, 0x7362);
          }
        float c[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t selector = i & 1 ? 0x4342 : 0x4140;
            Mma::step(c[i], hi[s], lo[s], codes_to_half2(pair[s][0][i >> 1], selector), codes_to_half2(pair[s][1][i >> 1], selector));
          }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float(&a)[4] = acc[half * 4 + i];
          a[0] = __fmaf_rn(a[0], alpha0, __fmul_rn(c[i][0], down));
          a[1] = __fmaf_rn(a[1], alpha0, __fmul_rn(c[i][1], down));
          a[2] = __fmaf_rn(a[2], alpha1, __fmul_rn(c[i][2], down));
          a[3] = __fmaf_rn(a[3], alpha1, __fmul_rn(c[i][3], down));
        }
      }
    }
    __syncwarp();
    v_copy.issue(v_tile, sh.from->v + warp * 64, p.v_stride, next, lane);
    v_copy.commit();
    vs = load_scale(sh.from->v_scale, p.v_scale_stride, next[lane], warp);
  }

  __syncthreads();
  if (tid < kSplitRows) {
    const int row = tid;
    const float m = sh.state[row].x, l = sh.state[row].y;
    sh.row[row] = l == 0.0f ? 0.0f : divide_ordinary(1.0f, l);
    if (p.lse) p.lse[query.index * p.lse_stride + query.kv * kSplitRows + row] = l == 0.0f ? kMinusInf : A::lse(m, l);
  }
  __syncthreads();
  with_dtype(p, [&](auto dtype) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (g + 8 * h >= kSplitRows) break;
      float inverse = sh.row[g + 8 * h];
      int64_t at = query.index * p.out_stride + (query.kv * kSplitRows + g + 8 * h) * p.out_head_stride + warp * 64 + t * 8;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = inverse == 0.0f ? 0.0f : __fmul_rn(acc[j + i][2 * h + n], inverse);
          store_out4<decltype(dtype)::value>(p, at + j * 8 + n * 4, x);
        }
    }
  });
}

}  // namespace cuda
}  // namespace strata_pa
