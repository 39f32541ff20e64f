// The partial steps of exact: anchors, or sums under given anchors, of the cells that are here.
#include "exact_plain.cuh"

using strata_pa::cuda::ExactPart;
using strata_pa::cuda::Params;

#ifdef STRATA_PA_SM80
#define STRATA_PA_BODY(D, G) strata_pa::cuda::exact_kernel<D, G, true>(p, part)
#else
#define STRATA_PA_BODY(D, G)
#endif
#define STRATA_PA_EXACT_PART(D, G)                                                        \
  extern "C" __global__ void __launch_bounds__(D / 2, 512 / D) strata_exact_part_d##D##_g##G( \
      const __grid_constant__ Params p, const __grid_constant__ ExactPart part) {         \
    STRATA_PA_BODY(D, G);                                                                 \
  }

STRATA_PA_EXACT_PART(64, 32)
STRATA_PA_EXACT_PART(64, 64)
STRATA_PA_EXACT_PART(128, 32)
STRATA_PA_EXACT_PART(128, 64)
STRATA_PA_EXACT_PART(128, 128)
STRATA_PA_EXACT_PART(256, 32)
STRATA_PA_EXACT_PART(256, 64)
STRATA_PA_EXACT_PART(256, 128)
STRATA_PA_EXACT_PART(256, 256)
