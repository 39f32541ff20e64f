// The scalar steps that decide bits, written once for C++, CUDA and HIP: docs/numerics.md, sections 1.1 and 3.
//
// Everything is a template over an operations vocabulary S: one number per call (host, GPU thread) or one SIMD vector (CPU kernels). S has
//   F, I                                   FP32 and int32 values (a scalar or a vector of them)
//   set(float), iset(int)                  constants
//   fma, add, sub, mul, div, rint          one IEEE-754 operation each, to nearest even
//   to_float(I), to_int(F)                 int32 -> FP32 to nearest even; an integral F -> int32
//   as_int(F), as_float(I)                 the bits
//   iadd, isub, shl<k>, sar<k>             int32, wrapping; sar is arithmetic
//   max(F, F); zero_below(F x, F d, float limit)   +0 where d < limit, else x
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#define STRATA_PA_FN __host__ __device__ __forceinline__
#else
#define STRATA_PA_FN inline __attribute__((always_inline))
#endif

namespace strata_pa {

constexpr float kInv127 = 0x1.020408p-7f;
constexpr float kLn2 = 0x1.62e43p-1f;
constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr float kDigitFloor = 0x1p-100f;  // a group whose largest magnitude is below this counts as zero
constexpr int kBiasImma = 32768;          // l signed, m unsigned
constexpr int kBiasExact = 32896;         // l and m signed
constexpr float kBFloor = -60.0f;         // exact: least anchor b
constexpr float kFixedPoint = 30.0f;      // exact: fraction bits of L's and W's terms

template <class S>
struct Arith {
  using F = typename S::F;
  using I = typename S::I;

  // 2^t for |t| <= 1/2.
  static STRATA_PA_FN F poly(F t) {
    F p = S::fma(S::set(0x1.416b50p-13f), t, S::set(0x1.5f082ep-10f));
    p = S::fma(p, t, S::set(0x1.3b2de0p-7f));
    p = S::fma(p, t, S::set(0x1.c6af7cp-5f));
    p = S::fma(p, t, S::set(0x1.ebfbdcp-3f));
    p = S::fma(p, t, S::set(0x1.62e430p-1f));
    return S::fma(p, t, S::set(1.0f));
  }

  // p * 2^d for p in [0.707, 1.4143) and an integral d <= 90; +0 where d < -125, so never a subnormal number.
  static STRATA_PA_FN F shift(F p, F d) {
    I n = S::to_int(S::max(d, S::set(-126.0f)));
    return S::zero_below(S::as_float(S::iadd(S::as_int(p), S::template shl<23>(n))), d, -125.0f);
  }

  static STRATA_PA_FN F exp2(F y) {
    F n = S::rint(S::max(y, S::set(-256.0f)));
    return shift(poly(S::sub(S::max(y, S::set(-256.0f)), n)), n);
  }

  // Positive normal x.
  static STRATA_PA_FN F log2(F x) {
    I b = S::as_int(x);
    I e = S::template sar<23>(S::isub(b, S::iset(0x3f3504f3)));
    F f = S::sub(S::as_float(S::isub(b, S::template shl<23>(e))), S::set(1.0f));
    F z = S::div(f, S::add(f, S::set(2.0f)));
    F w = S::mul(z, z);
    F p = S::fma(S::set(0x1.eb7b8cp-2f), w, S::set(0x1.263288p-1f));
    p = S::fma(p, w, S::set(0x1.ec73e8p-1f));
    p = S::fma(p, w, S::set(0x1.715476p+1f));
    return S::fma(z, p, S::to_float(e));
  }

  // What a group's values are multiplied with before digits() takes them: 127 / mx, or 0 for a group that counts as zero.
  static STRATA_PA_FN F digit_scale(F mx) { return S::zero_below(S::div(S::set(127.0f), mx), mx, kDigitFloor); }

  // X = rint((x * scale) * 65536), an integer of at most 8,323,073.
  static STRATA_PA_FN I fixed(F x, F scale) { return S::to_int(S::rint(S::mul(S::mul(x, scale), S::set(65536.0f)))); }

  // The two parts of X = 65536 h + r.
  static STRATA_PA_FN I high(I X, int bias) { return S::template sar<16>(S::iadd(X, S::iset(bias))); }
  static STRATA_PA_FN I rest(I X, I h) { return S::isub(X, S::template shl<16>(h)); }

  // float(sum of h * code) + float(sum of r * code) * 2^-16 (the product is exact, so fma gives the sum's one rounding).
  static STRATA_PA_FN F join(I sum_h, I sum_r) { return S::fma(S::to_float(sum_r), S::set(0x1p-16f), S::to_float(sum_h)); }

  // The merge of whole results by their lse (docs/numerics.md, section 6): a part's weight, and the merged lse.
  static STRATA_PA_FN F merge_weight(F lse, F top) { return exp2(S::mul(S::sub(lse, top), S::set(static_cast<float>(kLog2E)))); }
  static STRATA_PA_FN F merged_lse(F top, F sum) { return S::fma(log2(sum), S::set(kLn2), top); }

  // lse from the anchor and the sum.
  static STRATA_PA_FN F lse(F anchor, F sum) { return S::mul(S::add(anchor, log2(sum)), S::set(kLn2)); }
};

}  // namespace strata_pa
