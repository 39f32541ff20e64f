// v2, the default from sm_80 on: FP16 MMA m16n8k16 with q and p as hi + lo, cells through cp.async.
#include "split.cuh"

using namespace strata_pa::cuda;

extern "C" __global__ void __launch_bounds__(128, kV2Blocks) strata_v2_d256_g64(const __grid_constant__ Params p) {
#ifdef STRATA_PA_SM80
  split_kernel<MmaK16, TileCopyAsync<PaddedTile>>(p);
#endif
}
