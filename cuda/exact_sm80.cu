// The plain form of exact: one query per block. Behind a tiled form it answers the items that are flagged, and no other.
#include "exact_plain.cuh"
#include "exact_rows_cells.cuh"

using strata_pa::cuda::Params;
using strata_pa::cuda::Rows;

#ifdef STRATA_PA_SM80
#define STRATA_PA_BODY(D, G) \
  if (w.flags == nullptr || strata_pa::cuda::flagged(p, w)) strata_pa::cuda::exact_kernel<D, G>(p)
#else
#define STRATA_PA_BODY(D, G)
#endif
// 128 of a thread's registers are the planes.
#define STRATA_PA_EXACT(D, G) \
  extern "C" __global__ void __launch_bounds__(D / 2, 512 / D)                                                       \
      strata_exact_d##D##_g##G(const __grid_constant__ Params p, const __grid_constant__ Rows w) {                   \
    STRATA_PA_BODY(D, G);                                                                                            \
  }

STRATA_PA_EXACT(64, 32)
STRATA_PA_EXACT(64, 64)
STRATA_PA_EXACT(128, 32)
STRATA_PA_EXACT(128, 64)
STRATA_PA_EXACT(128, 128)
STRATA_PA_EXACT(256, 32)
STRATA_PA_EXACT(256, 64)
STRATA_PA_EXACT(256, 128)
STRATA_PA_EXACT(256, 256)
