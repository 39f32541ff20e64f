// The tiled form of exact with mma.sync, for cards from sm_80.
#include "exact_rows_passes.cuh"

using strata_pa::cuda::Params;
using strata_pa::cuda::Rows;

#ifdef STRATA_PA_SM80
#define STRATA_PA_BODY(...) strata_pa::cuda::__VA_ARGS__
#else
#define STRATA_PA_BODY(...)
#endif

extern "C" __global__ void __launch_bounds__(512) strata_rows_lists(const __grid_constant__ Params p, const __grid_constant__ Rows w) {
  STRATA_PA_BODY(lists_kernel(p, w));
}
extern "C" __global__ void __launch_bounds__(256) strata_rows_cells(const __grid_constant__ Params p, const __grid_constant__ Rows w) {
  STRATA_PA_BODY(cells_kernel(p, w));
}
// 128 of a thread's registers are the planes.
#define STRATA_PA_ROWS(D, G)                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(D / 2 * 3, 256 / D) strata_exact_rows_d##D##_g##G(const __grid_constant__ Params p,                 \
                                                                                                 const __grid_constant__ Rows w) {                 \
    STRATA_PA_BODY(rows_kernel<D, G>(p, w));                                                                                                       \
  }

STRATA_PA_ROWS(64, 32)
STRATA_PA_ROWS(64, 64)
STRATA_PA_ROWS(128, 32)
STRATA_PA_ROWS(128, 64)
STRATA_PA_ROWS(128, 128)
STRATA_PA_ROWS(256, 32)
STRATA_PA_ROWS(256, 64)
STRATA_PA_ROWS(256, 128)
STRATA_PA_ROWS(256, 256)
