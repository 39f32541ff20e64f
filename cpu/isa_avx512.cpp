// The kernels for AVX-512 with VNNI.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "core/arith.h"
#include "core/half.h"
#include "cpu/job.h"

namespace strata_pa::cpu {
namespace {
#include "cpu/simd_scalar.h"
#include "cpu/simd_avx512.h"
#include "cpu/kernels.h"
}  // namespace

const Path kAvx512Path = {{"avx512", "AVX-512 F, BW, VL, DQ, VNNI; FMA, F16C", false}, path_scratch<SimdAvx512>, path_run<SimdAvx512>, path_peak<SimdAvx512>};
}  // namespace strata_pa::cpu
