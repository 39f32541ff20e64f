// exact's tiles on sm_90 where items are few or long: an item's cells are split over blocks. One launch makes all scores of a round of items, and of
// each item the maxima that its anchors come from; another one adds up its sums, as integers; the last block of an item to be done writes it out.
#pragma once
#include "exact_tile_sums.cuh"

namespace strata_pa {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What the sums of the next launch are added to: this block's share.
template <int D, bool kSplit>
__device__ __forceinline__ void TileBlock<D, kSplit>::clear(int item) const {
  const int split = static_cast<int>(blockIdx.x) % w.splits;
  const int64_t nth = item - w.first_item;
  auto* const outs = reinterpret_cast<uint4*>(w.outs + nth * (kRows * D));
  for (int i = split * kThreads + thread_now(); i < kRows * D / 2; i += w.splits * kThreads) outs[i] = make_uint4(0, 0, 0, 0);
  if (split > 0) return;
  if (thread_now() < kRows) w.sums[nth * kRows + thread_now()] = 0;
  if (thread_now() == 0) w.done[nth] = 0;
}

// After all that a block has added; the block meets.
template <int D, bool kSplit>
__device__ __forceinline__ void TileBlock<D, kSplit>::finish() {
  __threadfence();
  __syncthreads();
  if (thread_now() == 0) state().next = atomicAdd(w.done + nth(), 1) == w.splits - 1;
  __syncthreads();
  if (!state().next) return;
  __threadfence();
  with_dtype(p, [&](auto dtype) {
#pragma unroll
    for (int i = thread_now(); i < kGroups * 12 * 128; i += kThreads) {  // as multiply() has them
      const int group = i / (12 * 128), part = (i >> 7) % 12, thread = group * 128 + (i & 127), row = (part >> 1) * 8 + (thread & 3) * 2 + (part & 1);
      const int64_t to = state().out_at[row];
      if (to == kNowhere) continue;
      const unsigned long long* const from = outs_of(thread, 0) + part * 256;
      const float total = __ll2float_rn(static_cast<long long>(__ldcg(all_sums() + row))), unit = state().units[row];
      const float out[2] = {quotient(static_cast<int64_t>(__ldcg(from)), total, unit), quotient(static_cast<int64_t>(__ldcg(from + 128)), total, unit)};
      store_out2<decltype(dtype)::value>(p, to + dim_of(thread, 0), out);
    }
  });
  if (const int row = thread_now(); row < kRows) store_lse(row, __ldcg(all_sums() + row));
}

template <int D>
__device__ __forceinline__ void scores_kernel(const Params& p, const Tiles& w) {
  using Block = TileBlock<D, true>;
  typename Block::State& s = Block::state();
  Block b(p, w);
  const int item = w.first_item + static_cast<int>(blockIdx.x) / w.splits;
  b.clear(item);
  b.start(item);
  if (meet_and_ask(w.flags, item)) return;
  if (s.nt == 0 && blockIdx.x % w.splits > 0) return;  // the item's first block looks at q, whatever it has of cells
  b.begin_scores();
  b.digits();
  fence_async_shared();
  __syncthreads();
  b.scores();
  __syncthreads();
  if (const int row = thread_now(); row < Block::kRows) {
    const int2 top = Block::top_of(row);
    atomicMax(b.all_tops() + row, static_cast<uint32_t>(top.x));
    atomicMax(b.all_tops() + Block::kRows + row, static_cast<uint32_t>(top.y));
    if (row == 0 && s.bad) leave(w.flags, item);
  }
}

template <int D>
__device__ __forceinline__ void sums_kernel(const Params& p, const Tiles& w) {
  using Block = TileBlock<D, true>;
  typename Block::State& s = Block::state();
  Block b(p, w);
  b.init_barriers();
  b.start(w.first_item + static_cast<int>(blockIdx.x) / w.splits);
  if (meet_and_ask(w.flags, w.first_item + static_cast<int>(blockIdx.x) / w.splits)) return;
  b.sums();
  if (!s.bad) return b.finish();
  if (thread_now() == 0) leave(w.flags, s.item);
}
#endif

}  // namespace cuda
}  // namespace strata_pa
