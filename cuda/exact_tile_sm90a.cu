// exact for tiles of 4 neighbouring queries x 12 heads, head_dim 256, groups of 64 (docs/numerics.md, section 5): the rows of a tile walk the
// union of their cells, once for scores and anchors, once for the sums. The bytes are those of the plain form. See tile_launch.h.
//
// Scores come from int8 wgmma, cells by 3 digits x 48 rows. A score s = n + t is kept as one word, the bits of 2^t with n added to its exponent
// (less 127), so that any anchor is one more addition to it. The sums are four int32 planes per output, a warp owning 16 rows x 64 dims.
#include "exact_plain.cuh"
#include "exact_union.cuh"
#include "hopper.cuh"

namespace strata_pa {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
using namespace tile;

constexpr float kLowestScore = -250.0f, kLowestAnchor = -100.0f, kHighestAnchor = 140.0f;  // of what a word holds; the rest is another kernel's
constexpr float kLargestFactor = 0x1p60f;  // no score overflows below it

struct TileShared {
  struct Sources {
    const int8_t* v;
    const unsigned char* records;
    const uint32_t* words;
    int nt;
  } from;
  float factors[4][kRows];
  float top[2][12][kRows];  // per warp: greatest n, greatest n + level
  int4 anchors[kRows];      // what to add to a word and the least sum, for W and for L
  float units[kRows];       // 2^b
  unsigned long long sums[kRows];
  unsigned long long full[kStages], empty[kStages];
  int next, bad, seen;  // seen: a bit per query that sees a cell
};
static_assert(sizeof(TileShared) <= 8192, "");

template <int dtype>
__device__ __forceinline__ void load_q8(const Params& p, int64_t at, float (&x)[8]) {
  float y[4];
  load_q4<dtype>(p, at, y);
  x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
  load_q4<dtype>(p, at + 4, y);
  x[4] = y[0], x[5] = y[1], x[6] = y[2], x[7] = y[3];
}

struct TileBlock {
  const Params& p;
  const Tiles& w;
  unsigned char* const raw;  // digits of q, stages
  TileShared& s;
  const int tid, lane, warp, group, g, t;  // group: the warpgroup
  int query, kv, item;                     // the tile's first query
  int nt;                                  // tiles of 64 cells
  int first_cell;                          // without ids: the number of the first one
  const unsigned char* records;

  __device__ TileBlock(const Params& p, const Tiles& w, unsigned char* raw, TileShared& s)
      : p(p), w(w), raw(raw), s(s), tid(static_cast<int>(threadIdx.x)), lane(tid & 31), warp(tid >> 5), group(warp >> 2), g(lane >> 2), t(lane & 3) {}

  __device__ uint32_t stage(int i) const { return shared_address(raw) + kDigitBytes + i * kStageBytes; }
  __device__ uint32_t* words() const { return w.scores + static_cast<int64_t>(blockIdx.x) * (w.item_cells >> 6) * (kRows * 64); }

  // Takes on item i. False: it is another kernel's.
  __device__ bool start(int i) {
    item = i;
    kv = i % p.n_kv;
    query = (w.tiles - 1 - i / p.n_kv) * kQueries;
    if (p.ids) {
      if (w.flags[i]) return false;
      nt = (w.counts[i] + 63) >> 6;
      first_cell = 0;
      records = w.records + i * (w.item_cells >> 6) * kRecordBytes;
    } else {
      const int last = Span(p, min(query + kQueries, p.n_q) - 1).last;
      first_cell = Span(p, query).first & ~63;
      nt = last < first_cell ? 0 : ((last - first_cell) >> 6) + 1;
      records = w.records + (kv * (w.item_cells >> 6) + (first_cell >> 6)) * kRecordBytes;
    }
    return true;
  }

  // Digits of q as wgmma's second matrices: h, l and m of rows 0 .. 31, then of rows 32 .. 47; two halves of 128 dims.
  __device__ void digits() {
    float q[4][8] = {};  // this warp's rows
    with_dtype(p, [&](auto dtype) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 4 + i, index = query + row / kHeads;
        if (index < p.n_q) load_q8<decltype(dtype)::value>(p, index * p.q_stride + (kv * kHeads + row % kHeads) * p.q_head_stride + lane * 8, q[i]);
      }
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 4 + i;
      const float (&x)[8] = q[i];
      float top = 0.0f;
      bool finite = true;
#pragma unroll
      for (int u = 0; u < 8; ++u) top = fmaxf(top, fabsf(x[u])), finite &= is_finite(x[u]);
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float factor = __fmul_rn(__fmul_rn(top, kInv127), p.score_scale), scale = A::digit_scale(top);
      if (!finite || !(fabsf(factor) < kLargestFactor)) s.bad = 1;
      uint32_t digit[3][2] = {};
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int low = A::fixed(x[u], scale), middle = low + (kBiasExact & 255), high = low + kBiasExact;
        digit[0][u >> 2] |= (high >> 16 & 255u) << 8 * (u & 3);
        digit[1][u >> 2] |= (middle >> 8 & 255u) << 8 * (u & 3);
        digit[2][u >> 2] |= (low & 255u) << 8 * (u & 3);
      }
      const int chunk = lane >> 1;
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        const int r = row < 32 ? d * 32 + row : 96 + d * 16 + row - 32;
        *reinterpret_cast<uint2*>(raw + (chunk >> 3) * (3 * kRows * 128) + r * 128 + ((chunk ^ r) & 7) * 16 + (lane & 1) * 8) = make_uint2(digit[d][0], digit[d][1]);
      }
      if ((lane & 7) == 0) s.factors[lane >> 3][row] = factor;
    }
  }

  // A warp copies 16 of 64 cells, its half-warps 8 each: their places.
  struct Eight {
    uint32_t place[8];
    template <class T>
    __device__ __forceinline__ Eight(const T* at, int thread) {
      const uint4* const from = reinterpret_cast<const uint4*>(at) + (thread >> 5 & 3) * 4 + (thread >> 4 & 1) * 2;
      const uint4 a = from[0], b = from[1];
      place[0] = a.x, place[1] = a.y, place[2] = a.z, place[3] = a.w, place[4] = b.x, place[5] = b.y, place[6] = b.z, place[7] = b.w;
    }
  };
  // Laid out as matrix() says, in two halves of 128 dims.
  static __device__ __forceinline__ void copy_codes(uint32_t to, const int8_t* pool, const Eight& cells, int thread) {
    const int chunk = thread & 15;
    const int8_t* const from = pool + chunk * 16;
    to += (chunk >> 3) * 8192 + ((thread >> 5 & 3) * 16 + (thread >> 4 & 1) * 8) * 128;
    const uint32_t part = (chunk & 7) * 16;
#pragma unroll
    for (int u = 0; u < 8; ++u) copy16(to + u * 128 + (part ^ u * 16), from + static_cast<uint64_t>(cells.place[u]) * 16);
  }
  // Beside the codes of a tile: `bytes` of its record from `at`, and after them the places of the tile that follows in this stage's turn.
  static __device__ __forceinline__ void copy_record(uint32_t to, const unsigned char* record, int at, int bytes, const unsigned char* following, int thread) {
    const int j = (thread & 127) * 16;
    const unsigned char* const from = j < bytes ? record + at + j : following + j - bytes;
    if (j < bytes || (following && j < bytes + 256)) copy16(to + kCodeBytes + kWordBytes + j, from);
  }

  // Bits of the queries that may see a cell by its number.
  __device__ uint32_t in_reach(int cell) const {
    uint32_t mask = 0;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      const Span span(p, query + r);
      if (cell >= span.first && cell <= span.last && query + r < p.n_q) mask |= 1u << r;
    }
    return mask;
  }

  // What a score's dims of one scale group add to it: part of x for N neighbouring 8-row tiles from `first`.
  template <int part, int first, int N>
  __device__ __forceinline__ void join(float (&x)[24], const int (&d)[12 * N], float k0, float k1) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&s.factors[part][(first + n) * 8 + t * 2]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int u = n * 4 + e;
        const float y = __fmul_rn(A::join(d[u], d[4 * N + u] * 256 + d[8 * N + u]), e & 1 ? f.y : f.x), k = e & 2 ? k1 : k0;
        float& at = x[first * 4 + u];
        at = part == 0 ? __fmul_rn(y, k) : __fmaf_rn(y, k, at);
      }
    }
  }

  // Scores of all cells, as words; the anchors. Each warpgroup takes every third tile; the products of one part run while another is joined.
  __device__ void scores() {
    const int8_t* const pool = p.k + kv * p.k_stride.head;
    const int inner_first = Span(p, query + kQueries - 1).first, inner_last = Span(p, query).last;
    float top[12], raised[12], x[24];
#pragma unroll
    for (int u = 0; u < 12; ++u) top[u] = raised[u] = kMinusInf;
    auto issue = [&](int i, int st, const Eight& cells) {
      copy_codes(stage(st), pool, cells, tid);
      const unsigned char* const record = records + i * kRecordBytes;
      copy_record(stage(st), record, kKScales, kVPlaces - kKScales, i + 6 < nt ? record + 6 * kRecordBytes : nullptr, tid);
    };
    if (group < nt) issue(group, group, Eight(records + group * kRecordBytes, tid));
    commit_copies();
    if (group + 3 < nt) issue(group + 3, group + 3, Eight(records + (group + 3) * kRecordBytes, tid));
    commit_copies();
    const int cell = (warp & 3) * 16 + g;
    uint32_t* const out = words() + t * 128;
    uint32_t seen = 0;
    bool bad = false;

    // x of tile i, whose levels and masks are given, into words and maxima.
    auto finish = [&](int i, int at0, int at1) {
      uint32_t mask0 = at0 & 15, mask1 = at1 & 15;
      if (!p.ids) {
        const int base = first_cell + i * 64;
        if (base < inner_first || base + 63 > inner_last) mask0 &= in_reach(base + cell), mask1 &= in_reach(base + cell + 8);
      }
      bad |= ((at0 & kBadCell) && mask0) || ((at1 & kBadCell) && mask1);
      seen |= mask0 | mask1;
      const float level0 = static_cast<float>(at0 >> 8), level1 = static_cast<float>(at1 >> 8);
      float hidden[kQueries][2];  // -inf where a query does not see a cell
#pragma unroll
      for (int r = 0; r < kQueries; ++r) hidden[r][0] = mask0 >> r & 1 ? 0.0f : kMinusInf, hidden[r][1] = mask1 >> r & 1 ? 0.0f : kMinusInf;
      uint32_t* const even = out + static_cast<int64_t>(i) * (kRows * 64) + cell;
      uint32_t* const odd = out + static_cast<int64_t>(i) * (kRows * 64) + 64 + (cell ^ 16);
#pragma unroll
      for (int n = 0; n < 6; ++n) {
        // Rows 8n + 2t and the next: query 0 has rows 0 .. 11, and so on.
        const int r = n == 0 ? 0 : n == 2 ? 1 : n == 3 ? 2 : 3;
        const bool between = n == 1 || n == 4;
        const float h0 = between ? (t < 2 ? hidden[n / 3 * 2][0] : hidden[n / 3 * 2 + 1][0]) : hidden[r][0];
        const float h1 = between ? (t < 2 ? hidden[n / 3 * 2][1] : hidden[n / 3 * 2 + 1][1]) : hidden[r][1];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          constexpr float magic = kMagic - 127.0f;  // its low bits hold n - 127
          const float y = fmaxf(__fadd_rn(x[n * 4 + e], e & 2 ? h1 : h0), kLowestScore), z = __fadd_rn(y, magic), whole = __fsub_rn(z, magic);
          const float kept = add_exponent(A::poly(__fsub_rn(y, whole)), z);
          __stcg((e & 1 ? odd : even) + n * 512 + (e >> 1) * 8, static_cast<uint32_t>(__float_as_int(kept)));
          const int u = n * 2 + (e & 1);
          top[u] = fmaxf(top[u], whole);
          raised[u] = fmaxf(raised[u], __fadd_rn(whole, e & 2 ? level1 : level0));
        }
      }
    };

    int st = group;
    for (int i = group; i < nt; i += 3, st = st < 3 ? st + 3 : st - 3) {
      land_copies<1>();
      fence_async_shared();
      join_warpgroup(group);
      const unsigned char* const record = raw + kDigitBytes + st * kStageBytes + kCodeBytes + kWordBytes;
      const uint32_t a = __shfl_sync(~0u, stage(st), 0), b = shared_address(raw);
      int d[48], f[24];  // rows 0 .. 31, 32 .. 47
      auto start = [&](auto& sums, int part, int rows) {
        const uint32_t ai = a + (part >> 1) * 8192 + (part & 1) * 64, bi = b + rows + (part >> 1) * (3 * kRows * 128) + (part & 1) * 64;
        wgmma_fence();
        wgmma(sums, matrix(ai), matrix(bi), 0);
        wgmma(sums, matrix(ai + 32), matrix(bi + 32), 1);
        wgmma_commit();
      };
      start(d, 0, 0);
      start(f, 0, 96 * 128);
      const uint2 ks0 = *reinterpret_cast<const uint2*>(record + cell * 8), ks1 = *reinterpret_cast<const uint2*>(record + cell * 8 + 64);
      const int at0 = *reinterpret_cast<const int*>(record + 512 + cell * 4), at1 = *reinterpret_cast<const int*>(record + 544 + cell * 4);
      auto scale = [](uint2 h, int part) {
        const uint32_t pair = part < 2 ? h.x : h.y;
        return half_to_float(static_cast<uint16_t>(part & 1 ? pair >> 16 : pair));
      };
      auto step = [&](auto part) {
        constexpr int P = decltype(part)::value;
        const float k0 = scale(ks0, P), k1 = scale(ks1, P);
        wait_for<1>(d);
        join<P, 0, 4>(x, d, k0, k1);
        if constexpr (P < 3) start(d, P + 1, 0);
        wait_for<P == 3 ? 0 : 1>(f);
        join<P, 4, 2>(x, f, k0, k1);
        if constexpr (P < 3) start(f, P + 1, 96 * 128);
      };
      step(Constant<0>()), step(Constant<1>()), step(Constant<2>()), step(Constant<3>());
      const Eight cells(record + kVPlaces - kKScales, tid);
      join_warpgroup(group);
      if (i + 6 < nt) issue(i + 6, st, cells);
      commit_copies();
      finish(i, at0, at1);
    }
    land_copies<0>();
    if (bad) s.bad = 1;
    seen = __reduce_or_sync(~0u, seen);
    if (lane == 0 && seen) atomicOr(&s.seen, static_cast<int>(seen));
#pragma unroll
    for (int u = 0; u < 12; ++u) {
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        top[u] = fmaxf(top[u], __shfl_xor_sync(~0u, top[u], o));
        raised[u] = fmaxf(raised[u], __shfl_xor_sync(~0u, raised[u], o));
      }
      if (g == 0) {
        const int row = (u >> 1) * 8 + t * 2 + (u & 1);
        s.top[0][warp][row] = top[u], s.top[1][warp][row] = raised[u];
      }
    }
  }

  __device__ void anchors() {
    if (tid >= kRows) return;
    float top = kMinusInf, raised = kMinusInf;
    for (int i = 0; i < 12; ++i) top = fmaxf(top, s.top[0][i][tid]), raised = fmaxf(raised, s.top[1][i][tid]);
    const bool any = s.seen >> tid / kHeads & 1;
    if (any && !(top >= kLowestAnchor && top <= kHighestAnchor)) s.bad = 1;
    const int anchor = any ? static_cast<int>(top) : 0, base = any ? static_cast<int>(fmaxf(kBFloor, __fsub_rn(raised, top))) : 0;
    // Terms of 2^-95 or less are 0 in L, those of 2^(-95 - b) in W.
    constexpr int unit = 1 << 23;
    s.anchors[tid] = make_int4((157 - anchor - base) * unit, (32 - base) * unit, (157 - anchor) * unit, 32 * unit);
    s.units[tid] = shift(1.0f, static_cast<float>(base));
    s.top[0][0][tid] = any ? top : kMinusInf;
  }

  // V's tile i into stage st, by this warpgroup. Nothing of it is kept in registers: those are the planes'.
  __device__ __forceinline__ void issue(int i, int st, const Eight& cells, int thread) const {
    const volatile TileShared::Sources& from = s.from;
    const uint32_t full = shared_address(&s.full[0]) + st * 8, to = stage(st);
    if ((thread & 127) == 0) {
      expect_bytes<kWordBytes>(full);
      bulk_copy<kWordBytes>(to + kCodeBytes, from.words + static_cast<int64_t>(i) * (kRows * 64), full);
    }
    copy_codes(to, from.v, cells, thread);
    const unsigned char* const record = from.records + i * kRecordBytes;
    copy_record(to, record, kVScales, kRecordBytes - kVScales, i + 3 < from.nt ? record + 3 * kRecordBytes + kVPlaces : nullptr, thread);
    arrive_when_copied(full);
  }
  // x + add, at least `least`: the bits of a number.
  static __device__ __forceinline__ float moved(int x, int add, int least) { return __int_as_float(__viaddmax_s32(x, add, least)); }

  // The sums over all cells, and out. `uses`: a bit per stage, how often it was filled for sums, modulo 2.
  __device__ void sums(uint32_t& uses) {
    const int j = warp & 3, row = group * 16 + g;  // 16 rows per warpgroup, 64 dims per warp
    uint32_t sum_low = 0, sum_high = 0;
    int plane[4][8][4];
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int n = 0; n < 8; ++n) plane[d][n][0] = plane[d][n][1] = plane[d][n][2] = plane[d][n][3] = 0;
    // Offsets in a stage.
    const uint32_t word = kCodeBytes + row * 256 + t * 16 + (g & 1) * 64;
    const uint32_t scale = kCodeBytes + kWordBytes + j * 128 + t * 8;
    const uint32_t code = (j >> 1) * 8192 + lane * 128 + (((j & 1) * 4 ^ lane) & 7) * 16;
    const uint32_t anchor = shared_address(&s.anchors[row]), sum_words = word + (j & 1) * 2048 + (j >> 1) * 128;
    const uint32_t full = shared_address(s.full), empty = shared_address(s.empty);
    int st = 0;
    uint32_t at = stage(0);
    for (int left = nt; left > 0; --left) {
      barrier_wait(full + st * 8, uses >> st & 1);
      {  // every third tile, in turn, a warpgroup copies the one after the next two
        const int thread = thread_now(), i = *const_cast<const volatile int*>(&s.from.nt) - left;
        if (left > 3 && i % 3 == thread >> 7) {
          const int later = st < 3 ? st + 3 : st - 3;
          const Eight cells(raw + kDigitBytes + st * kStageBytes + kCodeBytes + kWordBytes + kRecordBytes - kVScales, thread);
          barrier_wait(empty + later * 8, ~uses >> later & 1);
          issue(i + 3, later, cells, thread);
        }
      }
      {  // L's terms are shared out among the four warps of the same rows
        int c[4], x[4];
        load_shared4(c, anchor + (j & 1) * 128);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          load_shared4(x, at + (sum_words ^ b * 64));
#pragma unroll
          for (int u = 0; u < 4; ++u) add_wide(sum_low, sum_high, __float2int_rn(moved(x[u], c[2], c[3])));
        }
      }
#pragma unroll 1  // unrolled, it costs registers that are not there
      for (int k = 0; k < 2; ++k) {
        uint32_t a[4][4];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          uint32_t h0, h1;
          load_shared2(h0, h1, at + scale + (k * 32 + b * 16) * 2);
          const float v[4] = {half_to_float(static_cast<uint16_t>(h0)), half_to_float(static_cast<uint16_t>(h0 >> 16)),
                              half_to_float(static_cast<uint16_t>(h1)), half_to_float(static_cast<uint16_t>(h1 >> 16))};
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            int x[4], add, least;
            load_shared2(add, least, anchor + r * 128);
            load_shared4(x, at + (word ^ b * 64) + r * 2048 + k * 128);
#pragma unroll
            for (int u = 0; u < 4; ++u) x[u] = __float2int_rn(__fmul_rn(moved(x[u], add, least), v[u]));
            const uint32_t y0 = byte_permute(x[0], x[1], 0x5140), y1 = byte_permute(x[2], x[3], 0x5140);
            const uint32_t y2 = byte_permute(x[0], x[1], 0x7362), y3 = byte_permute(x[2], x[3], 0x7362);
            a[0][b * 2 + r] = byte_permute(y0, y1, 0x5410);
            a[1][b * 2 + r] = byte_permute(y0, y1, 0x7632);
            a[2][b * 2 + r] = byte_permute(y2, y3, 0x5410);
            a[3][b * 2 + r] = byte_permute(y2, y3, 0x7632);
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          uint32_t v[4];
          ldmatrix4_trans(v, (at + code + k * 4096) ^ c * 16);
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const uint32_t selector = odd ? 0x7531 : 0x6420, b0 = byte_permute(v[0], v[1], selector), b1 = byte_permute(v[2], v[3], selector);
            add_s8s8(plane[3][2 * c + odd], a[3], b0, b1);
#pragma unroll
            for (int d = 0; d < 3; ++d) add_u8s8(plane[d][2 * c + odd], a[d], b0, b1);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + st * 8);
      uses ^= 1u << st;
      ++st, at += kStageBytes;
      if (st == kStages) st = 0, at -= kStages * kStageBytes;
    }

    unsigned long long sum = static_cast<unsigned long long>(sum_high) << 32 | sum_low;
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (t == 0) atomicAdd(&s.sums[row + 8 * (j & 1)], sum);
    __syncthreads();
    with_dtype(p, [&](auto dtype) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = row + 8 * r, index = query + own / kHeads, head = kv * kHeads + own % kHeads;
        if (index >= p.n_q) continue;
        const float total = __ll2float_rn(static_cast<long long>(s.sums[own])), unit = s.units[own];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float x[4];
#pragma unroll
          for (int u = 0; u < 4; ++u) {
            const int n = 2 * c + (u & 1), e = 2 * r + (u >> 1);
            int64_t o = plane[3][n][e];
            o = (o << 8) + plane[2][n][e];
            o = (o << 8) + plane[1][n][e];
            o = (o << 8) + plane[0][n][e];
            x[u] = total > 0.0f ? __fadd_rn(__fmul_rn(divide_ordinary(__ll2float_rn(o), total), unit), 0.0f) : 0.0f;
          }
          store_out4<decltype(dtype)::value>(p, index * p.out_stride + head * p.out_head_stride + j * 64 + c * 16 + t * 4, x);
        }
      }
    });
    if (p.lse && tid < kRows && query + tid / kHeads < p.n_q) {
      const float top = s.top[0][0][tid], total = __ll2float_rn(static_cast<long long>(s.sums[tid]));
      p.lse[(query + tid / kHeads) * p.lse_stride + kv * kHeads + tid % kHeads] = top == kMinusInf ? kMinusInf : A::lse(top, __fmul_rn(total, 0x1p-30f));
    }
  }
};

__device__ __forceinline__ void tile_kernel(const Params& p, const Tiles& w) {
  extern __shared__ __align__(1024) unsigned char raw_tile[];
  TileShared& s = *reinterpret_cast<TileShared*>(raw_tile + kDigitBytes + kStages * kStageBytes);
  TileBlock b(p, w, raw_tile, s);
  if (b.tid < kStages) {
    barrier_init(shared_address(&s.full[b.tid]), 129);
    barrier_init(shared_address(&s.empty[b.tid]), kThreads / 32);
  }
  fence_async_shared();
  __syncthreads();
  const int items = w.tiles * p.n_kv;
  uint32_t uses = 0;
  for (int item = static_cast<int>(blockIdx.x); item < items;) {
    if (b.tid == 0) s.next = atomicAdd(w.next, 1) + static_cast<int>(gridDim.x), s.bad = s.seen = 0;
    if (b.tid < kRows) s.sums[b.tid] = 0;
    __syncthreads();
    if (b.start(item)) {
      if (b.tid == 0) s.from = {p.v + b.kv * p.v_stride.head, b.records, b.words(), b.nt};
      b.digits();
      fence_async_shared();
      __syncthreads();
      b.scores();
      __threadfence();
      fence_async();
      __syncthreads();
      b.anchors();
      __syncthreads();
      if (s.bad) {
        if (b.tid == 0) w.flags[item] = 1;
      } else {
        if (b.group < b.nt) b.issue(b.group, b.group, TileBlock::Eight(b.records + b.group * kRecordBytes + kVPlaces, b.tid), b.tid);
        b.sums(uses);
      }
    }
    item = s.next;
    __syncthreads();
  }
}
#endif

}  // namespace cuda
}  // namespace strata_pa

using strata_pa::cuda::Params;
using strata_pa::cuda::Tiles;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STRATA_PA_BODY(call) strata_pa::cuda::call
#else
#define STRATA_PA_BODY(call)
#endif

extern "C" __global__ void __launch_bounds__(512, 2) strata_tile_union(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(union_kernel(p, w));
}
extern "C" __global__ void __launch_bounds__(256, 8) strata_tile_cells(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(cells_kernel(p, w));
}
extern "C" __global__ void __launch_bounds__(384, 1) strata_exact_tile_d256_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(tile_kernel(p, w));
}
// The items that the kernels before have flagged, query by query in the plain form. The grid is a multiple of n_kv.
extern "C" __global__ void __launch_bounds__(128, 2) strata_exact_rest_d256_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ Params own;
  const int b = static_cast<int>(blockIdx.x), items = w.tiles * p.n_kv;
  bool copied = false;
  for (int item = b; item < items; item += static_cast<int>(gridDim.x)) {
    if (w.flags[item] == 0) continue;
    if (!copied)
      for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(Params) / 4); i += 128)
        reinterpret_cast<uint32_t*>(&own)[i] = reinterpret_cast<const uint32_t*>(&p)[i];
    copied = true;
    const int first = (w.tiles - 1 - item / p.n_kv) * strata_pa::cuda::tile::kQueries;
    for (int index = first; index < min(first + strata_pa::cuda::tile::kQueries, p.n_q); ++index) {
      __syncthreads();
      if (threadIdx.x == 0) own.n_q = index + 1 + b / p.n_kv;  // so that block b's query is this one
      __syncthreads();
      strata_pa::cuda::exact_kernel<256, 64>(own);
    }
  }
#endif
}
