// v1, the default of sm_75: v2's split on FP16 MMA m16n8k8, cells through registers.
#include "split.cuh"

using namespace strata_pa::cuda;

extern "C" __global__ void __launch_bounds__(128, 2) strata_v1_d256_g64(const __grid_constant__ Params p) { split_kernel<MmaK8, TileCopyRegisters<PaddedTile>>(p); }
