// Anchors of `exact` as integers whose maxima are the merged anchors (docs/numerics.md, section 5): what an all-reduce can take, and where NaN and -inf
// have their place in the order. Host and device.
#pragma once
#include <cstdint>
#include <cstring>

#include "arith.h"

namespace strata_pa {

struct AnchorKeys {
  int64_t A, B;
};

constexpr int64_t kBadKey = int64_t{1} << 40;      // above every other
constexpr int64_t kEmptyKey = -(int64_t{1} << 40);  // no visible cell: below every other
constexpr int32_t kIntegerBits = 0x4f000000;        // 2^31: up to here A's key is A
constexpr int64_t kKeyStep = 128;                   // beyond, neighbouring numbers are further apart than b's range, -60..16, and so are their keys

STRATA_PA_FN int64_t anchor_key(float A) {
  int32_t bits;
  memcpy(&bits, &A, 4);
  const int32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return kBadKey;
  if (magnitude <= kIntegerBits) return static_cast<int64_t>(A);
  if (magnitude == 0x7f800000 && bits < 0) return kEmptyKey;
  const int64_t key = (int64_t{1} << 31) + (magnitude - kIntegerBits) * kKeyStep;
  return bits < 0 ? -key : key;
}

STRATA_PA_FN AnchorKeys to_keys(float A, float b) {
  const int64_t key = anchor_key(A);
  return {key, key == kBadKey || key == kEmptyKey ? key : key + static_cast<int64_t>(b)};
}

STRATA_PA_FN void from_keys(AnchorKeys keys, float& A, float& b) {
  const int64_t magnitude = keys.A < 0 ? -keys.A : keys.A, base = keys.B - keys.A;
  int32_t bits;
  b = kBFloor;
  if (magnitude == kBadKey) {
    bits = keys.A < 0 ? static_cast<int32_t>(0xff800000) : 0x7fc00000;
  } else {
    if (static_cast<float>(base) > b) b = static_cast<float>(base);
    if (magnitude <= int64_t{1} << 31) {
      A = static_cast<float>(keys.A);
      return;
    }
    bits = kIntegerBits + static_cast<int32_t>((magnitude - (int64_t{1} << 31)) / kKeyStep);
    if (keys.A < 0) bits = static_cast<int32_t>(static_cast<uint32_t>(bits) | 0x80000000u);
  }
  memcpy(&A, &bits, 4);
}

}  // namespace strata_pa
