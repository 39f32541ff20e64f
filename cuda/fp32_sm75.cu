// fp32: FP32 arithmetic on dequantized values (docs/numerics.md, section 2), without matrix units: every order of summation is written there.
//
// One block of two warps per (query, KV head). Two chunks of 64 entries at a time: warp w scores chunk w, a lane four entries against half the rows (R,
// the heads rounded up to a multiple of four), so that a word read from shared memory serves four fma's, as it must on a processor that does 128 of
// them in the time of 32 words; then every thread adds up the weighted values of four dims for R * D / 256 rows.
#include "common.cuh"

namespace strata_pa {
namespace cuda {

constexpr int kFp32Threads = 64, kChunk = 64, kPair = 2 * kChunk;

template <int D, int R>
struct Fp32Shared {
  float4* q;        // [D / 4][R], times c
  float* e;         // [128][R]: weights; while there are scores, their sums of 128 dims, as in partial
  float4* partial;  // [2][R / 2][threads]: sums of 32 and of 64 dims, a lane's four entries of a row together
  int64_t *k_at, *v_at;      // [128]: where the entry's row lies in k and v
  float *k_scale, *v_scale;  // [128][groups], 0 where masked
  float *top, *sum, *alpha;  // [2][16]: of a chunk
  float* row;       // [16]
  int* bad;         // [16]
  Sources* from;
  __device__ Fp32Shared(unsigned char* at, int groups) {
    auto take = [&at](int bytes) { unsigned char* x = at; at += bytes; return x; };
    auto floats = [&take](int n) { return reinterpret_cast<float*>(take(n * 4)); };
    q = reinterpret_cast<float4*>(take(D * R * 4));
    e = floats(kPair * R);
    partial = reinterpret_cast<float4*>(take(2 * 2 * R * kFp32Threads * 4));
    k_at = reinterpret_cast<int64_t*>(take(kPair * 8));
    v_at = reinterpret_cast<int64_t*>(take(kPair * 8));
    top = floats(2 * 16);
    sum = floats(2 * 16);
    alpha = floats(2 * 16);
    row = floats(16);
    bad = reinterpret_cast<int*>(take(16 * 4));
    from = reinterpret_cast<Sources*>(take(shared::kSources));
    k_scale = floats(kPair * groups);
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
  const int rows = p.heads_per_kv;
  int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;

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
  auto quad = [&]() { return tid % (D / 4); };
  auto first_row = [&]() { return tid / (D / 4) * kRows; };
  float acc[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.0f;
  float m = kMinusInf, l = 0.0f;  // of the row that this lane keeps
  __syncthreads();

  constexpr int H = R / 2;
  int half = lane >> 4, column = lane & 15;  // scores: rows half * H .. , entries column + 16 i of the warp's chunk
  // Computes the thread's places in shared memory anew from here on: kept through the loop, all of them, they cost more registers than there are.
  auto forget = [&]() {
    hide(tid);
    lane = tid & 31, warp = tid >> 5, half = lane >> 4, column = lane & 15;
  };
  for (int start = begin; start < count; start += kPair) {
    forget();
    uint32_t visible[2];
    bool there[2];
    const uint16_t *k_scales[2], *v_scales[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int slot = warp * kChunk + c * 32 + lane;
      Place at = query.place(p, cell[c], physical[c]);
      there[c] = at.page >= 0;
      visible[c] = __ballot_sync(~0u, there[c]);
      at.page = max(at.page, 0);  // a masked entry: the codes of some cell with the scale 0
      sh.k_at[slot] = offset(p.k_stride, at);
      sh.v_at[slot] = offset(p.v_stride, at);
      k_scales[c] = sh.from->k_scale + offset(p.k_scale_stride, at);
      v_scales[c] = sh.from->v_scale + offset(p.v_scale_stride, at);
      raw[c] = query.raw(p, start + kPair + slot);
    }
    bool finite = true;
#pragma unroll 4
    for (int g = 0; g < groups; ++g)
#pragma unroll
      for (int c = 0; c < 2; ++c) {  // both entries' loads are on their way together
        const int slot = warp * kChunk + c * 32 + lane;
        const uint16_t k = there[c] ? __ldg(k_scales[c] + g) : uint16_t{0}, v = there[c] ? __ldg(v_scales[c] + g) : uint16_t{0};
        finite &= half_is_finite(k) && half_is_finite(v);
        sh.k_scale[slot * groups + g] = half_to_float(k);
        sh.v_scale[slot * groups + g] = half_to_float(v);
      }
    if (!finite)
      for (int row = 0; row < 16; ++row) atomicOr(sh.bad + row, 1);
    __syncwarp();

    // Scores: blocks of 16 dims, added in pairs: sums of 32 dims in registers, longer ones through shared memory. Words are loaded a block ahead.
    float s[4][H];
    const int first_slot = warp * kChunk + column;
    float4* const of_32 = sh.partial + tid;
    float4* const of_64 = of_32 + H * kFp32Threads;
    float4* const of_128 = reinterpret_cast<float4*>(sh.e) + tid;
    const int8_t* k[4];
    uint4 next[4];
    auto fetch = [&](int d) {
#pragma unroll
      for (int c = 0; c < 4; ++c) next[c] = __ldg(reinterpret_cast<const uint4*>(k[c] + d));
    };
#pragma unroll
    for (int c = 0; c < 4; ++c) k[c] = sh.from->k + sh.k_at[first_slot + 16 * c];
    fetch(0);
#pragma unroll 1
    for (int d = start + warp * kChunk < count ? 0 : D; d < D; d += 32) {  // a chunk without entries may have any: all are masked
      float scale[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) scale[c] = sh.k_scale[(first_slot + 16 * c) * groups + (d >> group_log2)];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        uint32_t word[4][4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          word[c][0] = next[c].x, word[c][1] = next[c].y, word[c][2] = next[c].z, word[c][3] = next[c].w;
        }
        fetch((d + block * 16 + 16) & (D - 1));  // at the end the first ones again
        float b[4][H];
#pragma unroll
        for (int r = 0; r < H; ++r) b[0][r] = b[1][r] = b[2][r] = b[3][r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x[4][4];
#pragma unroll
          for (int c = 0; c < 4; ++c) dequantize(x[c], word[c][i], scale[c], __fmul_rn(kMinusBias, scale[c]));
#pragma unroll
          for (int r = 0; r < H; ++r) {
            const float4 q = sh.q[(d / 4 + block * 4 + i) * R + half * H + r];
#pragma unroll
            for (int c = 0; c < 4; ++c)
              b[c][r] = __fmaf_rn(q.w, x[c][3], __fmaf_rn(q.z, x[c][2], __fmaf_rn(q.y, x[c][1], __fmaf_rn(q.x, x[c][0], b[c][r]))));
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int r = 0; r < H; ++r) s[c][r] = block ? __fadd_rn(s[c][r], b[c][r]) : b[c][r];
      }
      // A round's sums are all loaded before the first is needed.
      auto keep = [&](float4* at) {
#pragma unroll
        for (int r = 0; r < H; ++r) at[r * kFp32Threads] = make_float4(s[0][r], s[1][r], s[2][r], s[3][r]);
      };
      auto load = [&](float (&x)[4][H], const float4* at) {
#pragma unroll
        for (int r = 0; r < H; ++r) {
          const float4 y = at[r * kFp32Threads];
          x[0][r] = y.x, x[1][r] = y.y, x[2][r] = y.z, x[3][r] = y.w;
        }
      };
      auto each = [&](auto f) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int r = 0; r < H; ++r) f(c, r);
      };
      auto add = [&](const float4* lower) {
        float x[4][H];
        load(x, lower);
        each([&](int c, int r) { s[c][r] = __fadd_rn(x[c][r], s[c][r]); });
      };
      auto last = [&](const float4* lower) {  // of_32 keeps what the sum rounds away
        float x[4][H], low[4][H];
        load(x, lower);
        each([&](int c, int r) {
          const float sum = __fadd_rn(x[c][r], s[c][r]), u = __fsub_rn(sum, x[c][r]);
          low[c][r] = __fadd_rn(__fsub_rn(x[c][r], __fsub_rn(sum, u)), __fsub_rn(s[c][r], u));
          s[c][r] = sum;
        });
#pragma unroll
        for (int r = 0; r < H; ++r) of_32[r * kFp32Threads] = make_float4(low[0][r], low[1][r], low[2][r], low[3][r]);
      };
      if (!(d & 32)) {
        keep(of_32);
      } else if (D == 64) {
        last(of_32);
      } else {
        add(of_32);
        if (!(d & 64)) {
          keep(of_64);
        } else if (D == 128) {
          last(of_64);
        } else {
          add(of_64);
          if (!(d & 128)) keep(of_128);
          else last(of_128);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int entry = start + kPair + warp * kChunk + c * 32 + lane;
      cell[c] = query.cell(p, entry, raw[c]);
      physical[c] = query.physical(p, cell[c]);
    }

    forget();
    // The chunk's maxima; the lane of column r keeps those of row half * H + r. Rows side by side, without branches: their latencies overlap.
    float tops[H], top = kMinusInf;
    bool seen[4];
    uint32_t bad = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) seen[c] = visible[c >> 1] >> (column + 16 * (c & 1)) & 1;
#pragma unroll
    for (int r = 0; r < H; ++r) {
      float x = kMinusInf;
      bool finite = true;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float n = rintf(s[c][r]);
        finite &= !seen[c] || is_finite(s[c][r]);
        x = fmaxf(x, seen[c] ? n : kMinusInf);
      }
      bad |= finite ? 0u : 1u << r;
      tops[r] = x;
    }
#pragma unroll
    for (int o = 8; o; o >>= 1)
#pragma unroll
      for (int r = 0; r < H; ++r) tops[r] = fmaxf(tops[r], __shfl_xor_sync(~0u, tops[r], o));
#pragma unroll
    for (int r = 0; r < H; ++r)
      if (column == r) top = tops[r];
    if (bad)
      for (int r = 0; r < H; ++r)
        if (bad >> r & 1) atomicOr(sh.bad + half * H + r, 2);
    const int own = half * H + min(column, H - 1);
    if (column < H) sh.top[warp * 16 + own] = top;
    __syncthreads();
    const float m0 = fmaxf(m, sh.top[own]), m1 = fmaxf(m0, sh.top[16 + own]), here = warp ? m1 : m0;
    const float alpha = shift(1.0f, warp ? __fsub_rn(m0, m1) : __fsub_rn(m, m0));  // 0 also where both are -inf
    m = m1;
    float* const e = sh.e + (warp * kChunk + column) * R + half * H;
    float sums[H], total = 0.0f;
#pragma unroll
    for (int r0 = 0; r0 < H; r0 += 2) {
#pragma unroll
      for (int r = r0; r < r0 + 2; ++r) {
        const float anchor = __shfl_sync(~0u, here, (lane & 16) + r);
        const float4 low4 = sh.partial[tid + r * kFp32Threads];
        const float lows[4] = {low4.x, low4.y, low4.z, low4.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float x = s[c][r], n = rintf(x), low = fabsf(x) < 65536.0f ? lows[c] : 0.0f;
          const float weight = shift(A::poly(__fadd_rn(__fsub_rn(x, n), low)), __fsub_rn(n, anchor));
          s[c][r] = seen[c] ? weight : 0.0f;
        }
        sums[r] = __fadd_rn(__fadd_rn(s[0][r], s[2][r]), __fadd_rn(s[1][r], s[3][r]));
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) *reinterpret_cast<float2*>(e + 16 * c * R + r0) = make_float2(s[c][r0], s[c][r0 + 1]);
    }
    constexpr int kSumOrder[4] = {8, 1, 2, 4};
#pragma unroll
    for (int o = 0; o < 4; ++o)
#pragma unroll
      for (int r = 0; r < H; ++r) sums[r] = __fadd_rn(sums[r], __shfl_xor_sync(~0u, sums[r], kSumOrder[o]));
#pragma unroll
    for (int r = 0; r < H; ++r)
      if (column == r) total = sums[r];
    if (column < H) {
      sh.sum[warp * 16 + own] = total;
      sh.alpha[warp * 16 + own] = alpha;
    }
    __syncthreads();
    l = __fmaf_rn(l, sh.alpha[own], sh.sum[own]);
    l = __fmaf_rn(l, sh.alpha[16 + own], sh.sum[16 + own]);

    // The weighted values.
    const int8_t* v = sh.from->v + quad() * 4;
    const float* v_scale = sh.v_scale + (quad() * 4 >> group_log2);
#pragma unroll 1
    for (int chunk = 0; chunk < 2; ++chunk) {
      const int n = min(count - start - chunk * kChunk, kChunk);
      float x[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r][0] = x[r][1] = x[r][2] = x[r][3] = 0.0f;
      const int64_t* const v_at = sh.v_at + chunk * kChunk;
      uint32_t next[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) next[j] = __ldg(reinterpret_cast<const uint32_t*>(v + v_at[j]));
#pragma unroll 1
      for (int j0 = 0; j0 < n; j0 += 4) {  // what lies past n is masked
        uint32_t word[4];
        const int ahead = (j0 + 4) & (kChunk - 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          word[j] = next[j];
          next[j] = __ldg(reinterpret_cast<const uint32_t*>(v + v_at[ahead + j]));
        }
        // All four entries' weights first: where a load has to wait for registers, the compiler orders fma's by loads and not by what their operands share.
        float e[4][kRows], y[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int slot = chunk * kChunk + j0 + j;
          const float scale = v_scale[slot * groups];
          dequantize(y[j], word[j], scale, __fmul_rn(kMinusBias, scale));
          const float* from = sh.e + slot * R + first_row();
          if constexpr (kRows % 4 == 0) {
#pragma unroll
            for (int r = 0; r < kRows; r += 4) {
              const float4 z = *reinterpret_cast<const float4*>(from + r);
              e[j][r] = z.x, e[j][r + 1] = z.y, e[j][r + 2] = z.z, e[j][r + 3] = z.w;
            }
          } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r) e[j][r] = from[r];
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < kRows; ++r) x[r][i] = __fmaf_rn(e[j][r], y[j][i], x[r][i]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float scale = sh.alpha[chunk * 16 + first_row() + r];
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[r][i] = __fmaf_rn(acc[r][i], scale, x[r][i]);
      }
    }
    __syncthreads();
  }

  __syncthreads();
  if (warp == 0 && column < H && half * H + column < rows) {
    const int row = half * H + column, bad = sh.bad[row];
    float total = 0.0f, lse = kMinusInf;
    if (m != kMinusInf || bad & 2) {
      total = bad ? __int_as_float(kNaNBits) : l;
      lse = bad ? __int_as_float(kNaNBits) : A::lse(m, l);
    }
    sh.row[row] = total;
    if (p.lse) p.lse[query.index * p.lse_stride + query.kv * rows + row] = lse;
  }
  __syncthreads();
  with_dtype(p, [&](auto dtype) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row() + r;
      if (row >= rows) break;
      const float total = sh.row[row];
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = total > 0.0f ? __fadd_rn(__fdiv_rn(acc[r][i], total), 0.0f) : total;
      store_out4<decltype(dtype)::value>(p, query.index * p.out_stride + (query.kv * rows + row) * p.out_head_stride + quad() * 4, x);
    }
  });
}

}  // namespace cuda
}  // namespace strata_pa

using strata_pa::cuda::Params;

// Blocks per processor. Fewer than registers would allow for many rows: only with registers to spare can the compiler load ahead and
// keep the operands of an fma in different banks, whose reads bind before anything else does.
template <int D, int R>
constexpr int kBlocks = R == 16 || (R == 12 && D > 64) ? 4 : R == 4 ? 8 : 6;

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
