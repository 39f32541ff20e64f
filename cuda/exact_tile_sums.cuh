// The sums of exact's tiles on sm_90. Warpgroups 2 and 3 make weights, warpgroups 0 and 1 multiply V with them.
//
// A weight is four bytes, three unsigned and a signed one, each a column of wgmma's second matrix: 64 dims (V, transposed on the way to registers) by
// 48 rows x 4 bytes, over 32 cells. A warp makes the weights of 32 cells for both multiplying warpgroups: two groups of 64 dims, or where head_dim
// is 64 two blocks of rows. At head_dim 256 the cells are walked twice, for two groups each: so the int32 sums are 96 registers of a thread.
#pragma once
#include "exact_tile.cuh"

namespace strata_pa {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kSumsReady = 5;  // named barrier: L is complete

// Where the weights of the block's tile number i lie, and the parity of that use of the slot; i is less than twice kWeightSlots, and again from 0.
// A warp makes every kMakers-th half tile, so before it waits for a slot's use n to be read, it has seen a later tile than that of use n - 1 read:
// no parity is taken for that of two uses before.
struct WeightSlot {
  int i;
  __device__ __forceinline__ int slot() const { return i < tile::kWeightSlots ? i : i - tile::kWeightSlots; }
  __device__ __forceinline__ uint32_t parity() const { return i < tile::kWeightSlots ? 0 : 1; }
  __device__ __forceinline__ WeightSlot later(int tiles) const { return {i + tiles < 2 * tile::kWeightSlots ? i + tiles : i + tiles - 2 * tile::kWeightSlots}; }
  __device__ __forceinline__ WeightSlot before() const { return {i > 0 ? i - 1 : 2 * tile::kWeightSlots - 1}; }
};
static_assert(tile::kMakers <= 2 * tile::kWeightSlots, "");

template <int D>
__device__ __forceinline__ void TileBlock<D>::multiply() {
  constexpr int kHalfWeights = tile::kWeightBytes / 2;  // of 32 cells
  const uint32_t base = shared_address(raw_tile);
  const int warp = same_in_warp(thread_now() >> 5);
  // A thread copies 16 bytes of cells 2 own and 2 own + 1, and names cell lane's 16 dims of its warp to ldmatrix.
  const int own = (thread_now() & 127) >> 2, values = base + kValues + (warp >> 2) * (tile::kValueSlots * tile::kValueBytes);
  const uint32_t copied = values + own * 128 + ((thread_now() ^ own) & 3) * 16;
  const uint32_t read = values + lane_now() * 64 + ((warp ^ lane_now() >> 1) & 3) * 16;
  const bool leader = lane_now() == 0;
  WeightSlot now{same_in_warp(kept().place)};
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const int nt = same_in_warp(kept().nt);
    int left = nt;  // tiles
    const int8_t* from = kept().v + slot_of(thread_now(), pass) * 64 + (thread_now() & 3) * 16;
    hide(from);
    // Of a tile's cells the places are on their way, then the codes, two tiles before the products. The first three tiles' places are looked up here, others
    // have come with the weights of earlier tiles.
    uint2 next;
    auto look_up = [&](int i) {
      if (i >= nt) return;
      const int tile = pass == 0 ? nt - 1 - i : i;
      next = __ldg(reinterpret_cast<const uint2*>(kept().records + tile * static_cast<int64_t>(tile::kRecordBytes) + tile::kVPlaces + own * 8));
    };
    auto copy = [&](bool any, int slot) {
      hide(next.x), hide(next.y);  // their addresses are made here, while products run
      if (any) {
        copy16(copied + slot, from + static_cast<uint64_t>(next.x) * 16);
        copy16(copied + slot + 64, from + static_cast<uint64_t>(next.y) * 16);
      }
      commit_copies();
    };
    auto release = [&](bool any) {  // the weights of the tile before
      barrier_arrive_if(base + kState + offsetof(State, empty) + now.before().slot() * 8, any && leader);
    };
    look_up(0);
    copy(left > 0, 0);
    look_up(1);
    copy(left > 1, tile::kValueBytes);
    look_up(2);
    int low[72], high[24];  // zeroes that the compiler does not know of: it would take the first turn out of the loop, with a wait for every product
#pragma unroll
    for (int u = 0; u < 72; ++u) low[u] = 0, hide(low[u]);
#pragma unroll
    for (int u = 0; u < 24; ++u) high[u] = 0, hide(high[u]);
    uint32_t a[2][4];
    int slot = 0;  // of V
    bool any = false;  // a tile before
#pragma unroll 1
    for (; left > 0; --left) {
      land_copies<1>();
      join_warpgroup(warp >> 2);  // all have what they copied, and are done with the tile before
      uint32_t x[4];
      ldmatrix4_trans(x, read + slot);
      copy(left > 2, slot ? slot - tile::kValueBytes : 2 * tile::kValueBytes);
      const uint32_t b = place_of_matrix(base + now.slot() * tile::kWeightBytes + (warp >> 2) * (kHalfWeights / 2));
      barrier_wait(base + kState + offsetof(State, full) + now.slot() * 8, now.parity());
      load_shared2(next.x, next.y, left > 3 ? base + kPlaces + now.later(3).i * 256 + own * 8 : base + kState);  // of the next pass: not there yet
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[half][0] = byte_permute(x[0], x[1], 0x6420), a[half][1] = byte_permute(x[0], x[1], 0x7531);  // even dims, odd dims
        a[half][2] = byte_permute(x[2], x[3], 0x6420), a[half][3] = byte_permute(x[2], x[3], 0x7531);
        wait_products<0>();  // of the half before; what lies between is the other warpgroup's time
        still_read(a[half ^ 1]);
        if (half == 0) release(any);
        wgmma_fence();
        wgmma_rs_s8u8(low, a[half], narrow_matrix(b + half * (kHalfWeights / 16)), 1);
        wgmma_rs(high, a[half], narrow_matrix(b + (half * kHalfWeights + 144 * 32) / 16), 1);
        wgmma_commit();
        if (half == 0) ldmatrix4_trans(x, read + slot + 32 * 64);
      }
      any = true;
      now = now.later(1);
      slot = slot == 2 * tile::kValueBytes ? 0 : slot + tile::kValueBytes;
    }
    wait_for<0>(low);
    wait_for<0>(high);
    still_read(a[0]), still_read(a[1]);
    release(any);
    if (pass == 0) join_threads(kSumsReady, tile::kThreads);
    const int me = thread_now(), d = slot_of(me, pass) * 64 + (me >> 5 & 3) * 16 + (me >> 2 & 7) * 2;
#pragma unroll
    for (int n = 0; n < 6; ++n)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = (D == 64 ? (me >> 7) * tile::kRows : 0) + n * 8 + (me & 3) * 2 + odd;
        const int64_t to = state().out_at[row];
        if (to == kNowhere) continue;
        const float total = __ll2float_rn(static_cast<long long>(state().sums[row])), unit = state().units[row];
        float out[2];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const int e = u * 2 + odd, at = (n >> 1) * 24 + (n & 1) * 4 + e;
          int64_t o = high[n * 4 + e];
          o = (o << 8) + low[at + 16];
          o = (o << 8) + low[at + 8];
          o = (o << 8) + low[at];
          out[u] = total > 0.0f ? __fadd_rn(__fmul_rn(divide_ordinary(__ll2float_rn(o), total), unit), 0.0f) : 0.0f;
        }
        with_dtype(p, [&](auto dtype) { store_out2<decltype(dtype)::value>(p, to + d, out); });
      }
  }
  if (const int row = thread_now(); p.lse && row < kAllRows && real(row)) {
    const float top = state().tops[row], total = __ll2float_rn(static_cast<long long>(state().sums[row]));
    p.lse[place_of(row, p.lse_stride, 1)] = top == kMinusInf ? kMinusInf : A::lse(top, __fmul_rn(total, 0x1p-30f));
  }
}

template <int D>
__device__ __forceinline__ void TileBlock<D>::weigh() {
  constexpr int kSlots = 2 / kBlocks, kEights = 6 * kBlocks;  // groups of dims, of 8 rows
  const int maker = same_in_warp((thread_now() >> 5) - 8), units = 2 * same_in_warp(kept().nt), place = same_in_warp(kept().place);  // units of 32 cells
  const int lane = lane_now(), row = lane >> 1 & 7;  // of 8: this thread's; of the unit's cells it has 8: of 16 the first or second half
  const uint32_t full = shared_address(state().full), empty = shared_address(state().empty);
  // Where this thread's anchors and weights begin.
  const uint32_t anchors = shared_address(&state().anchors[row]);
  const uint32_t weights = shared_address(raw_tile) + (maker & 1) * (tile::kWeightBytes / 2) + row * 32 + ((lane >> 4 ^ lane >> 3) & 1) * 16 + (lane & 1) * 8;
  // What the warp has copied of a unit: the words of 8 rows six times, read by who copied them; masks and scales.
  const uint32_t staged = shared_address(raw_tile) + tile::kStaged + maker * tile::kStagedBytes, own_words = staged + lane * 16;
  // x + add, at least `least`: the bits of a number.
  auto moved = [](int x, int add, int least) { return __int_as_float(__viaddmax_s32(x, add, least)); };
  auto walk = [&](int pass, auto with_sums) {
    constexpr bool kSums = decltype(with_sums)::value;
    unsigned long long sum[kSums ? kEights : 1] = {};
    const int begin = 2 * (place + pass * (units >> 1)), first = (maker - begin) & (tile::kMakers - 1);
    // Backwards first: what was written last is still near.
    const int tile = kSums ? (units - 1 - first) >> 1 : first >> 1, step = kSums ? -tile::kMakers / 2 : tile::kMakers / 2;
    const unsigned char* from = words() + (2 * tile + (maker & 1)) * static_cast<int64_t>(kUnitBytes) + lane * 16;
    WeightSlot now{(place + pass * (units >> 1) + (first >> 1)) % (2 * tile::kWeightSlots)};
    // Of a unit's record a lane copies 16 bytes of the masks, or of a group's scales.
    const int record_part = lane < 8 ? tile::kMasks + (maker & 1) * 128 + lane * 16 : tile::kVScales + (pass * 2 + (lane >> 2 & 1)) * 128 + (maker & 1) * 64 + (lane & 3) * 16;
    const unsigned char* record = kept().records + tile * static_cast<int64_t>(tile::kRecordBytes) + record_part;
    auto copy_record = [&]() {
      if (lane < 8 + 4 * kSlots) copy16(staged + 6 * 1024 + lane * 16, record);
    };
    auto copy_words = [&](int eight, const unsigned char* at) {
      const uint32_t to = own_words + eight % 6 * 1024;
      copy16(to, at), copy16(to + 512, at + 512);
    };
    // V's places, for who multiplies: where those of a tile `later` than now come to lie. The first three are not needed, the next five come at once, others
    // with the weights of eight tiles before. There is room for twelve: what is overwritten has been looked up, three tiles before its products.
    auto v_places = [&](int later) {
      return shared_address(raw_tile) + kPlaces + now.later(later).i * 256 + (maker & 1) * 128 + (lane & 7) * 16;
    };
    if (first < 2) {
      barrier_wait(empty + now.slot() * 8, now.parity() ^ 1);
      for (int i = 3 + (lane >> 3); i < min(8, units >> 1); i += 4)
        copy16(v_places(i), record + (kSums ? -i : i) * tile::kRecordBytes + tile::kVPlaces + (maker & 1) * 128 + (lane & 7) * 16 - record_part);
    }
    if (first < units) {
      copy_record();
#pragma unroll
      for (int eight = 0; eight < 6; ++eight) copy_words(eight, from + eight * 1024), commit_copies();
    }
    land_copies<5>();
    __syncwarp();
#pragma unroll 1
    for (int u = first; u < units; u += tile::kMakers) {
      const bool more = u + tile::kMakers < units;
      const unsigned char* const following = more ? from + step * (2 * kUnitBytes) : from;
      float v[kSlots][8];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        int pairs[4];
        load_shared4(pairs, staged + 6 * 1024 + 128 + s * 64 + (lane_now() >> 4) * 32 + (lane_now() & 1) * 16);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[s][i] = half_to_float(static_cast<uint16_t>(static_cast<uint32_t>(pairs[i >> 1]) >> (i & 1) * 16));
      }
      constexpr uint32_t kAll = (1u << 3 * kBlocks) - 1;
      uint32_t active = kAll;  // a bit for 16 rows that see one of the cells
      if (p.ids) {
        uint32_t mask;
        load_shared(mask, staged + 6 * 1024 + lane_now() * 4);
        active = active_rows(mask, 0) | (kBlocks == 2 ? active_rows(mask, 1) << 3 : 0);
      }
      __syncwarp();
      if (more) {
        record += step * tile::kRecordBytes;
        copy_record();
      }
      barrier_wait(empty + now.slot() * 8, now.parity() ^ 1);
      if (lane < 8 && u + 2 * tile::kMakers < units) copy16(v_places(8), record + step * tile::kRecordBytes + tile::kVPlaces - tile::kMasks);
      const uint32_t at = weights + now.slot() * tile::kWeightBytes;
      auto make = [&](auto whole) {
        int x[2][8], anchor[2][4];
        auto load = [&](int eight) {
          int a[4], b[4];
          load_shared4(a, own_words + eight % 6 * 1024), load_shared4(b, own_words + eight % 6 * 1024 + 512);
          const uint32_t of_rows = anchors + eight * (8 * 16);
          if (kSums) load_shared4(anchor[eight & 1], of_rows);
          else load_shared2(anchor[eight & 1][0], anchor[eight & 1][1], of_rows);
          int (&to)[8] = x[eight & 1];
          to[0] = a[0], to[1] = a[1], to[2] = a[2], to[3] = a[3], to[4] = b[0], to[5] = b[1], to[6] = b[2], to[7] = b[3];
        };
        load(0);
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
          int (&own)[8] = x[eight & 1];
          const int r = eight % 6, column = (r >> 1) * 48 + (r & 1) * 8;
          auto store = [&](int s, int d, uint32_t a, uint32_t b) {
            const int other = kBlocks == 2 ? eight / 6 : s;
            store_shared2(at + other * (tile::kWeightBytes / 4) + (d < 3 ? column + d * 16 : 144 + r * 8) * 32, a, b);
          };
          if (eight + 1 < kEights) {
            land_copies<4>();
            load(eight + 1);
          }
          // Once the words are read, those of six groups of 8 rows later.
          auto ahead = [&]() {
            if (eight + 6 < kEights) copy_words(eight, from + (eight + 6) * 1024);
            else if (more) copy_words(eight, following + (eight + 6 - kEights) * 1024);
            commit_copies();
          };
          if (!decltype(whole)::value && !(active >> (eight >> 1) & 1)) {  // their words were not written
            ahead();
#pragma unroll
            for (int i = 0; i < 4 * kSlots; ++i) store(i >> 2, i & 3, 0, 0);
            continue;
          }
          const int (&c)[4] = anchor[eight & 1];
          float e[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) e[i] = moved(own[i], c[0], c[1]);
          if constexpr (kSums) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
              const int a = __float2int_rn(moved(own[i], c[2], c[3])), b = __float2int_rn(moved(own[i + 1], c[2], c[3]));
              sum[eight] += static_cast<uint32_t>(a) + static_cast<uint32_t>(b);  // of two terms below 2^31
            }
          }
          ahead();
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
            uint32_t plane[4][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              int y[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) y[i] = __float2int_rn(__fmul_rn(e[k * 4 + i], v[s][k * 4 + i]));
              const uint32_t y0 = byte_permute(y[0], y[1], 0x5140), y1 = byte_permute(y[2], y[3], 0x5140);
              const uint32_t y2 = byte_permute(y[0], y[1], 0x7362), y3 = byte_permute(y[2], y[3], 0x7362);
              plane[0][k] = byte_permute(y0, y1, 0x5410);
              plane[1][k] = byte_permute(y0, y1, 0x7632);
              plane[2][k] = byte_permute(y2, y3, 0x5410);
              plane[3][k] = byte_permute(y2, y3, 0x7632);
            }
#pragma unroll
            for (int d = 0; d < 4; ++d) store(s, d, plane[d][0], plane[d][1]);
          }
        }
      };
      if (active == kAll) make(Constant<1>());
      else make(Constant<0>());
      from = following;
      fence_async_shared();
      land_copies<5>();  // of V's places and the next unit's record
      __syncwarp();
      if (lane_now() == 0) barrier_arrive(full + now.slot() * 8);
      now = now.later(tile::kMakers / 2);
    }
    land_copies<0>();
    if constexpr (kSums) {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        sum[eight] += __shfl_xor_sync(~0u, sum[eight], 1);
        sum[eight] += __shfl_xor_sync(~0u, sum[eight], 16);
        if ((lane & 17) == 0) atomicAdd(&state().sums[eight * 8 + row], sum[eight]);
      }
      announce_threads(kSumsReady, tile::kThreads);
    }
  };
  walk(0, Constant<1>());
  if constexpr (kPasses > 1) walk(1, Constant<0>());
}

template <int D>
__device__ __forceinline__ void tile_kernel(const Params& p, const Tiles& w) {
  using Block = TileBlock<D>;
  typename Block::State& s = Block::state();
  Block b(p, w);
  if (const int tid = thread_now(); tid < tile::kWeightSlots) {
    barrier_init(shared_address(&s.full[tid]), 2);
    barrier_init(shared_address(&s.empty[tid]), 8);
  }
  fence_async_shared();
  __syncthreads();
  if (thread_now() == 0) s.place = 0;
  for (int item = static_cast<int>(blockIdx.x); item < w.tiles * p.n_kv;) {
    if (thread_now() == 0) s.item = item, s.next = atomicAdd(w.next, 1) + static_cast<int>(gridDim.x);
    const bool own = b.start(item);
    __syncthreads();
    if (own) {
      b.digits();
      fence_async_shared();
      __syncthreads();
      b.scores();
      __threadfence_block();
      __syncthreads();
      b.anchors();
      __syncthreads();
      if (s.bad) {
        if (thread_now() == 0) w.flags[b.kept().item] = 1;
      } else {
        if (thread_now() < 256) b.multiply();
        else b.weigh(), b.fetch(b.kept().next);
        __syncthreads();
        if (thread_now() == 0) s.place = (s.place + s.nt * Block::kPasses) % (2 * tile::kWeightSlots);
      }
    }
    item = b.kept().next;
    __syncthreads();
  }
}
#endif

}  // namespace cuda
}  // namespace strata_pa
