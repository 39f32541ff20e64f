// fp32: FP32 arithmetic on dequantized values (docs/numerics.md, section 2), without matrix units: every order of summation is written there.
//
// One block of two warps per (query, KV head). Two chunks of 64 entries at a time: warp w scores chunk w, a lane two entries against all rows (R, the
// heads rounded up to a multiple of four); then every thread adds up the weighted values of four dims for R * D / 256 rows.
#include "common.cuh"

namespace strata_pa {
namespace cuda {

constexpr int kFp32Threads = 64, kChunk = 64, kPair = 2 * kChunk;

template <int D, int R>
struct Fp32Shared {
  float4* q;        // [D / 4][R], times c
  float* e;         // [128][R]: scores, then weights
  float* partial;   // [2 R][threads]
  int64_t* v_at;    // [128]: where the entry's row lies in v
  float* v_scale;   // [128][groups]
  float *top, *sum, *alpha;  // [2][16]: of a chunk
  float* row;       // [16]
  int* bad;         // [16]
  Sources* from;
  __device__ Fp32Shared(unsigned char* at, int groups) {
    auto take = [&at](int bytes) { unsigned char* x = at; at += bytes; return x; };
    auto floats = [&take](int n) { return reinterpret_cast<float*>(take(n * 4)); };
    q = reinterpret_cast<float4*>(take(D * R * 4));
    e = floats(kPair * R);
    partial = floats(2 * R * kFp32Threads);
    v_at = reinterpret_cast<int64_t*>(take(kPair * 8));
    top = floats(2 * 16);
    sum = floats(2 * 16);
    alpha = floats(2 * 16);
    row = floats(16);
    bad = reinterpret_cast<int*>(take(16 * 4));
    from = reinterpret_cast<Sources*>(take(shared::kSources));
    v_scale = floats(kPair * groups);
  }
};

// code * scale for the four codes of a word, exact: 32768 + (code + 128) has its code bits in the middle of the mantissa, and 32896 * scale is exact.
__device__ __forceinline__ void dequantize(float (&x)[4], uint32_t word, float scale, float minus_bias) {
  word ^= 0x80808080;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = __fmaf_rn(__int_as_float(static_cast<int>(byte_permute(word, 0x47000000, 0x7404 | i << 4))), scale, minus_bias);
}
constexpr float kMinusBias = -32896.0f;

template <int D, int R>
__device__ __forceinline__ void fp32_kernel(const Params& p) {
  extern __shared__ __align__(16) unsigned char raw_shared[];
  const int groups = D / p.group, group_log2 = 31 - __clz(p.group);
  const Fp32Shared<D, R> sh(raw_shared, groups);
  const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5, rows = p.heads_per_kv;

  if (tid == 0) *sh.from = Sources(p, Query(p));
  if (tid < 16) sh.bad[tid] = 0;
  __syncthreads();
  const Query& query = sh.from->query;
  with_dtype(p, [&](auto dtype) {
    const int64_t base = query.index * p.q_stride + query.kv * rows * p.q_head_stride;
#pragma unroll 1
    for (int i = tid; i < R * (D / 4); i += kFp32Threads) {
      const int row = i / (D / 4), d4 = i % (D / 4);
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < rows) load_q4<decltype(dtype)::value>(p, base + row * p.q_head_stride + d4 * 4, x);
      if (!(is_finite(x[0]) && is_finite(x[1]) && is_finite(x[2]) && is_finite(x[3]))) atomicOr(sh.bad + row, 1);
      sh.q[d4 * R + row] = make_float4(__fmul_rn(x[0], p.score_scale), __fmul_rn(x[1], p.score_scale), __fmul_rn(x[2], p.score_scale), __fmul_rn(x[3], p.score_scale));
    }
  });

  // The entries begin + 64 warp + lane and the one 32 further.
  const int begin = query.begin & ~(kChunk - 1), count = query.count;
  int raw[2], cell[2], physical[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int entry = begin + warp * kChunk + c * 32 + lane;
    cell[c] = query.cell(p, entry, query.raw(p, entry));
    physical[c] = query.physical(p, cell[c]);
  }

  constexpr int kRows = R * D / 256;  // of a thread's sums
  const int quad = tid % (D / 4), first_row = tid / (D / 4) * kRows;
  float acc[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.0f;
  float m = kMinusInf, l = 0.0f;  // of row `lane`: m in both warps, l in the first
  __syncthreads();

  for (int start = begin; start < count; start += kPair) {
    const int8_t* k[2];
    const uint16_t* k_scale[2];
    bool visible[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int slot = warp * kChunk + c * 32 + lane;
      Place at = query.place(p, cell[c], physical[c]);
      visible[c] = at.page >= 0;
      const int64_t scale_at = visible[c] ? offset(p.v_scale_stride, at) : 0;
      bool finite = true;
      for (int g = 0; g < groups; ++g) {
        const uint16_t h = visible[c] ? __ldg(sh.from->v_scale + scale_at + g) : uint16_t{0};
        finite &= half_is_finite(h);
        sh.v_scale[slot * groups + g] = half_to_float(h);
      }
      if (!finite)
        for (int row = 0; row < 16; ++row) atomicOr(sh.bad + row, 1);
      at.page = max(at.page, 0);  // a masked entry: the codes of some cell with the scale 0
      sh.v_at[slot] = offset(p.v_stride, at);
      k[c] = sh.from->k + offset(p.k_stride, at);
      k_scale[c] = sh.from->k_scale + offset(p.k_scale_stride, at);
      raw[c] = query.raw(p, start + kPair + slot);
    }

    // Scores: blocks of 16 dims, added in pairs up to 64 dims in registers, beyond in shared memory.
    float s[2][R];
#pragma unroll 1
    for (int d = 0; d < D; d += 64) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float scale[2], minus_bias[2], pair[2][R];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint16_t h = visible[c] ? __ldg(k_scale[c] + ((d + half * 32) >> group_log2)) : uint16_t{0};
          if (!half_is_finite(h))
            for (int row = 0; row < 16; ++row) atomicOr(sh.bad + row, 1);
          scale[c] = half_to_float(h);
          minus_bias[c] = __fmul_rn(kMinusBias, scale[c]);
        }
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const int at = d + half * 32 + block * 16;
          uint32_t word[2][4];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const uint4 x = __ldg(reinterpret_cast<const uint4*>(k[c] + at));
            word[c][0] = x.x, word[c][1] = x.y, word[c][2] = x.z, word[c][3] = x.w;
          }
          float b[2][R];
#pragma unroll
          for (int r = 0; r < R; ++r) b[0][r] = b[1][r] = 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float x[2][4];
            dequantize(x[0], word[0][i], scale[0], minus_bias[0]);
            dequantize(x[1], word[1][i], scale[1], minus_bias[1]);
#pragma unroll
            for (int r = 0; r < R; ++r) {
              const float4 q = sh.q[(at / 4 + i) * R + r];
#pragma unroll
              for (int c = 0; c < 2; ++c)
                b[c][r] = __fmaf_rn(q.w, x[c][3], __fmaf_rn(q.z, x[c][2], __fmaf_rn(q.y, x[c][1], __fmaf_rn(q.x, x[c][0], b[c][r]))));
            }
          }
#pragma unroll
          for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < 2; ++c) pair[c][r] = block ? __fadd_rn(pair[c][r], b[c][r]) : b[c][r];
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int c = 0; c < 2; ++c) s[c][r] = half ? __fadd_rn(s[c][r], pair[c][r]) : pair[c][r];
      }
      // Sums of 64 dims: (0 + 1) + (2 + 3). The sum of two lies where this lane's weights will.
      float* one = sh.partial + tid;
      float* two = sh.e + (warp * kChunk + lane) * R;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float& x = s[c][r];
          float& single = one[(c * R + r) * kFp32Threads];
          float& couple = two[c * 32 * R + r];
          if (d & 64) {
            x = __fadd_rn(single, x);
            if (d & 128) x = __fadd_rn(couple, x);
            else if (D > 128) couple = x;
          } else if (D > 64) {
            single = x;
          }
        }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int entry = start + kPair + warp * kChunk + c * 32 + lane;
      cell[c] = query.cell(p, entry, raw[c]);
      physical[c] = query.physical(p, cell[c]);
    }

    // The chunk's maxima; lane r keeps row r's.
    float top = kMinusInf;
    bool finite = true;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      finite &= (!visible[0] || is_finite(s[0][r])) && (!visible[1] || is_finite(s[1][r]));
      const float x = warp_max(fmaxf(visible[0] ? rintf(s[0][r]) : kMinusInf, visible[1] ? rintf(s[1][r]) : kMinusInf));
      if (lane == r) top = x;
    }
    if (!finite)
#pragma unroll
      for (int r = 0; r < R; ++r)
        if ((visible[0] && !is_finite(s[0][r])) || (visible[1] && !is_finite(s[1][r]))) atomicOr(sh.bad + r, 2);
    if (lane < R) sh.top[warp * 16 + lane] = top;
    __syncthreads();
    const float m0 = fmaxf(m, sh.top[lane & 15]), m1 = fmaxf(m0, sh.top[16 + (lane & 15)]), here = warp ? m1 : m0;
    const float alpha = shift(1.0f, warp ? __fsub_rn(m0, m1) : __fsub_rn(m, m0));  // 0 also where both are -inf
    m = m1;
    float total = 0.0f;
#pragma unroll
    for (int r0 = 0; r0 < R; r0 += 4) {
      float e[2][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float anchor = __shfl_sync(~0u, here, r0 + r);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x = s[c][r0 + r], n = rintf(x);
          e[c][r] = visible[c] ? shift(A::poly(__fsub_rn(x, n)), __fsub_rn(n, anchor)) : 0.0f;
        }
        float sum = __fadd_rn(e[0][r], e[1][r]);
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 16));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
        if (lane == r0 + r) total = sum;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c)
        *reinterpret_cast<float4*>(sh.e + (warp * kChunk + c * 32 + lane) * R + r0) = make_float4(e[c][0], e[c][1], e[c][2], e[c][3]);
    }
    if (lane < R) {
      sh.sum[warp * 16 + lane] = total;
      sh.alpha[warp * 16 + lane] = alpha;
    }
    __syncthreads();
    l = __fmaf_rn(l, sh.alpha[lane & 15], sh.sum[lane & 15]);
    l = __fmaf_rn(l, sh.alpha[16 + (lane & 15)], sh.sum[16 + (lane & 15)]);

    // The weighted values.
    const int8_t* v = sh.from->v + quad * 4;
    const float* v_scale = sh.v_scale + (quad * 4 >> group_log2);
#pragma unroll 1
    for (int chunk = 0; chunk < 2; ++chunk) {
      const int n = min(count - start - chunk * kChunk, kChunk);
      float x[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r][0] = x[r][1] = x[r][2] = x[r][3] = 0.0f;
#pragma unroll 1
      for (int j0 = 0; j0 < n; j0 += 4) {  // what lies past n is masked
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = __ldg(reinterpret_cast<const uint32_t*>(v + sh.v_at[chunk * kChunk + j0 + j]));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int slot = chunk * kChunk + j0 + j;
          const float scale = v_scale[slot * groups];
          float y[4], e[kRows];
          dequantize(y, word[j], scale, __fmul_rn(kMinusBias, scale));
          const float* from = sh.e + slot * R + first_row;
          if constexpr (kRows % 4 == 0) {
#pragma unroll
            for (int r = 0; r < kRows; r += 4) {
              const float4 z = *reinterpret_cast<const float4*>(from + r);
              e[r] = z.x, e[r + 1] = z.y, e[r + 2] = z.z, e[r + 3] = z.w;
            }
          } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r) e[r] = from[r];
          }
#pragma unroll
          for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[r][i] = __fmaf_rn(e[r], y[i], x[r][i]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float scale = sh.alpha[chunk * 16 + first_row + r];
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[r][i] = __fmaf_rn(acc[r][i], scale, x[r][i]);
      }
    }
    __syncthreads();
  }

  __syncthreads();
  if (tid < rows) {
    const int bad = sh.bad[tid];
    float total = 0.0f, lse = kMinusInf;
    if (m != kMinusInf || bad & 2) {
      total = bad ? __int_as_float(kNaNBits) : l;
      lse = bad ? __int_as_float(kNaNBits) : A::lse(m, l);
    }
    sh.row[tid] = total;
    if (p.lse) p.lse[query.index * p.lse_stride + query.kv * rows + tid] = lse;
  }
  __syncthreads();
  with_dtype(p, [&](auto dtype) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + r;
      if (row >= rows) break;
      const float total = sh.row[row];
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = total > 0.0f ? __fadd_rn(__fdiv_rn(acc[r][i], total), 0.0f) : total;
      store_out4<decltype(dtype)::value>(p, query.index * p.out_stride + (query.kv * rows + row) * p.out_head_stride + quad * 4, x);
    }
  });
}

}  // namespace cuda
}  // namespace strata_pa

using strata_pa::cuda::Params;

template <int D, int R>
constexpr int kBlocks = D * R >= 256 * 12 ? 4 : 5;  // per processor: as many as registers allow without a spill

#define STRATA_PA_FP32(D, R) \
  extern "C" __global__ void __launch_bounds__(64, kBlocks<D, R>) strata_fp32_d##D##_r##R(const __grid_constant__ Params p) { strata_pa::cuda::fp32_kernel<D, R>(p); }

STRATA_PA_FP32(64, 4)
STRATA_PA_FP32(64, 8)
STRATA_PA_FP32(64, 12)
STRATA_PA_FP32(64, 16)
STRATA_PA_FP32(128, 4)
STRATA_PA_FP32(128, 8)
STRATA_PA_FP32(128, 12)
STRATA_PA_FP32(128, 16)
STRATA_PA_FP32(256, 4)
STRATA_PA_FP32(256, 8)
STRATA_PA_FP32(256, 12)
STRATA_PA_FP32(256, 16)
