// The two passes of exact's tiles of rows over an item's cells: scores and anchors, then the sums; and the kernel. See exact_tile_sm80.cuh.
#pragma once
#include "exact_tile_sm80.cuh"

namespace strata_pa {
namespace cuda {

#ifdef STRATA_PA_SM80
template <int D, int G>
__device__ __forceinline__ void RowsBlock<D, G>::scores() {
  const Who me;
  constexpr int kStages = rows::kScoreStages, kAhead = kStages - 1;
  uint32_t a[kHeld][D / 32][4];
  auto digit = [](const Who& me, int d, int k) {
    return shared_address(stages()) + kDigits + d * (kRows * kRowBytes) + (me.tile * 16 + (me.lane & 15)) * kRowBytes + (me.lane >> 4) * 16 + k * 32;
  };
#pragma unroll
  for (int d = 0; d < kHeld; ++d)
#pragma unroll
    for (int k = 0; k < D / 32; ++k) ldmatrix4(a[d][k], digit(me, d, k));
  __syncthreads();
  const uint32_t base = shared_address(stages());
  auto issue = [](int i, uint32_t to, const auto& places) {
    const unsigned char* const record = kept().records + static_cast<uint32_t>(i) * static_cast<uint64_t>(kRecord);
    copy_codes(to, kept().k, places);
    copy_run<kVPlaces>(to + kCodes, record);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (state().begin + i < state().stop) issue(state().begin + i, base + i * kScoreStage, InRecord{state().records + (static_cast<int64_t>(state().begin + i) - kAhead) * kRecord});
    commit_copies();
  }
  float top[2] = {kMinusInf, kMinusInf};
  int raised[2] = {};  // greatest n + level, and what z below has beside n
  uint32_t at = base;
  for (int i = kept().begin; i < kept().stop; ++i) {
    land_copies<kAhead - 1>();
    __syncthreads();
    const unsigned char* const here = stages() + (at - base);
    if (i + kAhead < kept().stop) issue(i + kAhead, at == base ? base + (kStages - 1) * kScoreStage : at - kScoreStage, InStage{at + kCodes});
    commit_copies();
    const bool edge = kept().first_cell + i * 64 < kept().inner_first || kept().first_cell + i * 64 + 63 > kept().inner_last;
#pragma unroll 1
    for (int block = 0; block < 4 / kShare; ++block) {
      const Who now;  // places anew: there are no registers for them
      const int c0 = (now.share * (4 / kShare) + block) * 16, lane = now.lane, row0 = now.tile * 16 + now.g, row1 = row0 + 8;
      float x[2][4];
      const uint32_t codes = at + (c0 + (lane & 7)) * kRowBytes + (lane >> 3) * 16;
      const uint16_t* const ks = reinterpret_cast<const uint16_t*>(here + kCodes + 768) + c0 + (lane & 3) * 2;
      int h[2][4], l[2][4], m[2][4];
      constexpr int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits}, zero[4] = {};
#pragma unroll
      for (int k64 = 0; k64 < D / 64; ++k64) {
        uint32_t b[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) ldmatrix4(b[n], codes + n * 8 * kRowBytes + k64 * 64);
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
          const int k = k64 * 2 + kk, group = k * 32 / G;
          uint32_t last[4];
          if constexpr (kHeld == 2) {
            ldmatrix4(last, digit(now, 2, k));
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
              add_s8s8(h[n], a[0][k], b[n][2 * kk], b[n][2 * kk + 1]);
              add_s8s8(l[n], a[1][k], b[n][2 * kk], b[n][2 * kk + 1]);
              add_s8s8(m[n], last, b[n][2 * kk], b[n][2 * kk + 1]);
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
                const float y = __fmul_rn(join_half_magic(h[n][e], l[n][e] * 256 + m[n][e]), e < 2 ? f0 : f1);
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
        const uint2 mask = *reinterpret_cast<const uint2*>(here + kCodes + 256 + cell * 4);
        const int2 level = *reinterpret_cast<const int2*>(here + kCodes + 512 + cell * 4);
        if (edge) {
          const int number = state().first_cell + i * 64 + cell;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int2 reach = state().reach[row0 + (e >> 1) * 8];
            if (number + (e & 1) < reach.x || number + (e & 1) > reach.y) x[n][e] = kMinusInf;
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool on = ((e & 1 ? mask.y : mask.x) & (e < 2 ? bit0 : bit1)) != 0;
          float y = on ? x[n][e] : kMinusInf;
          top[e >> 1] = fmaxf(top[e >> 1], y);
          y = fmaxf(y, kLowestScore);
          const float z = __fadd_rn(y, kScoreMagic);
          out[e >> 1][n * 2 + (e & 1)] = static_cast<uint32_t>(__float_as_int(add_exponent(A::poly(__fsub_rn(y, __fsub_rn(z, kScoreMagic))), z)));
          raised[e >> 1] = __viaddmax_s32(__float_as_int(z), e & 1 ? level.y : level.x, raised[e >> 1]);
        }
      }
      unsigned char* const to = kept().words + static_cast<uint32_t>(i * rows::kWordBytes + ((c0 >> 4) * 192 + now.tile * 64 + now.lane) * 16);
      __stcg(reinterpret_cast<uint4*>(to), make_uint4(out[0][0], out[0][1], out[0][2], out[0][3]));
      __stcg(reinterpret_cast<uint4*>(to + 512), make_uint4(out[1][0], out[1][1], out[1][2], out[1][3]));
    }
    at = at == base + (kStages - 1) * kScoreStage ? base : at + kScoreStage;
  }
  land_copies<0>();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], o));
      raised[r] = max(raised[r], __shfl_xor_sync(~0u, raised[r], o));
    }
    const int level = raised[r] - kZeroBits;
    if (level > kBadLevel / 2) state().bad = 1;  // also for a cell that no query sees: that costs time alone
    if (me.t == 0 && top[r] != kMinusInf) {
      atomicMax(&state().tops[0][me.tile * 16 + me.g + 8 * r], ordered(top[r]));
      atomicMax(&state().tops[1][me.tile * 16 + me.g + 8 * r], ordered(static_cast<float>(level)));
    }
  }
}

template <int D, int G>
__device__ __forceinline__ void RowsBlock<D, G>::sums(int (&plane)[4][8][4]) {
  constexpr int kStages = kSumStages, kAhead = kStages - 1, kOwn = G < 64 ? 2 : 1;  // groups of a warp
  constexpr int kVScales = kCodes + 256, kWords = kVScales + 128 * kGroups;
  const uint32_t base = shared_address(stages());
  auto issue = [](int i, uint32_t to, const auto& places) {
    const unsigned char* const words = kept().words + static_cast<uint32_t>(i * rows::kWordBytes + thread() * 16);
    const unsigned char* const record = kept().records + static_cast<uint32_t>(i) * static_cast<uint64_t>(kRecord);
    copy_codes(to, kept().v, places);
    copy_run<256 + 128 * kGroups>(to + kCodes, record + kVPlaces);
#pragma unroll
    for (int j = 0; j < rows::kWordBytes; j += kThreads * 16) copy16(to + kWords + j + thread() * 16, words + j);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (state().begin + i < state().stop) issue(state().begin + i, base + i * kSumStage, InRecord{state().records + (static_cast<int64_t>(state().begin + i) - kAhead) * kRecord + kVPlaces});
    commit_copies();
  }
#pragma unroll
  for (int r = 0; r < kSumRows; ++r) state().running[r][slot()] = 0;
  auto anchor_of = [](const Who& me) { return shared_address(&state().anchors[me.tile * 16 + me.g]); };
  auto sum_row = [](const Who& me) { return kShare == 1 ? 0 : me.share & 1; };
  auto sum_block = [](const Who& me) { return kShare == 4 ? me.share & 2 : 0; };
  uint32_t at = base;
  for (int i = kept().begin; i < kept().stop; ++i) {
    land_copies<kAhead - 1>();
    __syncthreads();
    if (i + kAhead < kept().stop) issue(i + kAhead, at == base ? base + (kStages - 1) * kSumStage : at - kSumStage, InStage{at + kCodes});
    commit_copies();
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
      const Who me;
      const uint32_t word = kWords + (me.tile * 64 + me.lane) * 16;
      unsigned long long& sum = state().running[r][slot()];
      unsigned long long more = 0;
      int c[4];
      load_shared4(c, anchor_of(me) + (sum_row(me) + r) * 128);
#pragma unroll
      for (int b = 0; b < kSumBlocks; ++b) {
        int x[4];
        load_shared4(x, at + word + (sum_block(me) + b) * 3072 + (sum_row(me) + r) * 512);
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
        const uint32_t anchor = anchor_of(me), word = kWords + (me.tile * 64 + me.lane) * 16;
        const uint32_t scale = kVScales + me.share * 64 / G * 128 + me.t * 8, code = me.lane * kRowBytes + me.share * 64;
        uint32_t a[4][4];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          uint32_t h0, h1;
          load_shared2(h0, h1, at + scale + own * 128 + (k * 32 + b * 16) * 2);
          const float v[4] = {half_to_float(static_cast<uint16_t>(h0)), half_to_float(static_cast<uint16_t>(h0 >> 16)),
                              half_to_float(static_cast<uint16_t>(h1)), half_to_float(static_cast<uint16_t>(h1 >> 16))};
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            int x[4], add, least;
            load_shared2(add, least, anchor + r * 128);
            load_shared4(x, at + word + (k * 2 + b) * 3072 + r * 512);
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
          ldmatrix4_trans(v, at + code + k * 32 * kRowBytes + c * 16);
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const uint32_t selector = odd ? 0x7531 : 0x6420, b0 = byte_permute(v[0], v[1], selector), b1 = byte_permute(v[2], v[3], selector);
            add_s8s8(plane[3][2 * c + odd], a[3], b0, b1);
#pragma unroll
            for (int d = 0; d < 3; ++d) add_u8s8(plane[d][2 * c + odd], a[d], b0, b1);
          }
        }
      }
    }
    at = at == base + (kStages - 1) * kSumStage ? base : at + kSumStage;
  }
  land_copies<0>();
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
    if (!meet_and_ask(w.flags, item)) {
      b.start(item, unit % w.splits, w.phases == 3 ? blockIdx.x : item - w.first_item);
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
      if (s.bad && tid == 0) leave(w.flags, b.kept().item);
    }
    unit = s.next;
    __syncthreads();
  }
}

#endif

}  // namespace cuda
}  // namespace strata_pa
