// Compares divide_ordinary and Arith's division with the correctly rounded one, for every mantissa of the divisor.
#include "../../cuda/ops.cuh"

using namespace strata_pa::cuda;

// Block b: exponent b - 100 of the divisor. counts[0]: divide_ordinary, [1]: GpuOps::div (by more than 2^65: 127 alone).
extern "C" __global__ void strata_divide(float a, unsigned long long* counts) {
  const int exponent = static_cast<int>(blockIdx.x) - 100;
  for (int m = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x); m < 1 << 23; m += static_cast<int>(gridDim.y * blockDim.x)) {
    const float b = __int_as_float((exponent + 127) << 23 | m), want = __fdiv_rn(a, b);
    if (exponent <= 64 && __float_as_int(divide_ordinary(a, b)) != __float_as_int(want)) atomicAdd(counts, 1ull);
    if ((exponent <= 64 || a >= 100.0f) && __float_as_int(GpuOps::div(a, b)) != __float_as_int(want)) atomicAdd(counts + 1, 1ull);
  }
}
