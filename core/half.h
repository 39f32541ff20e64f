// binary16 and bfloat16 on the host, without compiler or CPU support for them. `static`: the instruction-set paths of cpu/ include this, and code compiled
// for one must not be linked into another.
#pragma once
#include <cstdint>
#include <cstring>

namespace strata_pa {

[[maybe_unused]] static inline float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
[[maybe_unused]] static inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline constexpr float kHalfOverflow = 65520.0f;  // the least number that rounds to a binary16 infinity

[[maybe_unused]] static inline float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  float x = float_from_bits(rest << 13) * 0x1p112f;  // moves the exponent's bias; exact, subnormals too
  return float_from_bits(sign | bits_of_float(x));
}

[[maybe_unused]] static inline float bfloat16_to_float(uint16_t b) { return float_from_bits(static_cast<uint32_t>(b) << 16); }

// To nearest, ties to even; NaN to 0x7e00.
[[maybe_unused]] static inline uint16_t float_to_half(float x) {
  uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return 0x7e00;
  if (float_from_bits(rest) >= kHalfOverflow) return static_cast<uint16_t>(sign | 0x7c00);
  if (rest < 0x38800000) {  // below 2^-14: in units of 2^-24, which FP32's own addition rounds to
    uint32_t units = bits_of_float(float_from_bits(rest) + 0.5f) - bits_of_float(0.5f);
    return static_cast<uint16_t>(sign | units);
  }
  rest += 0xfff + (rest >> 13 & 1);  // half of the last binary16 digit, less where that digit is even
  return static_cast<uint16_t>(sign | (rest - 0x38000000) >> 13);
}

// To nearest, ties to even; NaN to 0x7fc0.
[[maybe_unused]] static inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace strata_pa
