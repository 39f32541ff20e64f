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

// Where the weights of the block's tile number i lie, and the parity of that use of the slot. A half of a slot is always made by the same warp: otherwise a
// warp that is far ahead of another could take the parity of a use for that of two uses before.
struct WeightSlot {
  int i;
  __device__ __forceinline__ int slot() const { return i & (tile::kWeightSlots - 1); }
  __device__ __forceinline__ uint32_t parity() const { return static_cast<uint32_t>(i) / tile::kWeightSlots & 1; }
};
static_assert((tile::kWeightSlots & (tile::kWeightSlots - 1)) == 0 && 2 * tile::kWeightSlots % tile::kMakers == 0, "");

template <int D>
__device__ __forceinline__ void TileBlock<D>::multiply() {
  constexpr int kHalfWeights = tile::kWeightBytes / 2;  // of 32 cells
  const uint32_t base = shared_address(raw_tile);
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    // Registers are short: what can be found anew is, and a register counts for several things.
    const int values = kValues + (thread_now() >> 7) * (tile::kValueSlots * tile::kValueBytes);
    const int own = (thread_now() & 127) >> 2, part = thread_now() & 3;  // this thread copies 16 bytes of cells 2 own and 2 own + 1
    const uint32_t copied = base + values + own * 128 + (part ^ (own & 3)) * 16;
    const uint32_t read = base + values + (thread_now() & 31) * 64 + ((thread_now() >> 5 ^ thread_now() >> 1) & 3) * 16;
    WeightSlot now{kept().place + pass * kept().nt};
    const int end = now.i + kept().nt;
    // The places of a tile's cells are on their way, then its codes, two tiles before its products.
    int place_at = tile::kVPlaces + own * 8;
    auto v_places = [&](int i) {
      const uint2 at = i < end ? __ldg(reinterpret_cast<const uint2*>(kept().records + place_at)) : make_uint2(0, 0);
      place_at += tile::kRecordBytes;
      return at;
    };
    auto copy = [&](int i, int slot, uint2 at) {
      if (i < end) {
        const int8_t* const from = kept().v + slot_of(thread_now(), pass) * 64 + (thread_now() & 3) * 16;
        copy16(copied + slot, from + static_cast<uint64_t>(at.x) * 16);
        copy16(copied + slot + 64, from + static_cast<uint64_t>(at.y) * 16);
      }
      commit_copies();
    };
    uint2 next = v_places(now.i);
    copy(now.i, 0, next);
    next = v_places(now.i + 1);
    copy(now.i + 1, tile::kValueBytes, next);
    next = v_places(now.i + 2);
    int low[72], high[24];
#pragma unroll
    for (int u = 0; u < 72; ++u) low[u] = 0;
#pragma unroll
    for (int u = 0; u < 24; ++u) high[u] = 0;
    uint32_t a[4];
    int slot = 0;  // of V
#pragma unroll 1
    for (; now.i < end; ++now.i) {
      land_copies<1>();
      join_warpgroup(thread_now() >> 7);  // all have what they copied, and are done with the tile before
      copy(now.i + 2, slot ? slot - tile::kValueBytes : 2 * tile::kValueBytes, next);
      next = v_places(now.i + 3);
      uint32_t x[4];
      ldmatrix4_trans(x, read + slot);
      barrier_wait(shared_address(state().full) + now.slot() * 8, now.parity());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wait_products<0>();  // what lies between is the other warpgroup's time
        still_read(a);
        if (half == 0 && lane_now() == 0 && now.i != kept().place + pass * kept().nt)
          barrier_arrive(shared_address(state().empty) + WeightSlot{now.i - 1}.slot() * 8);
        a[0] = byte_permute(x[0], x[1], 0x6420), a[1] = byte_permute(x[0], x[1], 0x7531);  // even dims, odd dims
        a[2] = byte_permute(x[2], x[3], 0x6420), a[3] = byte_permute(x[2], x[3], 0x7531);
        const uint32_t b = __shfl_sync(~0u, place_of_matrix(base + now.slot() * tile::kWeightBytes + (thread_now() >> 7) * (kHalfWeights / 2)), 0) + half * (kHalfWeights / 16);
        wgmma_fence();
        wgmma_rs_s8u8(low, a, narrow_matrix(b), 1);
        wgmma_rs(high, a, narrow_matrix(b + 144 * 32 / 16), 1);
        wgmma_commit();
        if (half == 0) ldmatrix4_trans(x, read + slot + 32 * 64);
      }
      slot = slot == 2 * tile::kValueBytes ? 0 : slot + tile::kValueBytes;
    }
    wait_for<0>(low);
    wait_for<0>(high);
    still_read(a);
    if (kept().nt && lane_now() == 0) barrier_arrive(shared_address(state().empty) + WeightSlot{now.i - 1}.slot() * 8);
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
  constexpr int kSlots = 2 / kBlocks, kEights = 6 * kBlocks, kAhead = 4 - kBlocks;  // groups of dims, of 8 rows; words are loaded this many of the latter ahead
  const int lane = lane_now(), maker = (thread_now() >> 5) - 8, units = 2 * kept().nt;  // of 32 cells
  const unsigned char* const records = kept().records;
  const int row = lane >> 1 & 7;  // of 8: this thread's; of the unit's cells it has 8: of 16 the first or second half
  const uint32_t full = shared_address(state().full), empty = shared_address(state().empty);
  // Where this thread's anchors and weights begin. At head_dim 64 they are found anew: a register each that is not there.
  auto place_of_anchors = [](int lane) { return shared_address(&state().anchors[lane >> 1 & 7]); };
  auto place_of_weights = [maker](int lane) {
    return shared_address(raw_tile) + (maker & 1) * (tile::kWeightBytes / 2) + (lane >> 1 & 7) * 32 + ((lane >> 4 ^ lane >> 3) & 1) * 16 + (lane & 1) * 8;
  };
  const uint32_t anchors = place_of_anchors(lane), weights = place_of_weights(lane);
  // x + add, at least `least`: the bits of a number.
  auto moved = [](int x, int add, int least) { return __int_as_float(__viaddmax_s32(x, add, least)); };
  auto walk = [&](int pass, auto with_sums) {
    constexpr bool kSums = decltype(with_sums)::value;
    unsigned long long sum[kSums ? kEights : 1] = {};
    const int begin = 2 * kept().place + pass * units, first = (maker - begin) & (tile::kMakers - 1);
    const unsigned char* from = words() + first * kUnitBytes + lane * 16;
    const unsigned char* record = records + (first >> 1) * tile::kRecordBytes + tile::kMasks;
    auto scales_of = [&](int s) {
      const int at = tile::kVScales - tile::kMasks + (pass * 2 + s) * 128 + (maker & 1) * 64 + (lane_now() >> 4) * 32 + (lane_now() & 1) * 16;
      return __ldg(reinterpret_cast<const uint4*>(record + at));
    };
    auto mask_of = [&]() { return __ldg(reinterpret_cast<const uint32_t*>(record + (maker & 1) * 128 + lane_now() * 4)); };
    uint32_t mask = 0;
    int x[kAhead][8] = {};  // set in any case: else they would be kept from one item to the next
    uint4 h[kSlots] = {};
    auto load = [](int (&x)[8], const unsigned char* at) {
      const int4 a = __ldcg(reinterpret_cast<const int4*>(at)), b = __ldcg(reinterpret_cast<const int4*>(at + 512));
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    };
    if (first < units) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(x[i], from + i * 1024);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) h[s] = scales_of(s);
      mask = mask_of();
    }
    WeightSlot now{(begin + first) >> 1};
#pragma unroll 1
    for (int u = first; u < units; u += tile::kMakers) {
      const bool more = u + tile::kMakers < units;
      const unsigned char* const following = more ? from + tile::kMakers * kUnitBytes : from;
      float v[kSlots][8];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const uint32_t pairs[4] = {h[s].x, h[s].y, h[s].z, h[s].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[s][i] = half_to_float(static_cast<uint16_t>(pairs[i >> 1] >> (i & 1) * 16));
      }
      constexpr uint32_t kAll = (1u << 3 * kBlocks) - 1;
      uint32_t active = kAll;  // a bit for 16 rows that see one of the cells
      if (p.ids) active = active_rows(mask, 0) | (kBlocks == 2 ? active_rows(mask, 1) << 3 : 0);
      record += more ? tile::kMakers / 2 * tile::kRecordBytes : 0;
      mask = mask_of();
#pragma unroll
      for (int s = 0; s < kSlots; ++s) h[s] = scales_of(s);
      barrier_wait(empty + now.slot() * 8, now.parity() ^ 1);
      const uint32_t at = (kBlocks == 2 ? place_of_weights(lane_now()) : weights) + now.slot() * tile::kWeightBytes;
      auto make = [&](auto whole) {
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
          int (&own)[8] = x[eight % kAhead];
          const unsigned char* const ahead = eight + kAhead < kEights ? from + (eight + kAhead) * 1024 : following + (eight + kAhead - kEights) * 1024;
          const int r = eight % 6, column = (r >> 1) * 48 + (r & 1) * 8;
          auto store = [&](int s, int d, uint32_t a, uint32_t b) {
            const int other = kBlocks == 2 ? eight / 6 : s;
            store_shared2(at + other * (tile::kWeightBytes / 4) + (d < 3 ? column + d * 16 : 144 + r * 8) * 32, a, b);
          };
          if (!decltype(whole)::value && !(active >> (eight >> 1) & 1)) {  // their words were not written
            load(own, ahead);
#pragma unroll
            for (int i = 0; i < 4 * kSlots; ++i) store(i >> 2, i & 3, 0, 0);
            continue;
          }
          int c[4];
          load_shared4(c, (kBlocks == 2 ? place_of_anchors(lane_now()) : anchors) + eight * (8 * 16));
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
          load(own, ahead);
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
      if (kBlocks == 1 && active == kAll) make(Constant<1>());  // of 96 rows in one piece it takes registers that are not there
      else make(Constant<0>());
      from = following;
      fence_async_shared();
      __syncwarp();
      if (lane_now() == 0) barrier_arrive(full + now.slot() * 8);
      now.i += tile::kMakers / 2;
    }
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
        else b.weigh();
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
