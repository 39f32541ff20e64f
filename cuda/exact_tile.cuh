// exact for tiles of neighbouring queries on sm_90 (docs/numerics.md, section 5): the rows of a tile (query and head) walk the union of their cells,
// once for scores and anchors (here), once for the sums (exact_tile_sums.cuh). The bytes are those of the plain form. See tile_launch.h.
//
// Scores come from int8 wgmma, cells by 3 digits x 16 rows. A score s = n + t is kept as one word, the bits of 2^t with n added to its exponent
// (less 128), so that any anchor is one more addition to it. Words lie as the warps of the sums read them: [32 cells][8 rows][4 of 8 cells].
#pragma once
#include <cstddef>

#include "exact_union.cuh"
#include "hopper.cuh"

namespace strata_pa {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr float kUnseen = kLowestScore - 1.0f;  // the score of a cell that a row does not see
constexpr int64_t kNowhere = INT64_MIN;

extern __shared__ __align__(1024) unsigned char raw_tile[];

// kSplit: a block has a share of an item's tiles (exact_tile_split.cuh).
template <int D, bool kSplit = false>
struct TileBlock {
  static constexpr int kRows = tile::kRows, kGroups = D / 64, kAtOnce = tile::at_once(D), kThreads = tile::threads(D), kWarps = kThreads / 32;
  static constexpr int kCodes = tile::code_bytes(D), kExtras = tile::kExtraBytes, kUnitBytes = tile::kWordBytes / 2;
  static constexpr int kStep = kThreads / 128, kScoreStages = tile::score_stages(D);  // kStep: warpgroups
  static constexpr int kMakers = tile::makers(D), kWeightBytes = tile::weight_bytes(D), kWeightSlots = tile::weight_slots(D), kGroupWeights = 4 * kRows * 32;
  static constexpr int kDigits = tile::digit_bytes(D), kStaged = tile::staged_at(D), kValues = tile::first_bytes(D), kPlaces = tile::places_at(D), kState = tile::state_at(D);  // places in shared memory
  static constexpr int kPasses = kGroups / kAtOnce;  // of the sums

  struct State {
    float4 factors[kGroups][3][4];  // of rows 2t, 2t + 1, 8 + 2t, 9 + 2t of 16
    uint4 bits[3][4];               // of a cell's mask, laid out alike
    uint32_t chunk_bits[3];         // of 16 rows together
    int4 anchors[kRows];            // what to add to a word and the least sum, for W and for L
    float units[kRows], tops[kRows];  // 2^b; the anchor
    unsigned long long sums[kRows];
    int64_t out_at[kRows];          // the row in out, or kNowhere
    unsigned long long full[kWeightSlots], empty[kWeightSlots];
    alignas(16) const unsigned char* records;  // the item's
    const int8_t *k, *v;           // of its KV head
    int query, end, kv;            // its queries, its KV head
    int nt;                        // its tiles of 64 cells
    int first_cell;                // without ids: the number of the first one
    int inner_first, inner_end;    // tiles whose cells all its queries may see by their numbers
    uint32_t all;                  // a bit per query
    int item, next, bad;
    int place;  // of how many tiles the block has made the weights, modulo two uses of their slots
  };
  static_assert(sizeof(State) <= tile::kStateBytes, "");
  static_assert(offsetof(State, k) == offsetof(State, records) + 8, "");
  static __device__ __forceinline__ uint64_t pointer_of(int low, int high) { return uint64_t{static_cast<uint32_t>(high)} << 32 | static_cast<uint32_t>(low); }
  using Tops = int[2][kWarps][kRows];  // per warp: kZeroBits + greatest n, greatest n + level; where V's codes come later
  static_assert(sizeof(Tops) <= kAtOnce * tile::kValueSlots * tile::kValueBytes, "");
  static __device__ __forceinline__ Tops& tops() { return *reinterpret_cast<Tops*>(raw_tile + kValues); }
  static __device__ __forceinline__ State& state() { return *reinterpret_cast<State*>(raw_tile + kState); }

  static __device__ __forceinline__ const volatile State& kept() { return state(); }  // nothing of it stays in registers

  const Params& p;
  const Tiles& w;

  __device__ TileBlock(const Params& p, const Tiles& w) : p(p), w(w) {}

  __device__ unsigned char* words() const { return w.words + static_cast<int64_t>(blockIdx.x) * w.block_tiles * (2 * kUnitBytes); }
  __device__ bool real(int row) const { return row < (kept().end - kept().query) * p.heads_per_kv; }
  // The place of a row in q, out or lse.
  __device__ int64_t place_of(int row, int64_t stride, int64_t head_stride) const {
    return (kept().query + row / p.heads_per_kv) * stride + (kept().kv * p.heads_per_kv + row % p.heads_per_kv) * head_stride;
  }

  // Of the weights' slots; the block meets afterwards.
  __device__ void init_barriers() {
    if (const int tid = thread_now(); tid < kWeightSlots) {
      barrier_init(shared_address(&state().full[tid]), 2);
      barrier_init(shared_address(&state().empty[tid]), 4 * kAtOnce);
    }
    fence_async_shared();
    if (thread_now() == 0) state().place = 0;
  }

  // Takes on item i; the block meets afterwards. False: it is the last kernel's; of a split item the caller has asked.
  __device__ bool start(int i) {
    if (!kSplit && p.ids && w.flags[i]) return false;
    State& s = state();
    const int tid = thread_now(), kv = i % p.n_kv, query = first_query_of(p, w, i);
    const int end = min(query + w.queries, p.n_q);
    if (tid == 0) {
      s.query = query, s.end = end, s.kv = kv, s.k = p.k + kv * p.k_stride.head, s.v = p.v + kv * p.v_stride.head, s.bad = 0;
      s.all = end - query < 32 ? (1u << (end - query)) - 1 : ~0u;
      if (p.ids) {
        s.nt = (w.counts[i] + 63) >> 6;
        s.first_cell = s.inner_first = 0, s.inner_end = s.nt;
        s.records = w.records + static_cast<int64_t>(i) * w.record_tiles * tile::kRecordBytes;
      } else {
        const int last = Span(p, end - 1).last, first_cell = Span(p, query).first & ~63;
        s.nt = last < first_cell ? 0 : ((last - first_cell) >> 6) + 1;
        s.first_cell = first_cell;
        s.inner_first = (Span(p, end - 1).first - first_cell + 63) >> 6, s.inner_end = (Span(p, query).last + 1 - first_cell) >> 6;
        s.records = w.records + (static_cast<int64_t>(kv) * w.record_tiles + (first_cell >> 6)) * tile::kRecordBytes;
      }
      if constexpr (kSplit) {
        const int share = (s.nt + w.splits - 1) / w.splits, first = min(static_cast<int>(blockIdx.x) % w.splits * share, s.nt);
        s.nt = min(share, s.nt - first);
        s.first_cell += first * 64, s.inner_first -= first, s.inner_end -= first;
        s.records += static_cast<int64_t>(first) * tile::kRecordBytes;
        s.item = i;
      }
    }
    if (tid < kRows) {
      const int place = (tid >> 3 & 1) * 2 + (tid & 1), nth = tid / p.heads_per_kv;
      reinterpret_cast<uint32_t*>(&s.bits[tid >> 4][tid >> 1 & 3])[place] = nth < end - query ? 1u << nth : 0;
      s.sums[tid] = 0;
    }
    if (tid < 3) {  // of rows 16 tid .. 16 tid + 15
      const int first = tid * 16 / p.heads_per_kv, last = min((tid * 16 + 15) / p.heads_per_kv, end - query - 1);
      s.chunk_bits[tid] = last < first ? 0 : (last < 31 ? (2u << last) - 1 : ~0u) & ~((1u << first) - 1);
    }
    return true;
  }

  // What item i begins with comes to L2: its queries, the records of its first tiles. For half of the block.
  __device__ void fetch(int i) const {
    if (i >= w.tiles * p.n_kv) return;
    const int thread = thread_now() & (kThreads / 2 - 1), kv = i % p.n_kv, query = first_query_of(p, w, i);
    const int bytes = p.dtype == 0 ? 4 : 2, lines = D * bytes / 128, rows = (min(query + w.queries, p.n_q) - query) * p.heads_per_kv;
    for (int line = thread; line < rows * lines; line += kThreads / 2) {
      const int row = line / lines;
      const int64_t at = (query + row / p.heads_per_kv) * p.q_stride + (kv * p.heads_per_kv + row % p.heads_per_kv) * p.q_head_stride;
      prefetch_l2(static_cast<const unsigned char*>(p.q) + at * bytes + line % lines * 128);
    }
    const int first = min(w.record_tiles, 8) * (tile::kRecordBytes / 128);
    if (p.ids && thread < first) prefetch_l2(w.records + static_cast<int64_t>(i) * w.record_tiles * tile::kRecordBytes + thread * 128);
  }

  // Digits of q as wgmma's second matrices: of each 16 rows h, l and m; halves of 128 dims.
  __device__ void digits() {
    constexpr int kLanes = D / 8, kTogether = kThreads / kLanes;  // lanes of a row, rows at once
    const int tid = thread_now(), part = tid % kLanes;
#pragma unroll 1
    for (int i = 0; i < (kRows + kTogether - 1) / kTogether; ++i) {
      const int row = tid / kLanes + i * kTogether;
      float x[8] = {};
      if (row < kRows && real(row))
        with_dtype(p, [&](auto dtype) { load_q8<decltype(dtype)::value>(p, place_of(row, p.q_stride, p.q_head_stride) + part * 8, x); });
      bool finite;
      const float top = group_top<8>(x, finite);
      const float factor = __fmul_rn(__fmul_rn(top, kInv127), p.score_scale), scale = A::digit_scale(top);
      if (!finite || !(fabsf(factor) < kLargestFactor)) state().bad = 1;
      uint32_t digit[3][2] = {};
      digits_of(x, scale, digit);
      if (row >= kRows) continue;
      const int chunk = (part & 15) >> 1;
      unsigned char* const to = raw_tile + (part >> 4) * (3 * kRows * 128) + ((chunk ^ row) & 7) * 16 + (part & 1) * 8;
#pragma unroll
      for (int d = 0; d < 3; ++d) *reinterpret_cast<uint2*>(to + ((row >> 4) * 48 + d * 16 + (row & 15)) * 128) = make_uint2(digit[d][0], digit[d][1]);
      if ((part & 7) == 0) reinterpret_cast<float*>(&state().factors[part >> 3][row >> 4][row >> 1 & 3])[(row >> 3 & 1) * 2 + (row & 1)] = factor;
    }
  }

  // A thread copies 16 bytes of each of kOwn neighbouring cells: their places.
  static constexpr int kChunks = D / 16, kOwn = kChunks / 2;
  struct Cells {
    uint32_t place[kOwn];
    __device__ __forceinline__ Cells(const unsigned char* at, int thread) {
      at += (thread & 127) / kChunks * (kOwn * 4);
      if constexpr (kOwn == 2) {
        const uint2 a = *reinterpret_cast<const uint2*>(at);
        place[0] = a.x, place[1] = a.y;
      } else {
#pragma unroll
        for (int u = 0; u < kOwn; u += 4) {
          const uint4 a = *reinterpret_cast<const uint4*>(at + u * 4);
          place[u] = a.x, place[u + 1] = a.y, place[u + 2] = a.z, place[u + 3] = a.w;
        }
      }
    }
    // From shared memory.
    __device__ __forceinline__ Cells(uint32_t at, int thread) {
      at += (thread & 127) / kChunks * (kOwn * 4);
      if constexpr (kOwn == 2) {
        load_shared2(place[0], place[1], at);
      } else {
#pragma unroll
        for (int u = 0; u < kOwn; u += 4) {
          int a[4];
          load_shared4(a, at + u * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) place[u + e] = a[e];
        }
      }
    }
  };
  // Laid out as matrix() says, in halves of 128 dims.
  static __device__ __forceinline__ void copy_codes(uint32_t to, const int8_t* pool, const Cells& cells, int thread, int condition) {
    const int chunk = thread & (kChunks - 1), first = (thread & 127) / kChunks * kOwn;
    const int8_t* const from = pool + chunk * 16;
    to += (chunk >> 3) * 8192 + first * 128 + ((chunk ^ first) & 7) * 16;
#pragma unroll
    for (int u = 0; u < kOwn; ++u) copy16_if((to ^ u * 16) + u * 128, sixteenths(from, cells.place[u]), condition);  // 128 divides what the codes begin at
  }

  // Bits of the queries that may see a cell by its number.
  __device__ uint32_t in_reach(int cell) const {
    const int pos = p.seq[0].kv_len - p.seq[0].q_end + kept().query, ahead = cell - pos;
    uint32_t mask = ~0u;
    if (p.causal && ahead > 0) mask = ahead < 32 ? mask << ahead : 0;
    if (p.window_left >= 0) {
      const int last = ahead + min(p.window_left, 1 << 30);  // the last query that reaches back to it
      mask &= last < 0 ? 0 : last < 31 ? (2u << last) - 1 : ~0u;
    }
    return mask;
  }

  // Which 16 rows see one of the cells that the lanes of the warp have the masks of: a bit each.
  static __device__ __forceinline__ uint32_t active_rows(uint32_t mask) {
    uint32_t active = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) active |= mask & state().chunk_bits[i] ? 1u << i : 0;
    return __reduce_or_sync(~0u, active);
  }

  // Copies tile i's codes to stage `odd` of the warpgroup; beside them of its record k_scale, masks, levels; the places of the tile after the next one
  // of this warpgroup.
  struct Stages {
    uint32_t codes, extras;
    __device__ __forceinline__ Stages(uint32_t shared, int group)
        : codes(shared + kDigits + group * (2 * kCodes)), extras(shared + kDigits + kScoreStages * kCodes + group * (2 * kExtras)) {}
    __device__ __forceinline__ void issue(int i, int nt, int odd, const Cells& cells, const int8_t* pool, const unsigned char* records, int thread) const {
      const int more = i < nt, part = thread & 127;
      copy_codes(codes + odd * kCodes, pool, cells, thread, more);
      constexpr int kUnits = tile::kRecordBytes / 16;
      const bool here = part < 64;  // past the last tile: places that nobody needs
      const int ahead = here ? tile::kKScales / 16 : 2 * kStep * kUnits - 64, last = here ? nt * kUnits : (nt - 1) * kUnits - 64;
      const uint32_t from = min(i * kUnits + ahead, last) + part;
      copy16_if(extras + odd * kExtras + part * 16, sixteenths(records, from), more & (part < kExtras / 16));
    }
  };

  // The first two tiles of each warpgroup, which land while q's digits are made.
  __device__ void begin_scores() const {
    const int thread = thread_now(), group = uniform(thread >> 7), nt = uniform(kept().nt);
    const Stages stages(shared_address(raw_tile), group);
    const unsigned char* const records = kept().records;
    auto place = [&](int odd) { return records + static_cast<int64_t>(max(min(group + odd * kStep, nt - 1), 0)) * tile::kRecordBytes; };
    const Cells first(place(0), thread), second(place(1), thread);
    stages.issue(group, nt, 0, first, kept().k, records, thread);
    commit_copies();
    stages.issue(group + kStep, nt, 1, second, kept().k, records, thread);
    commit_copies();
  }

  // Scores of all cells, as words; the anchors' maxima. A warpgroup takes every kStep-th tile. Of its 16 rows by groups of 64 dims, the products of two
  // run while those of another are joined. 16 rows that see none of a tile's cells are left out.
  __device__ void scores() {
    constexpr int kSteps = 3 * kGroups;
    const int thread = thread_now(), group = uniform(thread >> 7), lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    const int pair = (thread & 127) >> 2;  // cells g and g + 8 of the warp's 16, which lie side by side in the record
    const int nt = uniform(kept().nt), all = uniform(kept().all), inner_first = uniform(kept().inner_first), inner_end = uniform(kept().inner_end);
    const uint32_t shared = uniform(shared_address(raw_tile));
    const Stages stages(shared, group);
    const uint32_t first_a = place_of_matrix(stages.codes);
    int top[12], raised[12];
#pragma unroll
    for (int u = 0; u < 12; ++u) top[u] = raised[u] = 0;  // below all sums
    unsigned char* out = words() + (group - kStep) * (2 * kUnitBytes) + (warp >> 1 & 1) * kUnitBytes + (g >> 1 & 1) * 512 +
                         ((g >> 2) + 4 * t + (warp & 1) * 16) * 16 + (g & 1) * 8;
    const uint32_t b = place_of_matrix(kGroups == 4 ? shared_address(raw_tile) : shared);  // all matrices of the 12 steps would lie in registers
    int d[2][24];
    auto multiply = [&](int (&sums)[24], uint32_t a, int step) {
      const int chunk = step / kGroups, part = step % kGroups;
      const uint32_t ai = a + ((part >> 1) * 8192 + (part & 1) * 64) / 16;
      const uint32_t bi = b + ((part >> 1) * (3 * kRows * 128) + chunk * (48 * 128) + (part & 1) * 64) / 16;
      wgmma_fence();
      wgmma(sums, matrix(ai), matrix(bi), 0);
      wgmma(sums, matrix(ai + 2), matrix(bi + 2), 1);
      wgmma_commit();
    };
    // Of a tile's record, before its first products begin: loads would wait behind these.
    int scales[4], level_of[2];
    uint32_t mask_of[2];
    uint32_t seen = 7;  // which 16 rows see one of its cells: a bit each
    auto load_extras = [&](int odd) {
      const uint32_t extra = stages.extras + odd * kExtras;
      load_shared4(scales, extra + pair * 16);
      load_shared2(mask_of[0], mask_of[1], extra + 512 + pair * 8);
      load_shared2(level_of[0], level_of[1], extra + 768 + pair * 8);
      if (p.ids) {
        uint32_t of_all[2];
        load_shared2(of_all[0], of_all[1], extra + 512 + lane * 8);
        seen = active_rows(of_all[0] | of_all[1]);
      }
    };
    int i = group, odd = 0;
    uint32_t a = first_a;
    if (i < nt) {
      land_copies<1>();
      fence_async_shared();
      join_warpgroup(group);
      load_extras(0);
      multiply(d[0], a, 0), multiply(d[1], a, 1);
#pragma unroll 1
      do {
        uint32_t active = seen;
        hide(active);
        float k[2][kGroups];
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int part = 0; part < kGroups; ++part) k[r][part] = half_to_float(static_cast<uint16_t>(scales[r * 2 + (part >> 1)] >> (part & 1) * 16));
        uint32_t mask[2] = {mask_of[0], mask_of[1]};
        int level[2] = {level_of[0], level_of[1]};
        if (i < inner_first || i >= inner_end) {
          const int cell = kept().first_cell + i * 64 + (warp & 3) * 16 + g;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            mask[r] &= in_reach(cell + r * 8);
            if (!(mask[r] & all)) level[r] = kLeastLevel;  // nobody cares whether it is bad
          }
        }
        mask[0] &= all, mask[1] &= all;
        const bool whole = __all_sync(~0u, (mask[0] & mask[1]) == all);  // no need to look at masks

        float x[8];
        auto finish = [&](int chunk) {
#pragma unroll
          for (int u = 0; u < 8; ++u) x[u] = fmaxf(x[u], kLowestScore);
          if (!whole) {
            const uint4 bits = state().bits[chunk][t];
            const uint32_t own[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (int u = 0; u < 8; ++u) x[u] = mask[u >> 1 & 1] & own[(u >> 2) * 2 + (u & 1)] ? x[u] : kUnseen;
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            uint32_t kept[4];
            int bits[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float y = x[n * 4 + e], z = __fadd_rn(y, kScoreMagic);
              kept[e] = static_cast<uint32_t>(__float_as_int(add_exponent(A::poly(__fsub_rn(y, __fsub_rn(z, kScoreMagic))), z)));
              bits[e] = __float_as_int(z);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int u = chunk * 4 + n * 2 + e;
              top[u] = __vimax3_s32(top[u], bits[e], bits[e + 2]);
              raised[u] = __viaddmax_s32(bits[e + 2], level[1], __viaddmax_s32(bits[e], level[0], raised[u]));
            }
            __stcg(reinterpret_cast<uint2*>(out + (chunk * 2 + n) * 1024), make_uint2(kept[0], kept[2]));
            __stcg(reinterpret_cast<uint2*>(out + (chunk * 2 + n) * 1024 + 32), make_uint2(kept[1], kept[3]));
          }
        };
        auto load_factors = [&](float (&f)[4], int step) {
          const float4 x = state().factors[step % kGroups][step / kGroups][t];
          f[0] = x.x, f[1] = x.y, f[2] = x.z, f[3] = x.w;
        };
        auto join = [&](int (&sums)[24], const float (&f)[4], int part) {
#pragma unroll
          for (int u = 0; u < 8; ++u) {  // 8-row tile, then as the products lie: rows 2t and 2t + 1 of cell g, then of cell g + 8
            const float y = __fmul_rn(A::join(sums[u], sums[8 + u] * 256 + sums[16 + u]), f[(u >> 2) * 2 + (u & 1)]), kk = k[u >> 1 & 1][part];
            x[u] = part == 0 ? __fmul_rn(y, kk) : __fmaf_rn(y, kk, x[u]);
          }
        };
        // Of the next tile's codes. The fence takes long, longer behind stores, and what waits for products waits for it: so it is behind such a wait and
        // before this tile's first stores, not where it is needed.
        auto land_and_fence = [] {
          land_copies<0>();
          fence_async_shared();
        };
        out += kStep * (2 * kUnitBytes), hide(out);  // not sooner: the last stores of the tile before may still read it
        float f[4];
        load_factors(f, 0);
        wait_for<0>(d[0]), wait_for<0>(d[1]);
        if (active == 7) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            int (&sums)[24] = d[step & 1];
            if (step == kSteps - 1) wait_for<0>(sums);
            else if (step > 1 && step != kGroups) wait_for<1>(sums);
            join(sums, f, step % kGroups);
            if (step + 1 < kSteps) load_factors(f, step + 1);  // before the products: it would wait behind them
            if (step + 2 < kSteps) multiply(sums, a, step + 2);
            if (step == kGroups - 1) {
              if (kGroups > 1) wait_for<1>(d[kGroups & 1]);
              land_and_fence();
            }
            if (step % kGroups == kGroups - 1 && step != kSteps - 1) finish(step / kGroups);
          }
        } else {
#pragma unroll
          for (int chunk = 0; chunk < 3; ++chunk) {
            if (!(active >> chunk & 1)) continue;
            const int first = chunk * kGroups;
#pragma unroll
            for (int part = 0; part < 2 && part < kGroups; ++part)
              if (first + part > 1) multiply(d[first + part & 1], a, first + part);
#pragma unroll
            for (int part = 0; part < kGroups; ++part) {
              const int step = first + part;
              int (&sums)[24] = d[step & 1];
              load_factors(f, step);
              if (part == kGroups - 1) wait_for<0>(sums);
              else if (step > 1) wait_for<1>(sums);
              join(sums, f, part);
              if (part + 2 < kGroups) multiply(sums, a, step + 2);
            }
            finish(chunk);
          }
          land_and_fence();
        }
        const Cells cells(stages.extras + odd * kExtras + 1024, thread);
        int at[4];  // state's records and k, read in one: so raw_tile's address is not made anew
        load_shared4(at, shared + kState + offsetof(State, records));
        const auto* const records = reinterpret_cast<const unsigned char*>(pointer_of(at[0], at[1]));
        const auto* const pool = reinterpret_cast<const int8_t*>(pointer_of(at[2], at[3]));
        join_warpgroup(group);  // all threads' codes of the next tile have landed; nothing of this one is needed any more
        load_extras(odd ^ 1);
        stages.issue(i + 2 * kStep, nt, odd, cells, pool, records, thread);  // before the products: loads would wait behind these, and their registers are free
        commit_copies();
        a = first_a + (odd ^ 1) * (kCodes / 16);  // behind the last tile: products that nobody reads, since wgmma is not for branches
        multiply(d[0], a, 0), multiply(d[1], a, 1);
        if (active == 7) finish(2);
        i += kStep, odd ^= 1;
      } while (i < nt);
      wait_for<0>(d[0]), wait_for<0>(d[1]);
    }
    land_copies<0>();
#pragma unroll
    for (int u = 0; u < 12; ++u) {
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        top[u] = max(top[u], __shfl_xor_sync(~0u, top[u], o));
        raised[u] = max(raised[u], __shfl_xor_sync(~0u, raised[u], o));
      }
      if (g == 0) {
        const int row = (u >> 1) * 8 + t * 2 + (u & 1);
        tops()[0][warp][row] = top[u], tops()[1][warp][row] = raised[u];
      }
    }
  }

  // Of a row, what tops has of all warps: kZeroBits + greatest n, greatest n + level.
  static __device__ int2 top_of(int row) {
    int top = 0, raised = 0;
    for (int i = 0; i < kWarps; ++i) top = max(top, tops()[0][i][row]), raised = max(raised, tops()[1][i][row]);
    return make_int2(top, raised);
  }

  __device__ void anchors() {
    const int tid = thread_now();
    if (tid >= kRows) return;
    State& s = state();
    int top, raised;
    if constexpr (kSplit) {
      const uint32_t* const of = all_tops() + tid;
      top = static_cast<int>(__ldcg(of)), raised = static_cast<int>(__ldcg(of + kRows));
    } else {
      const int2 of = top_of(tid);
      top = of.x, raised = of.y;
    }
    top -= kZeroBits, raised -= kZeroBits;
    const bool any = real(tid) && top > static_cast<int>(kUnseen);
    if (any && !(top >= kLowestAnchor && top <= kHighestAnchor && raised < kBadLevel / 2)) s.bad = 1;  // also where a row sees a bad cell
    const int anchor = any ? top : 0, base = any ? max(static_cast<int>(kBFloor), raised - top) : 0;
    // Terms of 2^-95 or less are 0 in L, those of 2^(-95 - b) in W.
    constexpr int unit = 1 << 23;
    s.anchors[tid] = make_int4((158 - anchor - base) * unit, (32 - base) * unit, (158 - anchor) * unit, 32 * unit);
    s.units[tid] = shift(1.0f, static_cast<float>(base));
    s.tops[tid] = any ? static_cast<float>(top) : kMinusInf;
    s.out_at[tid] = real(tid) ? place_of(tid, p.out_stride, p.out_head_stride) : kNowhere;
  }

  // Which 64 dims a multiplying thread has.
  static __device__ __forceinline__ int slot_of(int thread, int pass) { return pass * kAtOnce + (thread >> 7); }
  // The first of two neighbouring dims that it has sums of, in rows n * 8 + (thread & 3) * 2 and the next ones.
  static __device__ __forceinline__ int dim_of(int thread, int pass) { return slot_of(thread, pass) * 64 + (thread >> 5 & 3) * 16 + (thread >> 2 & 7) * 2; }
  // The sums over all cells, and out.
  __device__ void sums();
  __device__ void multiply();
  __device__ void weigh();
  __device__ void store_lse(int row, unsigned long long sum) const {
    if (!p.lse || row >= kRows || !real(row)) return;
    const float top = state().tops[row], total = __ll2float_rn(static_cast<long long>(sum));
    p.lse[place_of(row, p.lse_stride, 1)] = top == kMinusInf ? kMinusInf : A::lse(top, __fmul_rn(total, 0x1p-30f));
  }

  // Split: of the block's item its place in the round, and what its blocks share.
  __device__ int nth() const { return kept().item - w.first_item; }
  __device__ uint32_t* all_tops() const { return w.tops + static_cast<int64_t>(kept().item) * (2 * kRows); }
  __device__ unsigned long long* all_sums() const { return w.sums + static_cast<int64_t>(nth()) * kRows; }
  // Of outs, where two sums of a multiplying thread begin: of 64 dims and a row of each eight, the second one is 128 further on.
  __device__ unsigned long long* outs_of(int thread, int pass) const {
    return w.outs + (static_cast<int64_t>(nth()) * (D / 64) + slot_of(thread, pass)) * (kRows * 64) + (thread & 127);
  }
  __device__ void clear(int item) const;
  __device__ void finish();
};
#endif

}  // namespace cuda
}  // namespace strata_pa
