// The tiled form of exact with sm_90's own instructions. See tile_launch.h.
#include "exact_tile_split.cuh"

using strata_pa::cuda::Params;
using strata_pa::cuda::Tiles;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STRATA_PA_BODY(...) strata_pa::cuda::__VA_ARGS__
namespace strata_pa {
namespace cuda {
// The items that the kernels before have flagged, query by query in the plain form.
template <int D>
__device__ __forceinline__ void rest_kernel(const Params& p, const Tiles& w) {
  __shared__ int next;  // of all queries of all items; in registers the loop would cost the sums some of theirs
  if (threadIdx.x == 0) next = static_cast<int>(blockIdx.x) * w.queries;
  while (true) {
    __syncthreads();
    const int j = next, item = j / w.queries, nth = j % w.queries, index = first_query_of(p, w, item) + nth;
    if (item >= w.tiles * p.n_kv) return;
    const bool left = w.flags[item] != 0;
    __syncthreads();
    if (threadIdx.x == 0) next = left && nth + 1 < w.queries ? j + 1 : (item + static_cast<int>(gridDim.x)) * w.queries;
    if (left && index < p.n_q) exact_kernel<D, 64>(p, {}, (p.n_q - 1 - index) * p.n_kv + item % p.n_kv);
  }
}
}  // namespace cuda
}  // namespace strata_pa
#else
#define STRATA_PA_BODY(...)
#endif

#define STRATA_PA_UNION(bits, size)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(512, 2) strata_tile_union##bits(const __grid_constant__ Params p, const __grid_constant__ Tiles w) { \
    STRATA_PA_BODY(union_kernel<size>(p, w));                                                                                                     \
  }

STRATA_PA_UNION(8, 0)
STRATA_PA_UNION(16, 1)
STRATA_PA_UNION(32, 2)
extern "C" __global__ void __launch_bounds__(256, 8) strata_tile_cells(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(cells_kernel(p, w));
}
#define STRATA_PA_TILE(D)                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(strata_pa::cuda::tile::threads(D), strata_pa::cuda::tile::resident(D))                       \
      strata_exact_tile_d##D##_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {                                          \
    STRATA_PA_BODY(tile_kernel<D>(p, w));                                                                                                        \
  }                                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(strata_pa::cuda::tile::threads(D), strata_pa::cuda::tile::resident(D))                       \
      strata_exact_tile_scores_d##D##_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {                                   \
    STRATA_PA_BODY(scores_kernel<D>(p, w));                                                                                                      \
  }                                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(strata_pa::cuda::tile::threads(D), strata_pa::cuda::tile::resident(D))                       \
      strata_exact_tile_sums_d##D##_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {                                     \
    STRATA_PA_BODY(sums_kernel<D>(p, w));                                                                                                        \
  }                                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(D / 2, 512 / D) strata_exact_rest_d##D##_g64(const __grid_constant__ Params p,                 \
                                                                                                const __grid_constant__ Tiles w) {               \
    STRATA_PA_BODY(rest_kernel<D>(p, w));                                                                                                        \
  }

STRATA_PA_TILE(64)
STRATA_PA_TILE(128)
STRATA_PA_TILE(256)
