// What the shared kernels say in PTX. hip/gpu.h has the same names for AMD.
#pragma once
#include <cstdint>

namespace strata_pa {
namespace cuda {

// a / b, correctly rounded, without the slow path of the general division (a call, for which every register would be saved): for
// quotients and reciprocals far from overflow and underflow.
__device__ __forceinline__ float divide_ordinary(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  float q = __fmul_rn(a, y);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

__device__ __forceinline__ float half_to_float(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ uint16_t float_to_half(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

__device__ __forceinline__ int64_t sum_of_wide_products(int a, int b, int c, int d) {
  int64_t r;
  asm("mul.wide.s32 %0, %1, %2;\n\tmad.wide.s32 %0, %3, %4, %0;" : "=&l"(r) : "r"(a), "r"(b), "r"(c), "r"(d));
  return r;
}

}  // namespace cuda
}  // namespace strata_pa
