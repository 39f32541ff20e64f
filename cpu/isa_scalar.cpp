// The kernels in plain C++.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/arith.h"
#include "cpu/job.h"

namespace strata_pa::cpu {
namespace {
#include "cpu/simd_scalar.h"
#include "cpu/kernels.h"
}  // namespace

const Path kScalarPath = {{"scalar", "nothing", false}, path_scratch<SimdScalar>, path_run<SimdScalar>};
}  // namespace strata_pa::cpu
