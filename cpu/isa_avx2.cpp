// The kernels for AVX2.
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
#include "cpu/simd_avx2.h"
#include "cpu/kernels.h"
}  // namespace

const Path kAvx2Path = {{"avx2", "AVX2, FMA, F16C", false}, path_scratch<SimdAvx2<false>>, path_run<SimdAvx2<false>>, nullptr};
}  // namespace strata_pa::cpu
