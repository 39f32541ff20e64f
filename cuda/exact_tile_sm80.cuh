// exact for tiles of 48 rows, neighbouring queries and their heads (docs/numerics.md, section 5): the rows of a tile walk the union of their
// cells, once for scores and anchors, once for the sums. The bytes are those of the plain form. See exact_tile_sm80.h.
//
// A warp owns 16 rows: with the scores a share of the 64 cells of a step, with the sums 64 dims. A score s = n + t is kept as one word, the bits of
// 2^t with n added to its exponent (less 128), so that any anchor is one more addition to it. The words lie as the MMA fragments of the sums want them: two
// neighbouring 8-cell tiles of scores make four neighbouring words of a thread. The sums are four int32 planes per output.
#pragma once
#include "exact_rows_cells.cuh"

namespace strata_pa {
namespace cuda {

#ifdef STRATA_PA_SM80
// Numbers as unsigned integers of the same order, all of them above 0.
__device__ __forceinline__ uint32_t ordered(float x) {
  const int i = __float_as_int(x);
  return static_cast<uint32_t>(i ^ ((i >> 31) | 0x80000000));
}
__device__ __forceinline__ float from_ordered(uint32_t u) { return __int_as_float(static_cast<int>(u & 0x80000000u ? u ^ 0x80000000u : ~u)); }

extern __shared__ __align__(128) unsigned char raw_rows[];

template <int D, int G>
struct RowsBlock {
  static constexpr int kRows = rows::kRows, kThreads = D / 2 * 3, kGroups = D / G, kShare = D / 64;  // warps of the same 16 rows
  static constexpr int kRowBytes = rows::row_bytes(D), kChunks = D / 16, kCodes = rows::kCells * kRowBytes, kRecord = rows::record_bytes(kGroups), kVPlaces = rows::v_places(kGroups);
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

  static __device__ __forceinline__ int thread() { return thread_now(); }
  // The thread's number in other terms: the compiler would keep a product of it in a register through all the sums for the sake of what follows.
  static __device__ __forceinline__ int slot() {
    const int lane = lane_now();
    return (thread() & ~31) + lane;
  }
  struct Who {  // tile: the warp's 16 rows; share: its part of the cells or dims
    const int tid, lane, tile, share, g, t;
    __device__ Who() : Who(thread()) {}
    // Unsigned: a division is a shift.
    __device__ explicit Who(int x) : tid(x), lane(x & 31), tile(static_cast<uint32_t>(x) / (32 * kShare)), share(static_cast<uint32_t>(x) / 32 % kShare), g(lane >> 2), t(lane & 3) {}
  };

  // Takes on split `part` of item i; the block meets afterwards.
  __device__ void start(int i, int part, int64_t word_place) {
    const int tid = thread();
    const RowsOf own(p, w, i);
    const Reach low(p, own.sequence, own.first), high(p, own.sequence, own.end - 1);
    const int first_cell = p.ids ? 0 : low.first & ~63;
    const int steps = p.ids ? (w.counts[i] + 63) >> 6 : high.last < first_cell ? 0 : ((high.last - first_cell) >> 6) + 1;
    const int64_t record = rows::kBefore + (p.ids ? static_cast<int64_t>(i - w.first_item) * (rows::kBefore + w.item_tiles)
                                                  : static_cast<int64_t>(own.kv) * (rows::kBefore + w.record_tiles) + w.first_record[own.sequence] + (first_cell >> 6));
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
        with_dtype(p, [&](auto dtype) { load_q8<decltype(dtype)::value>(p, place(row, p.q_stride, p.q_head_stride) + at * 8, x); });
      bool finite;
      const float top = group_top<G / 8>(x, finite);
      const float factor = __fmul_rn(__fmul_rn(top, kInv127), p.score_scale), scale = A::digit_scale(top);
      if (!finite || !(fabsf(factor) < kLargestFactor)) state().bad = 1;
      uint32_t digit[3][2] = {};
      digits_of(x, scale, digit);
#pragma unroll
      for (int d = 0; d < 3; ++d) *reinterpret_cast<uint2*>(stages() + kDigits + (d * kRows + row) * kRowBytes + at * 8) = make_uint2(digit[d][0], digit[d][1]);
      if (at % (G / 8) == 0) state().factors[at / (G / 8)][row] = factor;
    }
  }

  // 64 cells' codes by the places at `from`.
  template <class Places>
  static __device__ __forceinline__ void copy_codes(uint32_t to, const int8_t* pool, const Places& from) {
    constexpr int kPass = kThreads / kChunks;  // 24
    const uint32_t tid = thread(), chunk = tid % kChunks, cell = tid / kChunks;
    to += chunk * 16 + cell * kRowBytes;
    const int8_t* const base = pool + chunk * 16;
    // All loads before the first copy: the machine code of one after loads of shared memory begins with three idle ones.
    const bool third = cell < 64 - 2 * kPass;
    const uint32_t place[3] = {from(cell), from(cell + kPass), third ? from(cell + 2 * kPass) : 0};
    copy16(to, sixteenths(base, place[0]));
    copy16(to + kPass * kRowBytes, sixteenths(base, place[1]));
    if (third) copy16(to + 2 * kPass * kRowBytes, sixteenths(base, place[2]));
  }
  // Where the places of a step stand: of one of the first in its record, later beside the codes of a step before.
  struct InRecord {
    const unsigned char* at;
    __device__ __forceinline__ uint32_t operator()(uint32_t cell) const { return reinterpret_cast<const uint32_t*>(at)[cell]; }
  };
  struct InStage {
    uint32_t at;
    __device__ __forceinline__ uint32_t operator()(uint32_t cell) const {
      uint32_t x;
      load_shared(x, at + cell * 4);
      return x;
    }
  };
  // `bytes` of a record.
  template <int bytes>
  static __device__ __forceinline__ void copy_run(uint32_t to, const unsigned char* from) {
    static_assert(bytes <= kThreads * 16, "");
    if (const uint32_t at = thread() * 16; at < bytes) copy16(to + at, from + at);
  }

  // Scores of the steps begin .. stop - 1, as words; the anchors' maxima.
  __device__ void scores();

  __device__ void anchors() {
    const int tid = thread();
    if (tid >= kRows) return;
    const bool any = state().tops[0][tid] != 0;
    const float top = rintf(from_ordered(state().tops[0][tid])), raised = from_ordered(state().tops[1][tid]);
    if (any && !(top >= kLowestAnchor && top <= kHighestAnchor)) state().bad = 1;
    const int anchor = any ? static_cast<int>(top) : 0, base = any ? static_cast<int>(fmaxf(kBFloor, __fsub_rn(raised, top))) : 0;
    // Terms of 2^-95 or less are 0 in L, those of 2^(-95 - b) in W.
    constexpr int unit = 1 << 23;
    state().anchors[tid] = make_int4((158 - anchor - base) * unit, (32 - base) * unit, (158 - anchor) * unit, 32 * unit);
    state().units[tid] = shift(1.0f, static_cast<float>(base));
  }

  // x + add, at least `least`: the bits of a number.
  static __device__ __forceinline__ float moved(int x, int add, int least) { return __int_as_float(__viaddmax_s32(x, add, least)); }

  // The sums over the steps begin .. stop - 1, into planes: [byte][16 dims, even and odd][fragment].
  __device__ void sums(int (&plane)[4][8][4]);

  static __device__ __forceinline__ int64_t whole(const int (&plane)[4][8][4], int n, int e) {
    int x[4] = {plane[0][n][e], plane[1][n][e], plane[2][n][e], plane[3][n][e]};
    hide(x);  // no joining earlier: it doubles the registers
    int64_t o = x[3];
    o = (o << 8) + x[2];
    o = (o << 8) + x[1];
    return (o << 8) + x[0];
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

#endif

}  // namespace cuda
}  // namespace strata_pa
