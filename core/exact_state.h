// Partial states of `exact` over disjoint sets of cells (docs/numerics.md, section 5): they combine exactly, in any order.
#pragma once
#include <cstdint>

namespace strata_pa {

// Adds the anchors (A, b) of one more set to (A_all, b_all), n rows. NaN in A marks a bad row and stays.
void merge_anchors(int64_t n, float* A_all, float* b_all, const float* A, const float* b);

// Adds n sums. Throws InvalidInput where 64 bits do not hold the result.
void merge_sums(int64_t n, int64_t* all, const int64_t* part);

// Anchors as keys A, B [n] each, and back (core/exact_keys.h).
void anchors_to_keys(int64_t n, const float* A, const float* b, int64_t* keys);
void anchors_from_keys(int64_t n, const int64_t* keys, float* A, float* b);

}  // namespace strata_pa
