// What imma and exact share: digits of q in registers, chunks of 32 entries through shared memory, scores (docs/numerics.md, section 3).
//
// One block per (query, KV head); the heads are rows of 16-row MMA tiles. Warp w owns dims 64w .. 64w + 63. Within a warp lane = 4 g + t, as
// in the MMA fragments. Tiles hold entries in list order; arrays of scores, weights and scales hold entry j at position(j) = 4 (j % 8) + j / 8, so
// that a thread's entries 2t, 2t + 8, 2t + 16, 2t + 24, 2t + 1, ... of four 8-wide fragments are neighbours, and so are the four entries
// j, j + 8, j + 16, j + 24 that a chunk's sum adds first.
#pragma once
#include "common.cuh"

namespace strata_pa {
namespace cuda {

template <int D, int G>
struct DigitBlock {
  static constexpr int kWarps = D / 64, kThreads = 32 * kWarps, kGroups = D / G;
  static constexpr int kOwn = G < 64 ? 64 / G : 1;             // groups of a warp
  static constexpr int kSpan = G > 64 ? G / 64 : 1;            // warps of a group
  static constexpr int kRowSteps = kWarps == 4 ? 1 : 4 / kWarps;  // 16 rows x 8 threads in steps of kThreads
  static constexpr int S = shared::kScoreRow;

  const Params& p;
  const int rows;
  int tid, lane, warp, g, t;
  unsigned char* tiles;               // K [warps], V [warps]
  float* partial;                     // [partials][16][S]
  float* e;                           // [16][S]
  float *k_scale, *v_scale;           // [groups][S]
  Place* places;                      // [2][32]
  float *tops, *factors;              // [16][D / 32], [16][groups]
  float* alpha;                       // [16], at the end a factor of the output
  int* bad;                           // [16]: a q, a score or a scale of the row is not finite
  float2* state;                      // [16]: the kernel's running values of a row
  float* extra;                       // [16]
  uint32_t* masks;                    // [4]
  Sources* from;
  unsigned char* rest;                // what the kernel asked for beyond

  uint32_t q[3][2][4];    // [digit, high first][k-step of 32 dims][fragment]
  uint16_t ks[kOwn], vs[kOwn];
  Feeder* feeders;        // [32]: the last warp's, between the chunks
  TileCopyAsync<SwizzledTile> copy;

  __device__ DigitBlock(const Params& p, unsigned char* at)
      : p(p), rows(p.heads_per_kv), tid(static_cast<int>(threadIdx.x)), lane(tid & 31), warp(tid >> 5), g(lane >> 2), t(lane & 3) {
    auto take = [&at](int bytes) { unsigned char* x = at; at += bytes; return x; };
    auto floats = [&take](int n) { return reinterpret_cast<float*>(take(n * 4)); };
    tiles = take(2 * kWarps * SwizzledTile::kBytes);
    e = floats(16 * S);
    k_scale = floats(kGroups * S);
    v_scale = floats(kGroups * S);
    places = reinterpret_cast<Place*>(take(2 * 32 * 8));
    tops = floats(16 * (D / 32));
    factors = floats(16 * kGroups);
    alpha = floats(16);
    bad = reinterpret_cast<int*>(take(16 * 4));
    state = reinterpret_cast<float2*>(take(16 * 8));
    extra = floats(16);
    feeders = reinterpret_cast<Feeder*>(take(32 * sizeof(Feeder)));
    masks = reinterpret_cast<uint32_t*>(take(4 * 4));
    from = reinterpret_cast<Sources*>(take(shared::kSources));
    partial = floats((G <= 64 ? kGroups : 2 * kWarps) * 16 * S);
    rest = at;
  }

  __device__ unsigned char* k_tile() const { return tiles + warp * SwizzledTile::kBytes; }
  __device__ unsigned char* v_tile() const { return tiles + (kWarps + warp) * SwizzledTile::kBytes; }
  // Computes the thread's places in shared memory anew from here on: kept through the loop, all of them, they cost more registers than there
  // are. (On sm_90 the compiler does better without.)
  __device__ void forget() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    hide(tid);
    lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
#endif
  }

  __device__ static int position(int entry) { return (entry & 7) * 4 + (entry >> 3); }
  __device__ int first_chunk() const { return from->query.begin & ~31; }

  // The block's query (of a grid of all of them), and q's digits. The first two chunks' places are written, too.
  template <int bias>
  __device__ void start(int block = static_cast<int>(blockIdx.x)) {
    constexpr int kStride = D + 16;  // q as FP32 passes through the memory of tiles and partial scores
    float* const staged = reinterpret_cast<float*>(tiles);
    static_assert(16 * D * 4 == 2 * kWarps * SwizzledTile::kBytes && kStride * 4 <= 16 * S * 4 + 16 * D * 4, "");
    if (tid == 0) *from = Sources(p, Query(p, block));
    if (tid < 16) bad[tid] = 0, alpha[tid] = 0.0f;
    for (int i = tid; i < 16 * S; i += kThreads) e[i] = 0.0f;
    __syncthreads();
    feed();
    const Query& query = from->query;
    const int64_t base = query.index * p.q_stride + query.kv * rows * p.q_head_stride;
    with_dtype(p, [&](auto dtype) {
#pragma unroll 1
      for (int i = tid; i < 16 * (D / 4); i += kThreads) {
        const int row = i / (D / 4), d = i % (D / 4) * 4;
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (row < rows) load_q4<decltype(dtype)::value>(p, base + row * p.q_head_stride + d, x);
        *reinterpret_cast<float4*>(staged + row * kStride + d) = make_float4(x[0], x[1], x[2], x[3]);
      }
    });
    __syncthreads();
    // Four dims of row g + 8 r in fragment register 2 h + r of k-step s.
    auto part = [&](int r, int s, int h) { return *reinterpret_cast<const float4*>(staged + (g + 8 * r) * kStride + warp * 64 + s * 32 + h * 16 + 4 * t); };
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float4 x = part(r, s, 0), y = part(r, s, 1);
        float top = fmaxf(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))), fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w))));
        const bool finite = is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w) && is_finite(y.x) && is_finite(y.y) && is_finite(y.z) && is_finite(y.w);
        if (!finite) atomicOr(bad + g + 8 * r, 1);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (t == 0) tops[(g + 8 * r) * (D / 32) + warp * 2 + s] = top;
      }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int group = (warp * 64 + s * 32) / G;
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < G / 32; ++i) top = fmaxf(top, tops[(g + 8 * r) * (D / 32) + group * (G / 32) + i]);
        const float f = __fmul_rn(__fmul_rn(top, kInv127), p.score_scale), scale = A::digit_scale(top);
        if (t == 0 && (G < 64 || s == 0) && warp % kSpan == 0) factors[(g + 8 * r) * kGroups + group] = f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float4 x = part(r, s, h);
          const int low[4] = {A::fixed(x.x, scale), A::fixed(x.y, scale), A::fixed(x.z, scale), A::fixed(x.w, scale)};
          int middle[4], high[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) middle[i] = low[i] + (bias & 255), high[i] = low[i] + bias;
          q[0][s][2 * h + r] = gather<2>(high);
          q[1][s][2 * h + r] = gather<1>(middle);
          q[2][s][2 * h + r] = gather<0>(low);
        }
      }
    }
    __syncthreads();
  }

  // Byte `which` of four words.
  template <int which>
  __device__ static uint32_t gather(const int (&x)[4]) {
    constexpr uint32_t two = which | (which + 4) << 4;
    return byte_permute(byte_permute(x[0], x[1], two), byte_permute(x[2], x[3], two), 0x5410);
  }

  // (Re)starts the walk over the chunks.
  __device__ void feed() {
    if (warp == kWarps - 1) {
      const int entry = first_chunk() + lane;
      Feeder feeder;
      feeder.start(p, from->query, entry);
      feeder.write(p, from->query, entry, places, masks);
      feeder.write(p, from->query, entry + 32, places, masks);
      feeders[lane] = feeder;
    }
  }
  // In the chunk at `start`, between the two barriers.
  __device__ void feed(int start) {
    if (warp == kWarps - 1) {
      Feeder feeder = feeders[lane];
      feeder.write(p, from->query, start + 64 + lane, places, masks);
      feeders[lane] = feeder;
    }
  }

  // The finished outputs of rows g and g + 8: x[u][r] holds dims 16 u + 4 t .. 16 u + 4 t + 3 of the warp's.
  __device__ void store_out(const float (&x)[4][2][4]) const {
    const int64_t base = from->query.index * p.out_stride + from->query.kv * rows * p.out_head_stride + warp * 64 + t * 4;
    with_dtype(p, [&](auto dtype) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (g + 8 * r >= rows) break;
#pragma unroll
        for (int u = 0; u < 4; ++u) store_out4<decltype(dtype)::value>(p, base + (g + 8 * r) * p.out_head_stride + u * 16, x[u][r]);
      }
    });
  }

  __device__ bool leads() const { return kSpan == 1 || warp % kSpan == 0; }
  __device__ int group(int own) const { return kSpan == 1 ? warp * kOwn + own : warp / kSpan; }

  __device__ void issue_k(int start) {
    const Place* at = places + (start & 32);
    copy.issue(k_tile(), from->k + warp * 64, p.k_stride, at, lane);
    copy.commit();
    load_scales(ks, from->k_scale, p.k_scale_stride, at[lane]);
  }
  __device__ void issue_v(int start) {
    const Place* at = places + (start & 32);
    copy.issue(v_tile(), from->v + warp * 64, p.v_stride, at, lane);
    copy.commit();
    load_scales(vs, from->v_scale, p.v_scale_stride, at[lane]);
  }
  __device__ void load_scales(uint16_t (&x)[kOwn], const uint16_t* base, const PoolStride& stride, Place at) {
    if (!leads()) return;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) x[o] = load_scale(base, stride, at, group(o));
  }
  __device__ void store_scales(const uint16_t (&x)[kOwn], float* to) {
    if (!leads()) return;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      to[group(o) * S + position(lane)] = half_to_float(x[o]);
      if (!half_is_finite(x[o]))
        for (int row = 0; row < 16; ++row) atomicOr(bad + row, 1);
    }
  }

#ifdef STRATA_PA_SM80
  // This warp's part of the scores of its K tile.
  template <int bias>
  __device__ void partial_scores() {
    uint32_t b[4];
    auto cells = [&](int i) { ldmatrix4(b, shared_address(k_tile() + i * 512 + SwizzledTile::at(lane & 7, lane >> 3))); };
    if constexpr (G <= 64) {
#pragma unroll
      for (int o = 0; o < kOwn; ++o) {
        const float factor[2] = {factors[g * kGroups + group(o)], factors[(g + 8) * kGroups + group(o)]};
        float u[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int h[4], l[4], m[4];
          cells(i);
          products<bias>(h, l, m, b, kMagicBits, kOwn == 2 ? o : 0, kOwn == 2 ? o : 1);
#pragma unroll
          for (int c = 0; c < 4; ++c) u[c][i] = __fmul_rn(join_magic(h[c], l[c], m[c]), factor[c >> 1]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) store_partial(group(o), c, u[c]);
      }
    } else {
      float high[4][4], rest[4][4];  // integers
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int h[4], l[4], m[4];
        cells(i);
        products<bias>(h, l, m, b, 0, 0, 1);
#pragma unroll
        for (int c = 0; c < 4; ++c) high[c][i] = __int_as_float(h[c]), rest[c][i] = __int_as_float(l[c] * 256 + m[c]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) store_partial(2 * warp, c, high[c]), store_partial(2 * warp + 1, c, rest[c]);
    }
  }

  // The scores of a row at positions 4 run .. 4 run + 3.
  __device__ void scores(float (&s)[4], int row, int run) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float4 scale = *reinterpret_cast<const float4*>(k_scale + group * S + 4 * run);
      float u[4];
      if constexpr (G <= 64) {
        const float4 x = *reinterpret_cast<const float4*>(partial + (group * 16 + row) * S + 4 * run);
        u[0] = x.x, u[1] = x.y, u[2] = x.z, u[3] = x.w;
      } else {
        int4 high = make_int4(0, 0, 0, 0), low = high;
#pragma unroll
        for (int w = 0; w < kSpan; ++w) {
          const float* at = partial + (2 * (group * kSpan + w) * 16 + row) * S + 4 * run;
          const int4 h = *reinterpret_cast<const int4*>(at), l = *reinterpret_cast<const int4*>(at + 16 * S);
          high.x += h.x, high.y += h.y, high.z += h.z, high.w += h.w;
          low.x += l.x, low.y += l.y, low.z += l.z, low.w += l.w;
        }
        const float f = factors[row * kGroups + group];
        u[0] = __fmul_rn(A::join(high.x, low.x), f), u[1] = __fmul_rn(A::join(high.y, low.y), f);
        u[2] = __fmul_rn(A::join(high.z, low.z), f), u[3] = __fmul_rn(A::join(high.w, low.w), f);
      }
      const float k[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = group == 0 ? __fmul_rn(u[i], k[i]) : __fmaf_rn(u[i], k[i], s[i]);
    }
  }

 private:
  // Digit sums, begun at `start`, over the k-steps first .. last (of 32 dims) of one 8-entry tile.
  template <int bias>
  __device__ void products(int (&h)[4], int (&l)[4], int (&m)[4], const uint32_t (&b)[4], int start, int first, int last) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) h[c] = l[c] = m[c] = start;
#pragma unroll
    for (int s = first; s <= last; ++s) {
      mma_s8s8(h, q[0][s], b[2 * s], b[2 * s + 1], h);
      mma_s8s8(l, q[1][s], b[2 * s], b[2 * s + 1], l);
      if constexpr (bias == kBiasImma) mma_u8s8(m, q[2][s], b[2 * s], b[2 * s + 1], m);
      else mma_s8s8(m, q[2][s], b[2 * s], b[2 * s + 1], m);
    }
  }
  // Fragment element c of the four 8-entry tiles.
  __device__ void store_partial(int array, int c, const float (&x)[4]) {
    const int row = g + 8 * (c >> 1);
    if (row < rows) *reinterpret_cast<float4*>(partial + (array * 16 + row) * S + 8 * t + 4 * (c & 1)) = make_float4(x[0], x[1], x[2], x[3]);
  }
#endif
};

}  // namespace cuda
}  // namespace strata_pa
