// exact for tiles of 48 rows, neighbouring queries and their heads (docs/numerics.md, section 5): the rows of a tile walk the union of their
// cells, once for scores and anchors, once for the sums. The bytes are those of the plain form. See exact_tile_sm80.h.
//
// A warp owns 16 rows: with the scores a share of the 64 cells of a step, with the sums 64 dims. A score s = n + t is kept as one word, the bits of
// 2^t with n added to its exponent (less 127), so that any anchor is one more addition to it. The words lie as the MMA fragments of the sums want them: two
// neighbouring 8-cell tiles of scores make four neighbouring words of a thread. The sums are four int32 planes per output.
#pragma once
#include "exact_plain.cuh"
#include "exact_rows_cells.cuh"

namespace strata_pa {
namespace cuda {

#ifdef STRATA_PA_SM80
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int newer>
__device__ __forceinline__ void land() {
  asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
}
__device__ __forceinline__ void accumulate_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void accumulate_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load4(int (&x)[4], uint32_t at) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// Numbers as unsigned integers of the same order, all of them above 0.
__device__ __forceinline__ uint32_t ordered(float x) {
  const int i = __float_as_int(x);
  return static_cast<uint32_t>(i ^ ((i >> 31) | 0x80000000));
}
__device__ __forceinline__ float from_ordered(uint32_t u) { return __int_as_float(static_cast<int>(u & 0x80000000u ? u ^ 0x80000000u : ~u)); }

constexpr float kLowestScore = -250.0f, kLowestAnchor = -100.0f, kHighestAnchor = 140.0f;  // of what a word holds; the rest is another kernel's
constexpr float kLargestFactor = 0x1p60f;  // no score overflows below it

extern __shared__ __align__(128) unsigned char raw_rows[];

template <int D, int G>
struct RowsBlock {
  static constexpr int kRows = rows::kRows, kThreads = D / 2 * 3, kGroups = D / G, kShare = D / 64;  // warps of the same 16 rows
  static constexpr int kRowBytes = rows::row_bytes(D), kChunks = D / 16, kCodes = rows::kCells * kRowBytes, kRecord = rows::record_bytes(kGroups);
  static constexpr int kScoreStage = rows::score_stage(D, kGroups), kSumStage = rows::sum_stage(D, kGroups), kSumStages = rows::sum_stages(D);
  static constexpr int kStageBytes = rows::stages_bytes(D, kGroups);
  // q's digits lie at the end of the stages; the last one stays there where registers do not hold all three.
  static constexpr int kDigits = kStageBytes - 3 * kRows * kRowBytes, kHeld = D == 256 ? 2 : 3;
  static_assert(kHeld == 3 || rows::kScoreStages * kScoreStage <= kDigits + 2 * kRows * kRowBytes, "");

  // L's terms are shared out among the warps of the same rows: rows and 16 cells.
  static constexpr int kSumRows = kShare == 1 ? 2 : 1, kSumBlocks = kShare == 4 ? 2 : 4;

  struct State {
    const int8_t *k, *v;  // of the KV head; these are kept out of registers, which are the planes'
    const unsigned char* records;
    unsigned char* words;
    int item, kv, query, end;  // the item's queries
    int first_cell;            // without ids: the number of the first one
    int begin, stop;           // steps of 64 cells
    int2 reach[kRows];     // without ids: the cells that a row sees
    uint32_t bits[kRows];  // of a cell's mask
    int inner_first, inner_last;  // those that all rows see
    float factors[kGroups][kRows];
    int4 anchors[kRows];      // what to add to a word and the least sum, for W and for L
    float units[kRows];       // 2^b
    unsigned long long sums[kRows];
    unsigned long long running[kSumRows][kThreads];  // a thread's part of L
    uint32_t tops[2][kRows];  // greatest score, greatest n + level, ordered; 0: saw no cell
    int next, bad, last;
  };
  static constexpr int kStateBytes = rows::state_bytes(D);
  static_assert(sizeof(State) <= kStateBytes, "");

  const Params& p;
  const Rows& w;

  __device__ RowsBlock(const Params& p, const Rows& w) : p(p), w(w) {}
  // Stages, then the state: constants, not members, which would be registers.
  static __device__ __forceinline__ unsigned char* stages() { return raw_rows; }
  static __device__ __forceinline__ State& state() { return *reinterpret_cast<State*>(raw_rows + kStageBytes); }

  static __device__ __forceinline__ int thread() {  // not kept in a register
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  // The thread's number in other terms: the compiler would keep a product of it in a register through all the sums for the sake of what follows.
  static __device__ __forceinline__ int slot() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return (thread() & ~31) + lane;
  }
  struct Who {  // tile: the warp's 16 rows; share: its part of the cells or dims
    const int tid, lane, tile, share, g, t;
    __device__ Who() : Who(thread()) {}
    __device__ explicit Who(int x) : tid(x), lane(x & 31), tile((x >> 5) / kShare), share((x >> 5) % kShare), g(lane >> 2), t(lane & 3) {}
  };

  // Takes on split `part` of item i; the block meets afterwards. False: it is another kernel's.
  __device__ bool start(int i, int part, int64_t word_place) {
    const int tid = thread();
    if (w.flags[i]) return false;
    const RowsOf own(p, w, i);
    const Reach low(p, own.sequence, own.first), high(p, own.sequence, own.end - 1);
    const int first_cell = p.ids ? 0 : low.first & ~63;
    const int steps = p.ids ? (w.counts[i] + 63) >> 6 : high.last < first_cell ? 0 : ((high.last - first_cell) >> 6) + 1;
    const int64_t record = p.ids ? static_cast<int64_t>(i - w.first_item) * w.item_tiles
                                 : static_cast<int64_t>(own.kv) * w.record_tiles + w.first_record[own.sequence] + (first_cell >> 6);
    const int each = (steps + w.splits - 1) / w.splits;
    if (tid == 0) {
      state().item = i, state().kv = own.kv, state().query = own.first, state().end = own.end, state().first_cell = first_cell;
      state().begin = min(part * each, steps), state().stop = min(part * each + each, steps);
      state().k = p.k + own.kv * p.k_stride.head, state().v = p.v + own.kv * p.v_stride.head;
      state().records = w.records + record * kRecord, state().words = w.words + word_place * w.item_tiles * rows::kWordBytes;
      state().inner_first = p.ids ? 0 : high.first, state().inner_last = p.ids ? 0x7fffffff : low.last;
    }
    if (tid < kRows) {
      const int nth = tid / p.heads_per_kv;
      const Reach reach(p, own.sequence, own.first + nth);
      state().reach[tid] = make_int2(reach.first, reach.last);
      state().bits[tid] = nth >= own.end - own.first ? 0 : p.ids ? 1u << nth : ~0u;
    }
    return true;
  }

  static __device__ const volatile State& kept() { return state(); }
  __device__ int query_of(int row) const { return kept().query + row / p.heads_per_kv; }
  __device__ bool real(int row) const { return row < (kept().end - kept().query) * p.heads_per_kv; }
  // The places of a row in q or out.
  __device__ int64_t place(int row, int64_t stride, int64_t head_stride) const {
    return query_of(row) * stride + (kept().kv * p.heads_per_kv + row % p.heads_per_kv) * head_stride;
  }

  // Digits of q in shared memory, as rows of bytes: h, l, m of all rows.
  __device__ void digits() {
    const int tid = thread();
    constexpr int kLanes = D / 8, kSteps = kRows / (kThreads / kLanes);  // lanes of a row
    const int at = tid % kLanes;
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      const int row = tid / kLanes + i * (kThreads / kLanes);
      float x[8] = {};
      if (real(row))
        with_dtype(p, [&](auto dtype) {
          const int64_t from = place(row, p.q_stride, p.q_head_stride) + at * 8;
          float y[4];
          load_q4<decltype(dtype)::value>(p, from, y);
          x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
          load_q4<decltype(dtype)::value>(p, from + 4, y);
          x[4] = y[0], x[5] = y[1], x[6] = y[2], x[7] = y[3];
        });
      float top = 0.0f;
      bool finite = true;
#pragma unroll
      for (int u = 0; u < 8; ++u) top = fmaxf(top, fabsf(x[u])), finite &= is_finite(x[u]);
#pragma unroll
      for (int o = 1; o < G / 8; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float factor = __fmul_rn(__fmul_rn(top, kInv127), p.score_scale), scale = A::digit_scale(top);
      if (!finite || !(fabsf(factor) < kLargestFactor)) state().bad = 1;
      uint32_t digit[3][2] = {};
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int low = A::fixed(x[u], scale), middle = low + (kBiasExact & 255), high = low + kBiasExact;
        digit[0][u >> 2] |= (high >> 16 & 255u) << 8 * (u & 3);
        digit[1][u >> 2] |= (middle >> 8 & 255u) << 8 * (u & 3);
        digit[2][u >> 2] |= (low & 255u) << 8 * (u & 3);
      }
#pragma unroll
      for (int d = 0; d < 3; ++d) *reinterpret_cast<uint2*>(stages() + kDigits + (d * kRows + row) * kRowBytes + at * 8) = make_uint2(digit[d][0], digit[d][1]);
      if (at % (G / 8) == 0) state().factors[at / (G / 8)][row] = factor;
    }
  }

  // 64 cells' codes by the places at `from`.
  template <class Places>
  static __device__ __forceinline__ void copy_codes(uint32_t to, const int8_t* pool, const Places& from) {
    constexpr int kPass = kThreads / kChunks;  // 24
    const int tid = thread(), chunk = tid % kChunks, cell = tid / kChunks;
    pool += chunk * 16, to += chunk * 16 + cell * kRowBytes;
    copy_16(to, pool + static_cast<uint64_t>(from(cell)) * 16);
    copy_16(to + kPass * kRowBytes, pool + static_cast<uint64_t>(from(cell + kPass)) * 16);
    if (cell < 64 - 2 * kPass) copy_16(to + 2 * kPass * kRowBytes, pool + static_cast<uint64_t>(from(cell + 2 * kPass)) * 16);
  }
  // Where the places of a step stand: of one of the first in its record, later beside the codes of a step before.
  struct InRecord {
    const unsigned char* at;
    __device__ __forceinline__ uint32_t operator()(int cell) const { return reinterpret_cast<const uint32_t*>(at)[cell]; }
  };
  struct InStage {
    uint32_t at;
    __device__ __forceinline__ uint32_t operator()(int cell) const {
      uint32_t x;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at + cell * 4) : "memory");
      return x;
    }
  };
  // `bytes` of the global memory.
  template <int bytes>
  static __device__ __forceinline__ void copy_bytes(uint32_t to, const unsigned char* from) {
    const int tid = thread();
#pragma unroll
    for (int i = 0; i < (bytes / 16 + kThreads - 1) / kThreads; ++i) {
      const int j = (i * kThreads + tid) * 16;
      if (bytes % (kThreads * 16) == 0 || j < bytes) copy_16(to + j, from + j);
    }
  }

  // A score's part from the sums over the dims of one group.
  static constexpr int kStart = D == 256 ? 0 : kMagicBits;  // of h; a constant in four registers where it is not 0
  static __device__ __forceinline__ float joined(int h, int l, int m) { return kStart ? join_half_magic(h, l * 256 + m) : A::join(h, l * 256 + m); }

  // Scores of the steps begin .. stop - 1, as words; the anchors' maxima.
  __device__ void scores() {
    const Who me;
    constexpr int kStages = rows::kScoreStages, kAhead = kStages - 1;
    uint32_t a[kHeld][D / 32][4];
    auto digit = [](const Who& me, int d, int k) {
      return shared_address(stages()) + kDigits + d * (kRows * kRowBytes) + (me.tile * 16 + (me.lane & 15)) * kRowBytes + (me.lane >> 4) * 16 + k * 32;
    };
#pragma unroll
    for (int d = 0; d < kHeld; ++d)
#pragma unroll
      for (int k = 0; k < D / 32; ++k) load_matrices(a[d][k], digit(me, d, k));
    __syncthreads();
    const uint32_t base = shared_address(stages());
    auto issue = [](int i, uint32_t to, const auto& places) {
      copy_codes(to, kept().k, places);
      const unsigned char* const record = kept().records + static_cast<int64_t>(i) * kRecord;
      copy_bytes<512 + 128 * kGroups>(to + kCodes + 256, record + rows::kMasks);
      if (i + kAhead < kept().stop) copy_bytes<256>(to + kCodes, record + kAhead * kRecord);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (state().begin + i < state().stop) issue(state().begin + i, base + i * kScoreStage, InRecord{state().records + static_cast<int64_t>(state().begin + i) * kRecord});
      commit();
    }
    float top[2] = {kMinusInf, kMinusInf}, raised[2] = {kMinusInf, kMinusInf};
    uint32_t at = base;
    for (int i = kept().begin; i < kept().stop; ++i) {
      land<kAhead - 1>();
      __syncthreads();
      const unsigned char* const here = stages() + (at - base);
      if (i + kAhead < kept().stop) issue(i + kAhead, at == base ? base + (kStages - 1) * kScoreStage : at - kScoreStage, InStage{at + kCodes});
      commit();
      const bool edge = kept().first_cell + i * 64 < kept().inner_first || kept().first_cell + i * 64 + 63 > kept().inner_last;
#pragma unroll 1
      for (int block = 0; block < 4 / kShare; ++block) {
        const Who now;  // places anew: there are no registers for them
        const int c0 = (now.share * (4 / kShare) + block) * 16, lane = now.lane, row0 = now.tile * 16 + now.g, row1 = row0 + 8;
        float x[2][4];
        const uint32_t codes = at + (c0 + (lane & 7)) * kRowBytes + (lane >> 3) * 16;
        const uint16_t* const ks = reinterpret_cast<const uint16_t*>(here + kCodes + 768) + c0 + (lane & 3) * 2;
        int h[2][4], l[2][4], m[2][4];
        constexpr int magic[4] = {kStart, kStart, kStart, kStart}, zero[4] = {};
#pragma unroll
        for (int k64 = 0; k64 < D / 64; ++k64) {
          uint32_t b[2][4];
#pragma unroll
          for (int n = 0; n < 2; ++n) load_matrices(b[n], codes + n * 8 * kRowBytes + k64 * 64);
#pragma unroll
          for (int kk = 0; kk < 2; ++kk) {
            const int k = k64 * 2 + kk, group = k * 32 / G;
            uint32_t last[4];
            if constexpr (kHeld == 2) {
              load_matrices(last, digit(now, 2, k));
            } else {
#pragma unroll
              for (int u = 0; u < 4; ++u) last[u] = a[kHeld - 1][k][u];
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              if (k * 32 % G == 0) {
                mma_s8s8(h[n], a[0][k], b[n][2 * kk], b[n][2 * kk + 1], magic);
                mma_s8s8(l[n], a[1][k], b[n][2 * kk], b[n][2 * kk + 1], zero);
                mma_s8s8(m[n], last, b[n][2 * kk], b[n][2 * kk + 1], zero);
              } else {
                accumulate_s8s8(h[n], a[0][k], b[n][2 * kk], b[n][2 * kk + 1]);
                accumulate_s8s8(l[n], a[1][k], b[n][2 * kk], b[n][2 * kk + 1]);
                accumulate_s8s8(m[n], last, b[n][2 * kk], b[n][2 * kk + 1]);
              }
            }
            if ((k + 1) * 32 % G == 0) {
              const float f0 = state().factors[group][row0], f1 = state().factors[group][row1];
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(ks + group * 64 + n * 8);
                const float k0 = half_to_float(static_cast<uint16_t>(pair)), k1 = half_to_float(static_cast<uint16_t>(pair >> 16));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  const float y = __fmul_rn(joined(h[n][e], l[n][e], m[n][e]), e < 2 ? f0 : f1);
                  x[n][e] = group == 0 ? __fmul_rn(y, e & 1 ? k1 : k0) : __fmaf_rn(y, e & 1 ? k1 : k0, x[n][e]);
                }
              }
            }
          }
        }
        uint32_t out[2][4];
        const uint32_t bit0 = state().bits[row0], bit1 = state().bits[row1];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int cell = c0 + n * 8 + now.t * 2;
          uint2 mask = *reinterpret_cast<const uint2*>(here + kCodes + 256 + cell * 4);
          float2 level = *reinterpret_cast<const float2*>(here + kCodes + 512 + cell * 4);
          if (fmaxf(level.x, level.y) == kBadLevel) {  // a bad row's item is another kernel's
            const uint32_t both = bit0 | bit1;  // perhaps of a query that does not see it: that costs time alone
            if ((level.x == kBadLevel && mask.x & both) || (level.y == kBadLevel && mask.y & both)) state().bad = 1;
            if (level.x == kBadLevel) level.x = kLeastLevel;
            if (level.y == kBadLevel) level.y = kLeastLevel;
          }
          uint32_t masks[4] = {mask.x, mask.y, mask.x, mask.y};
          if (edge) {
            const int number = state().first_cell + i * 64 + cell;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int2 reach = state().reach[row0 + (e >> 1) * 8];
              if (number + (e & 1) < reach.x || number + (e & 1) > reach.y) masks[e] = 0;
            }
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            constexpr float magic = kMagic - 127.0f;  // its low bits hold n - 127
            const bool on = (masks[e] & (e < 2 ? bit0 : bit1)) != 0;
            float y = on ? x[n][e] : kMinusInf;
            top[e >> 1] = fmaxf(top[e >> 1], y);
            y = fmaxf(y, kLowestScore);
            const float z = __fadd_rn(y, magic), whole = __fsub_rn(z, magic);
            out[e >> 1][n * 2 + (e & 1)] = static_cast<uint32_t>(__float_as_int(add_exponent(A::poly(__fsub_rn(y, whole)), z)));
            raised[e >> 1] = fmaxf(raised[e >> 1], __fadd_rn(whole, e & 1 ? level.y : level.x));
          }
        }
        unsigned char* const to = kept().words + static_cast<uint32_t>(i * rows::kWordBytes + ((c0 >> 4) * 192 + now.tile * 64 + now.lane) * 16);
        __stcg(reinterpret_cast<uint4*>(to), make_uint4(out[0][0], out[0][1], out[0][2], out[0][3]));
        __stcg(reinterpret_cast<uint4*>(to + 512), make_uint4(out[1][0], out[1][1], out[1][2], out[1][3]));
      }
      at = at == base + (kStages - 1) * kScoreStage ? base : at + kScoreStage;
    }
    land<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int o = 1; o < 4; o <<= 1) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], o));
        raised[r] = fmaxf(raised[r], __shfl_xor_sync(~0u, raised[r], o));
      }
      if (me.t == 0 && top[r] != kMinusInf) {
        atomicMax(&state().tops[0][me.tile * 16 + me.g + 8 * r], ordered(top[r]));
        atomicMax(&state().tops[1][me.tile * 16 + me.g + 8 * r], ordered(raised[r]));
      }
    }
  }

  __device__ void anchors() {
    const int tid = thread();
    if (tid >= kRows) return;
    const bool any = state().tops[0][tid] != 0;
    const float top = rintf(from_ordered(state().tops[0][tid])), raised = from_ordered(state().tops[1][tid]);
    if (any && !(top >= kLowestAnchor && top <= kHighestAnchor)) state().bad = 1;
    const int anchor = any ? static_cast<int>(top) : 0, base = any ? static_cast<int>(fmaxf(kBFloor, __fsub_rn(raised, top))) : 0;
    // Terms of 2^-95 or less are 0 in L, those of 2^(-95 - b) in W.
    constexpr int unit = 1 << 23;
    state().anchors[tid] = make_int4((157 - anchor - base) * unit, (32 - base) * unit, (157 - anchor) * unit, 32 * unit);
    state().units[tid] = shift(1.0f, static_cast<float>(base));
  }

  // x + add, at least `least`: the bits of a number.
  static __device__ __forceinline__ float moved(int x, int add, int least) { return __int_as_float(__viaddmax_s32(x, add, least)); }

  // The sums over the steps begin .. stop - 1, into planes: [byte][16 dims, even and odd][fragment].
  __device__ __forceinline__ void sums(int (&plane)[4][8][4]) {
    constexpr int kStages = kSumStages, kAhead = kStages - 1, kOwn = G < 64 ? 2 : 1;  // groups of a warp
    const uint32_t base = shared_address(stages());
    auto issue = [](int i, uint32_t to, const auto& places) {
      copy_codes(to, kept().v, places);
      copy_bytes<rows::kWordBytes>(to + kCodes + 256, kept().words + static_cast<int64_t>(i) * rows::kWordBytes);
      const unsigned char* const record = kept().records + static_cast<int64_t>(i) * kRecord;
      copy_bytes<128 * kGroups>(to + kCodes + 256 + rows::kWordBytes, record + rows::kScales + 128 * kGroups);
      if (i + kAhead < kept().stop) copy_bytes<256>(to + kCodes, record + kAhead * kRecord + rows::kVPlaces);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (state().begin + i < state().stop) issue(state().begin + i, base + i * kSumStage, InRecord{state().records + static_cast<int64_t>(state().begin + i) * kRecord + rows::kVPlaces});
      commit();
    }
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) state().running[r][slot()] = 0;
    auto anchor_of = [](const Who& me) { return shared_address(&state().anchors[me.tile * 16 + me.g]); };
    auto sum_row = [](const Who& me) { return kShare == 1 ? 0 : me.share & 1; };
    auto sum_block = [](const Who& me) { return kShare == 4 ? me.share & 2 : 0; };
    uint32_t at = base;
    for (int i = kept().begin; i < kept().stop; ++i) {
      land<kAhead - 1>();
      __syncthreads();
      if (i + kAhead < kept().stop) issue(i + kAhead, at == base ? base + (kStages - 1) * kSumStage : at - kSumStage, InStage{at + kCodes});
      commit();
#pragma unroll
      for (int r = 0; r < kSumRows; ++r) {
        const Who me;
        const uint32_t word = kCodes + 256 + (me.tile * 64 + me.lane) * 16;
        unsigned long long& sum = state().running[r][slot()];
        unsigned long long more = 0;
        int c[4];
        load4(c, anchor_of(me) + (sum_row(me) + r) * 128);
#pragma unroll
        for (int b = 0; b < kSumBlocks; ++b) {
          int x[4];
          load4(x, at + word + (sum_block(me) + b) * 3072 + (sum_row(me) + r) * 512);
#pragma unroll
          for (int u = 0; u < 4; ++u) x[u] = __float2int_rn(moved(x[u], c[2], c[3]));
          more += static_cast<uint32_t>(x[0]) + static_cast<uint32_t>(x[1]);
          more += static_cast<uint32_t>(x[2]) + static_cast<uint32_t>(x[3]);
        }
        sum += more;
      }
      const Who before;
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
#pragma unroll 1  // unrolled, it costs registers that are not there
        for (int k = 0; k < 2; ++k) {
          const Who me(kOwn == 2 ? before.tid : thread());  // places anew: there are no registers for them
          const uint32_t anchor = anchor_of(me), word = kCodes + 256 + (me.tile * 64 + me.lane) * 16;
          const uint32_t scale = kCodes + 256 + rows::kWordBytes + me.share * 64 / G * 128 + me.t * 8, code = me.lane * kRowBytes + me.share * 64;
          uint32_t a[4][4];
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            uint32_t h0, h1;
            asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(h0), "=r"(h1) : "r"(at + scale + own * 128 + (k * 32 + b * 16) * 2) : "memory");
            const float v[4] = {half_to_float(static_cast<uint16_t>(h0)), half_to_float(static_cast<uint16_t>(h0 >> 16)),
                                half_to_float(static_cast<uint16_t>(h1)), half_to_float(static_cast<uint16_t>(h1 >> 16))};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              int x[4], add, least;
              asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(add), "=r"(least) : "r"(anchor + r * 128) : "memory");
              load4(x, at + word + (k * 2 + b) * 3072 + r * 512);
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
          for (int c = own * (4 / kOwn); c < (own + 1) * (4 / kOwn); ++c) {
            uint32_t v[4];
            load_matrices_transposed(v, at + code + k * 32 * kRowBytes + c * 16);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
              const uint32_t selector = odd ? 0x7531 : 0x6420, b0 = byte_permute(v[0], v[1], selector), b1 = byte_permute(v[2], v[3], selector);
              accumulate_s8s8(plane[3][2 * c + odd], a[3], b0, b1);
#pragma unroll
              for (int d = 0; d < 3; ++d) accumulate_u8s8(plane[d][2 * c + odd], a[d], b0, b1);
            }
          }
        }
      }
      at = at == base + (kStages - 1) * kSumStage ? base : at + kSumStage;
    }
    land<0>();
    __syncthreads();
    if (const int row = thread(); row < kRows) {
      unsigned long long sum = 0;
      const int half = row >> 3 & 1, lanes = (row & 7) * 4;
#pragma unroll
      for (int part = 0; part < (kShare == 4 ? 2 : 1); ++part) {
        const int warp = (row >> 4) * kShare + (kShare == 1 ? 0 : half + 2 * part);
#pragma unroll
        for (int t = 0; t < 4; ++t) sum += state().running[kShare == 1 ? half : 0][warp * 32 + lanes + t];
      }
      state().sums[row] = sum;
    }
    __syncthreads();
  }

  static __device__ __forceinline__ int64_t whole(const int (&plane)[4][8][4], int n, int e) {
    int x[4] = {plane[0][n][e], plane[1][n][e], plane[2][n][e], plane[3][n][e]};
    asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3]));  // no joining earlier: it doubles the registers
    int64_t o = x[3];
    o = (o << 8) + x[2];
    o = (o << 8) + x[1];
    return (o << 8) + x[0];
  }
  static __device__ __forceinline__ float quotient(int64_t o, float total, float unit) {
    return total > 0.0f ? __fadd_rn(__fmul_rn(divide_ordinary(__ll2float_rn(o), total), unit), 0.0f) : 0.0f;
  }
  __device__ void store_lse(unsigned long long total) const {
    const int tid = thread();
    if (!p.lse || tid >= kRows || !real(tid)) return;
    const float top = rintf(from_ordered(state().tops[0][tid])), l = __ll2float_rn(static_cast<long long>(total));
    p.lse[place(tid, p.lse_stride, 1)] = state().tops[0][tid] ? A::lse(top, __fmul_rn(l, 0x1p-30f)) : kMinusInf;
  }

  __device__ void store(const int (&plane)[4][8][4]) const {
    const Who me;
    with_dtype(p, [&](auto dtype) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = me.tile * 16 + me.g + 8 * r;
        if (!real(row)) continue;
        const float total = __ll2float_rn(static_cast<long long>(state().sums[row])), unit = state().units[row];
        const int64_t to = place(row, p.out_stride, p.out_head_stride) + me.share * 64 + me.t * 4;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float x[4];
#pragma unroll
          for (int u = 0; u < 4; ++u) x[u] = quotient(whole(plane, 2 * c + (u & 1), 2 * r + (u >> 1)), total, unit);
          store_out4<decltype(dtype)::value>(p, to + c * 16, x);
        }
      }
    });
    store_lse(me.tid < kRows ? state().sums[me.tid] : 0);
  }

  // This split's part to the item's others; the last one of them writes out.
  __device__ void add(const int (&plane)[4][8][4]) {
    const Who me;
    const int tid = me.tid;
    const int at = kept().item - w.first_item;
    unsigned long long* const outs = w.outs + static_cast<int64_t>(at) * kRows * D;
    if (kept().begin < kept().stop) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = me.tile * 16 + me.g + 8 * r;
        if (!real(row)) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int u = 0; u < 4; ++u)
            atomicAdd(outs + row * D + me.share * 64 + c * 16 + me.t * 4 + u, static_cast<unsigned long long>(whole(plane, 2 * c + (u & 1), 2 * r + (u >> 1))));
      }
      if (tid < kRows) atomicAdd(w.sums + static_cast<int64_t>(at) * kRows + tid, state().sums[tid]);
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) state().last = atomicAdd(w.done + at, 1) == w.splits - 1;
    __syncthreads();
    if (!state().last) return;
    __threadfence();
    with_dtype(p, [&](auto dtype) {
      for (int i = tid; i < kRows * D / 4; i += kThreads) {
        const int row = i / (D / 4), d = i % (D / 4) * 4;
        unsigned long long* const from = outs + row * D + d;
        if (!real(row)) break;
        const float total = __ll2float_rn(static_cast<long long>(__ldcg(w.sums + static_cast<int64_t>(at) * kRows + row))), unit = state().units[row];
        float x[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) x[u] = quotient(static_cast<int64_t>(__ldcg(from + u)), total, unit), from[u] = 0;
        store_out4<decltype(dtype)::value>(p, place(row, p.out_stride, p.out_head_stride) + d, x);
      }
    });
    unsigned long long* const own = w.sums + static_cast<int64_t>(at) * kRows;
    store_lse(tid < kRows ? __ldcg(own + tid) : 0);
    __syncthreads();
    if (tid < kRows) own[tid] = 0;
    if (tid == 0) w.done[at] = 0;
  }
};

template <int D, int G>
__device__ __forceinline__ void rows_kernel(const Params& p, const Rows& w) {
  using Block = RowsBlock<D, G>;
  typename Block::State& s = Block::state();
  Block b(p, w);
  for (int unit = static_cast<int>(blockIdx.x); unit >= 0;) {
    const int tid = Block::thread();
    if (tid == 0) {
      const int next = w.phases == 3 ? atomicAdd(w.next, 1) + static_cast<int>(gridDim.x) : -1;
      s.bad = 0, s.item = w.first_item + unit / w.splits;
      s.next = next < (w.end_item - w.first_item) * w.splits ? next : -1;
    }
    const int item = w.first_item + unit / w.splits;
    if (tid < 2 * rows::kRows) {
      const int64_t at = (static_cast<int64_t>(tid >= rows::kRows ? w.tiles * p.n_kv : 0) + item) * rows::kRows + tid % rows::kRows;
      s.tops[tid >= rows::kRows][tid % rows::kRows] = w.phases == 2 ? __ldcg(w.tops + at) : 0;
    }
    __syncthreads();
    if (b.start(item, unit % w.splits, w.phases == 3 ? blockIdx.x : item - w.first_item)) {
      __syncthreads();
      if (w.phases & 1) {
        b.digits();
        __syncthreads();
        b.scores();
        __threadfence_block();
        __syncthreads();
      }
      if (w.phases & 2) {
        b.anchors();
        __syncthreads();
        if (!s.bad) {
          int plane[4][8][4] = {};
          b.sums(plane);
          if (w.splits == 1) b.store(plane);
          else b.add(plane);
        }
      } else if (tid < 2 * rows::kRows) {
        const uint32_t top = s.tops[tid >= rows::kRows][tid % rows::kRows];
        if (top) atomicMax(w.tops + (static_cast<int64_t>(tid >= rows::kRows ? w.tiles * p.n_kv : 0) + b.kept().item) * rows::kRows + tid % rows::kRows, top);
      }
      if (s.bad && tid == 0) w.flags[b.kept().item] = 1;
    }
    unit = s.next;
    __syncthreads();
  }
}

#endif

}  // namespace cuda
}  // namespace strata_pa
