#include "core/exact_state.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "core/exact_keys.h"

namespace strata_pa {

void merge_anchors(int64_t n, float* A_all, float* b_all, const float* A, const float* b) {
  constexpr float kFloor = -60.0f;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(A[i]) || std::isnan(A_all[i])) {
      A_all[i] = NAN;
      b_all[i] = kFloor;
      continue;
    }
    float top = std::max(A_all[i], A[i]), floor = kFloor;
    if (A_all[i] != -INFINITY) floor = std::max(floor, b_all[i] + (A_all[i] - top));
    if (A[i] != -INFINITY) floor = std::max(floor, b[i] + (A[i] - top));
    A_all[i] = top;
    b_all[i] = floor;
  }
}

void merge_sums(int64_t n, int64_t* all, const int64_t* part) {
  bool overflow = false;
  for (int64_t i = 0; i < n; ++i) overflow |= __builtin_add_overflow(all[i], part[i], &all[i]);
  if (overflow) throw InvalidInput("the sums do not fit 64 bits: the parts hold more than 2^24 entries of a row");
}

void anchors_to_keys(int64_t n, const float* A, const float* b, int64_t* keys) {
  for (int64_t i = 0; i < n; ++i) {
    const AnchorKeys k = to_keys(A[i], b[i]);
    keys[i] = k.A, keys[n + i] = k.B;
  }
}

void anchors_from_keys(int64_t n, const int64_t* keys, float* A, float* b) {
  for (int64_t i = 0; i < n; ++i) from_keys({keys[i], keys[n + i]}, A[i], b[i]);
}

}  // namespace strata_pa
