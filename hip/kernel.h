// A kernel of `threads` threads by the name `symbol` whose body is called with its parameters.
#pragma once
#include "gpu.h"

#ifdef __AMDGCN__
// The parameters are read where they lie: a copy with its array would be kept in scratch memory.
#define STRATA_PA_KERNEL(symbol, threads, ...)                                                                                   \
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads))) void symbol(const strata_pa::cuda::Params) { \
    __VA_ARGS__(*(const strata_pa::cuda::Params*)__builtin_amdgcn_kernarg_segment_ptr());                                        \
  }
#else
#define STRATA_PA_KERNEL(symbol, threads, ...) \
  extern "C" void symbol(const strata_pa::cuda::Params& p) { __VA_ARGS__(p); }
#endif

// Every head_dim and number of rows.
#define STRATA_PA_EACH_ROWS(F, D) F(D, 4) F(D, 8) F(D, 12) F(D, 16)
#define STRATA_PA_EACH_SHAPE(F) STRATA_PA_EACH_ROWS(F, 64) STRATA_PA_EACH_ROWS(F, 128) STRATA_PA_EACH_ROWS(F, 256)
