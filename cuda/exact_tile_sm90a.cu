// The tiled form of exact with sm_90's own instructions. See tile_launch.h.
#include "exact_tile_sums.cuh"

using strata_pa::cuda::Params;
using strata_pa::cuda::Tiles;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STRATA_PA_BODY(...) strata_pa::cuda::__VA_ARGS__
namespace strata_pa {
namespace cuda {
// The items that the kernels before have flagged, query by query in the plain form. The grid is a multiple of n_kv.
template <int D>
__device__ __forceinline__ void rest_kernel(const Params& p, const Tiles& w) {
  __shared__ Params own;
  const int b = static_cast<int>(blockIdx.x), items = w.tiles * p.n_kv;
  bool copied = false;
  for (int item = b; item < items; item += static_cast<int>(gridDim.x)) {
    if (w.flags[item] == 0) continue;
    if (!copied)
      for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(Params) / 4); i += D / 2)
        reinterpret_cast<uint32_t*>(&own)[i] = reinterpret_cast<const uint32_t*>(&p)[i];
    copied = true;
    const int first = (w.tiles - 1 - item / p.n_kv) * w.queries;
    for (int index = first; index < min(first + w.queries, p.n_q); ++index) {
      __syncthreads();
      if (threadIdx.x == 0) own.n_q = index + 1 + b / p.n_kv;  // so that block b's query is this one
      __syncthreads();
      exact_kernel<D, 64>(own);
    }
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
  extern "C" __global__ void __launch_bounds__(512, 1) strata_exact_tile_d##D##_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) { \
    STRATA_PA_BODY(tile_kernel<D>(p, w));                                                                                                        \
  }                                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(D / 2, 256 / D * 2) strata_exact_rest_d##D##_g64(const __grid_constant__ Params p,                 \
                                                                                                const __grid_constant__ Tiles w) {               \
    STRATA_PA_BODY(rest_kernel<D>(p, w));                                                                                                        \
  }

STRATA_PA_TILE(64)
STRATA_PA_TILE(128)
STRATA_PA_TILE(256)
