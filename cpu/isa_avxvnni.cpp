// The kernels for AVX2 with AVX-VNNI.
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

const Path kAvxVnniPath = {{"avxvnni", "AVX2, FMA, F16C, AVX-VNNI", false}, path_scratch<SimdAvx2<true>>, path_run<SimdAvx2<true>>, path_peak<SimdAvx2<true>>};
}  // namespace strata_pa::cpu
