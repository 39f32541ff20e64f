// The sums of exact's tiles on sm_90. Half of the warpgroups, the first one or two, multiply V with weights that the others make.
//
// A weight is four unsigned bytes (scales of V with a minus sign are the plain form's), each a column of wgmma's second matrix: 64 dims (V, transposed on the
// way to registers) by 48 rows x 4 bytes, over 32 cells. A warp makes the weights of 32 cells for all multiplying warpgroups, of a group of 64 dims each. At
// head_dim 256 the cells are walked twice, for half of the groups each: so the int32 sums are 96 registers of a thread.
#pragma once
#include "exact_tile.cuh"

namespace strata_pa {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kSumsReady = 5;  // named barrier: L is complete

// Where the weights of the block's tile number i lie, and the parity of that use of the slot; i is less than twice kSlots, and again from 0.
// A warp makes every kMakers-th half tile, so before it waits for a slot's use n to be read, it has seen the tile of use n - 1 or a later one read:
// no parity is taken for that of two uses before.
template <int kSlots, int kMakers>
struct WeightSlot {
  static_assert(kMakers <= 2 * kSlots, "");
  int i;
  __device__ __forceinline__ int slot() const { return i < kSlots ? i : i - kSlots; }
  __device__ __forceinline__ uint32_t parity() const { return i < kSlots ? 0 : 1; }
  __device__ __forceinline__ WeightSlot later(int tiles) const { return {i + tiles < 2 * kSlots ? i + tiles : i + tiles - 2 * kSlots}; }
  __device__ __forceinline__ WeightSlot before() const { return {i > 0 ? i - 1 : 2 * kSlots - 1}; }
};

template <int D, bool kSplit>
__device__ __forceinline__ void TileBlock<D, kSplit>::multiply() {
  constexpr int kHalfWeights = kWeightBytes / 2;  // of 32 cells
  const uint32_t base = shared_address(raw_tile);
  const int warp = same_in_warp(thread_now() >> 5);
  // A thread copies 16 bytes of cells 2 own and 2 own + 1, and names cell lane's 16 dims of its warp to ldmatrix.
  const int own = (thread_now() & 127) >> 2, values = base + kValues + (warp >> 2) * (tile::kValueSlots * tile::kValueBytes);
  const uint32_t copied = values + own * 128 + ((thread_now() ^ own) & 3) * 16;
  const uint32_t read = values + lane_now() * 64 + ((warp ^ lane_now() >> 1) & 3) * 16;
  const bool leader = lane_now() == 0;
  WeightSlot<kWeightSlots, kMakers> now{same_in_warp(kept().place)};
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const int nt = same_in_warp(kept().bad ? 0 : kept().nt);
    int left = nt;  // tiles
    const int8_t* from = kept().v + slot_of(thread_now(), pass) * 64 + (thread_now() & 3) * 16;
    hide(from);
    // Of a tile's cells the places are on their way, then the codes, three tiles before the products. The first four tiles' places are looked up here, others
    // have come with the weights of earlier tiles.
    auto look_up = [&](int i) {
      const int tile = max(pass == 0 ? nt - 1 - i : min(i, nt - 1), 0);
      return __ldg(reinterpret_cast<const uint2*>(kept().records + tile * static_cast<int64_t>(tile::kRecordBytes) + tile::kVPlaces + own * 8));
    };
    auto copy = [&](uint2& place, bool any, int slot) {
      hide(place.x), hide(place.y);  // their addresses are made here, while products run
      if (any) {
        copy16(copied + slot, from + static_cast<uint64_t>(place.x) * 16);
        copy16(copied + slot + 64, from + static_cast<uint64_t>(place.y) * 16);
      }
      commit_copies();
    };
    auto release = [&](bool any) {  // the weights of the tile before
      barrier_arrive_if(base + kState + offsetof(State, empty) + now.before().slot() * 8, any && leader);
    };
    uint2 first[3] = {look_up(0), look_up(1), look_up(2)}, next = look_up(3);
#pragma unroll
    for (int i = 0; i < 3; ++i) copy(first[i], left > i, i * tile::kValueBytes);
    int d[96];  // zeroes that the compiler does not know of: it would take the first turn out of the loop, with a wait for every product
#pragma unroll
    for (int u = 0; u < 96; ++u) d[u] = 0, hide(d[u]);
    uint32_t a[2][4];
    int slot = 0;  // of V
    bool any = false;  // a tile before
    land_copies<2>();
    join_warpgroup(warp >> 2);
#pragma unroll 1
    for (; left > 0; --left) {
      uint32_t x[4];
      ldmatrix4_trans(x, read + slot);
      const uint32_t b = place_of_matrix(base + now.slot() * kWeightBytes + (warp >> 2) * kGroupWeights);
      barrier_wait(base + kState + offsetof(State, full) + now.slot() * 8, now.parity());
      auto multiply_half = [&](int half) {
        a[half][0] = byte_permute(x[0], x[1], 0x6420), a[half][1] = byte_permute(x[0], x[1], 0x7531);  // even dims, odd dims
        a[half][2] = byte_permute(x[2], x[3], 0x6420), a[half][3] = byte_permute(x[2], x[3], 0x7531);
        wait_products<0>();  // of the half before
        still_read(a[half ^ 1]);
        if (half == 0) release(any);
        wgmma_fence();
        wgmma_rs_s8u8(d, a[half], narrow_matrix(b + half * (kHalfWeights / 16)), 1);
        wgmma_commit();
      };
      multiply_half(0);
      ldmatrix4_trans(x, read + slot + 32 * 64);
      land_copies<1>();
      join_warpgroup(warp >> 2);  // all have what they copied of the next tile, and have read this one
      copy(next, left > 3, slot);
      load_shared2(next.x, next.y, left > 4 ? base + kPlaces + now.later(4).i * 256 + own * 8 : base + kState);  // of the next pass: not there yet
      multiply_half(1);
      any = true;
      now = now.later(1);
      slot = slot == 2 * tile::kValueBytes ? 0 : slot + tile::kValueBytes;
    }
    wait_for<0>(d);
    still_read(a[0]), still_read(a[1]);
    release(any);
    if (pass == 0) join_threads(kSumsReady, kThreads);
    auto joined = [&](int n, int odd, int u) {
      auto byte = [&](int b) { return d[(n * 4 + b) * 4 + u * 2 + odd]; };
      int64_t o = byte(3);
      o = (o << 8) + byte(2);
      o = (o << 8) + byte(1);
      return (o << 8) + byte(0);
    };
    const int me = thread_now();
    if constexpr (kSplit) {
      unsigned long long* const to = outs_of(me, pass);
#pragma unroll
      for (int n = 0; n < 6; ++n) {
        if (kept().nt == 0 || !real(n * 8)) break;
#pragma unroll
        for (int part = 0; part < 4; ++part) add_global(to + (n * 4 + part) * 128, static_cast<unsigned long long>(joined(n, part >> 1, part & 1)));
      }
    } else {
      const int dim = dim_of(me, pass);
#pragma unroll
      for (int n = 0; n < 6; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int row = n * 8 + (me & 3) * 2 + odd;
          const int64_t to = state().out_at[row];
          if (to == kNowhere) continue;
          const float total = __ll2float_rn(static_cast<long long>(state().sums[row])), unit = state().units[row];
          const float out[2] = {quotient(joined(n, odd, 0), total, unit), quotient(joined(n, odd, 1), total, unit)};
          with_dtype(p, [&](auto dtype) { store_out2<decltype(dtype)::value>(p, to + dim, out); });
        }
    }
  }
  if (const int row = thread_now(); row < kRows) {
    if constexpr (kSplit) add_global(all_sums() + row, state().sums[row]);
    else store_lse(row, state().sums[row]);
  }
}

template <int D, bool kSplit>
__device__ __forceinline__ void TileBlock<D, kSplit>::weigh() {
  constexpr int kEights = kRows / 8;                                       // groups of 8 rows
  constexpr int kMasksAt = kEights * 1024, kScalesAt = kMasksAt + 32 * 4;  // of what is staged, behind the words
  const int maker = same_in_warp((thread_now() >> 5) - kWarps / 2), units = 2 * same_in_warp(kept().nt), place = same_in_warp(kept().place);  // units of 32 cells
  const int lane = lane_now(), row = lane >> 1 & 7;  // of 8: this thread's; of the unit's cells it has 8: of 16 the first or second half
  const uint32_t full = shared_address(state().full), empty = shared_address(state().empty);
  // Where this thread's anchors and weights begin.
  const uint32_t anchors = shared_address(&state().anchors[row]);
  const uint32_t weights = shared_address(raw_tile) + (maker & 1) * (kWeightBytes / 2) + row * 32 + ((lane >> 4 ^ lane >> 3) & 1) * 16 + (lane & 1) * 8;
  // What the warp has copied of a unit: the words of 8 rows six times, read by who copied them; masks and scales.
  const uint32_t staged = shared_address(raw_tile) + kStaged + maker * tile::kStagedBytes, own_words = staged + lane * 16;
  // x + add, at least `least`: the bits of a number.
  auto moved = [](int x, int add, int least) { return __int_as_float(__viaddmax_s32(x, add, least)); };
  auto walk = [&](int pass, auto with_sums) {
    constexpr bool kSums = decltype(with_sums)::value;
    unsigned long long sum[kSums ? kEights : 1] = {};
    const int begin = 2 * (place + pass * (units >> 1)), first = (maker - begin) & (kMakers - 1);
    // Backwards first: what was written last is still near.
    const int tile = kSums ? (units - 1 - first) >> 1 : first >> 1, way = kSums ? -1 : 1, step = way * (kMakers / 2);
    const unsigned char* from = words() + (2 * tile + (maker & 1)) * static_cast<int64_t>(kUnitBytes) + lane * 16;
    WeightSlot<kWeightSlots, kMakers> now{(place + pass * (units >> 1) + (first >> 1)) % (2 * kWeightSlots)};
    // Of a unit's record a lane copies 16 bytes of the masks, or of a group's scales.
    const int record_part = lane < 8 ? tile::kMasks + (maker & 1) * 128 + lane * 16 : tile::kVScales + (pass * kAtOnce + (lane >> 2 & 1)) * 128 + (maker & 1) * 64 + (lane & 3) * 16;
    const unsigned char* record = kept().records + tile * static_cast<int64_t>(tile::kRecordBytes) + record_part;
    auto copy_record = [&](bool more) { copy16_if(staged + kMasksAt + lane * 16, record, more && lane < 8 + 4 * kAtOnce); };
    // V's places, for who multiplies: where those of a tile `later` than now come to lie. The first four are not needed, the next four come at once, others
    // with the weights of eight tiles before. There is room for twice the slots: who waits for a slot has seen the looking up of places four tiles ahead of its
    // last use, and what is overwritten then came no later.
    static_assert(8 + kWeightSlots <= 2 * kWeightSlots + 4, "");
    auto v_places = [&](int later) {
      return shared_address(raw_tile) + kPlaces + now.later(later).i * 256 + (maker & 1) * 128 + (lane & 7) * 16;
    };
    if (first < 2) {
      barrier_wait(empty + now.slot() * 8, now.parity() ^ 1);
      const int i = 4 + (lane >> 3);
      copy16_if(v_places(i), record + way * i * tile::kRecordBytes + tile::kVPlaces + (maker & 1) * 128 + (lane & 7) * 16 - record_part, i < units >> 1);
    }
    // The words of the next unit come in three groups of copies, the record's parts with the first one.
    auto copy_pair = [&](int first_eight, const unsigned char* at, bool more) {
#pragma unroll
      for (int eight = first_eight; eight < first_eight + 2; ++eight) {
        const uint32_t to = own_words + eight * 1024;
        copy16_if(to, at + eight * 1024, more), copy16_if(to + 512, at + eight * 1024 + 512, more);
      }
      commit_copies();
    };
    copy_record(first < units);
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) copy_pair(eight, from, first < units);
    if constexpr (kSums) __syncthreads();  // the anchors are there
    if (state().bad) {
      land_copies<0>();
      if constexpr (kSums) announce_threads(kSumsReady, kThreads);
      return;
    }
    land_copies<2>();
    __syncwarp();
    uint32_t made = 0;  // who waits for the unit before: it is told late, when the fence behind its weights has had its time
#pragma unroll 1
    for (int left = units - first; left > 0; left -= kMakers) {
      const bool more = left > kMakers;
      const unsigned char* const following = from + step * (2 * kUnitBytes);
      float v[kAtOnce][8];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        int pairs[4];
        load_shared4(pairs, staged + kScalesAt + s * 64 + (lane_now() >> 4) * 32 + (lane_now() & 1) * 16);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[s][i] = half_to_float(static_cast<uint16_t>(static_cast<uint32_t>(pairs[i >> 1]) >> (i & 1) * 16));
      }
      uint32_t active = 7;  // a bit for 16 rows that see one of the cells
      if (p.ids) {
        uint32_t mask;
        load_shared(mask, staged + kMasksAt + lane_now() * 4);
        active = active_rows(mask);
      }
      __syncwarp();
      barrier_arrive_if(made, made && lane == 0);
      record += step * tile::kRecordBytes;
      copy_record(more);
      barrier_wait(empty + now.slot() * 8, now.parity() ^ 1);
      copy16_if(v_places(8), record + (way * 8 - step) * tile::kRecordBytes + tile::kVPlaces - tile::kMasks, lane < 8 && left > 16);
      const uint32_t at = weights + now.slot() * kWeightBytes;
      auto make = [&](auto whole) {
        int x[2][8], anchor[2][4];
        auto load = [&](int eight) {
          int a[4], b[4];
          load_shared4(a, own_words + eight * 1024), load_shared4(b, own_words + eight * 1024 + 512);
          const uint32_t of_rows = anchors + eight * (8 * 16);
          if (kSums) load_shared4(anchor[eight & 1], of_rows);
          else load_shared2(anchor[eight & 1][0], anchor[eight & 1][1], of_rows);
          int (&to)[8] = x[eight & 1];
          to[0] = a[0], to[1] = a[1], to[2] = a[2], to[3] = a[3], to[4] = b[0], to[5] = b[1], to[6] = b[2], to[7] = b[3];
        };
        // Conversions take long: those of a step (8 rows, a group of dims) are under way while the bytes of the step before are put in order.
        float e[8];
        int y[2][8];
        [[maybe_unused]] int term[8];
        auto convert = [&](int step) {
          if (step % kAtOnce == 0) {
            const int (&own)[8] = x[step / kAtOnce & 1];
            const int (&c)[4] = anchor[step / kAtOnce & 1];
#pragma unroll
            for (int i = 0; i < 8; ++i) e[i] = moved(own[i], c[0], c[1]);
            if constexpr (kSums) {
#pragma unroll
              for (int i = 0; i < 8; ++i) term[i] = __float2int_rn(moved(own[i], c[2], c[3]));
            }
          }
#pragma unroll
          for (int i = 0; i < 8; ++i) y[step & 1][i] = __float2int_rn(__fmul_rn(e[i], v[step % kAtOnce][i]));
        };
        auto add_terms = [&](int eight) {
          if constexpr (kSums) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) sum[eight] += static_cast<uint32_t>(term[i]) + static_cast<uint32_t>(term[i + 1]);  // of two terms below 2^31
          }
        };
        auto store = [&](int step, int d, uint32_t a, uint32_t b) {
          store_shared2(at + step % kAtOnce * kGroupWeights + (step / kAtOnce * 4 + d) * 256, a, b);
        };
        auto finish = [&](int step) {
          uint32_t plane[4][2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int* const z = y[step & 1] + k * 4;
            const uint32_t y0 = byte_permute(z[0], z[1], 0x5140), y1 = byte_permute(z[2], z[3], 0x5140);
            const uint32_t y2 = byte_permute(z[0], z[1], 0x7362), y3 = byte_permute(z[2], z[3], 0x7362);
            plane[0][k] = byte_permute(y0, y1, 0x5410);
            plane[1][k] = byte_permute(y0, y1, 0x7632);
            plane[2][k] = byte_permute(y2, y3, 0x5410);
            plane[3][k] = byte_permute(y2, y3, 0x7632);
          }
#pragma unroll
          for (int d = 0; d < 4; ++d) store(step, d, plane[d][0], plane[d][1]);
        };
        load(0);
        auto prepare = [&](int eight) {
          if (eight + 1 < kEights) {
            if (eight & 1) land_copies<2>();
            load(eight + 1);
          }
          if (eight < kEights && eight % 2 == 0) copy_pair(eight, following, more);  // what is read by now is written over
        };
        if constexpr (decltype(whole)::value) {
#pragma unroll
          for (int step = 0; step <= kEights * kAtOnce; ++step) {
            const int eight = step / kAtOnce;
            if (eight < kEights) convert(step);
            if (step % kAtOnce == 0) prepare(eight);
            if (step > 0) finish(step - 1);
            if (eight < kEights && step % kAtOnce == 0) add_terms(eight);
          }
        } else {
#pragma unroll
          for (int eight = 0; eight < kEights; ++eight) {
            prepare(eight);
            if (!(active >> (eight >> 1) & 1)) {  // their words were not written
#pragma unroll
              for (int s = 0; s < kAtOnce; ++s)
#pragma unroll
                for (int d = 0; d < 4; ++d) store(eight * kAtOnce + s, d, 0, 0);
              continue;
            }
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
              convert(eight * kAtOnce + s);
              if (s == 0) add_terms(eight);
              finish(eight * kAtOnce + s);
            }
          }
        }
      };
      if (active == 7) make(Constant<1>());
      else make(Constant<0>());
      from = following;
      fence_async_shared();
      land_copies<2>();  // of V's places and the next unit's record, too
      __syncwarp();
      made = full + now.slot() * 8;
      now = now.later(kMakers / 2);
    }
    if (made && lane_now() == 0) barrier_arrive(made);
    land_copies<0>();
    if constexpr (kSums) {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        sum[eight] += __shfl_xor_sync(~0u, sum[eight], 1);
        sum[eight] += __shfl_xor_sync(~0u, sum[eight], 16);
        if ((lane & 17) == 0) atomicAdd(&state().sums[eight * 8 + row], sum[eight]);
      }
      announce_threads(kSumsReady, kThreads);
    }
  };
  walk(0, Constant<1>());
  if constexpr (kPasses > 1) walk(1, Constant<0>());
}

// Where State::bad is set, those who multiply do so with no tiles: wgmma is not for branches.
template <int D, bool kSplit>
__device__ __forceinline__ void TileBlock<D, kSplit>::sums() {
  if (thread_now() < kThreads / 2) {
    anchors();
    __syncthreads();
    multiply();
  } else {
    weigh();
  }
}

template <int D>
__device__ __forceinline__ void tile_kernel(const Params& p, const Tiles& w) {
  using Block = TileBlock<D>;
  typename Block::State& s = Block::state();
  Block b(p, w);
  b.init_barriers();
  __syncthreads();
  for (int item = static_cast<int>(blockIdx.x); item < w.tiles * p.n_kv;) {
    if (thread_now() == 0) s.item = item, s.next = atomicAdd(w.next, 1) + static_cast<int>(gridDim.x);
    const bool own = b.start(item);
    __syncthreads();
    if (own) {
      b.begin_scores();
      b.digits();
      fence_async_shared();
      __syncthreads();
      b.scores();
      __threadfence_block();
      __syncthreads();
      b.sums();
      if (thread_now() >= Block::kThreads / 2) b.fetch(b.kept().next);
      __syncthreads();
      if (thread_now() == 0) {
        if (s.bad) w.flags[s.item] = 1;
        else s.place = (s.place + s.nt * Block::kPasses) % (2 * Block::kWeightSlots);
      }
    }
    item = b.kept().next;
    __syncthreads();
  }
}
#endif

}  // namespace cuda
}  // namespace strata_pa
