// Work on partial results (docs/numerics.md, sections 5 and 6), in host memory or on a card.
#pragma once
#include <cstdint>
#include <vector>

#include "core/cuda_device.h"
#include "core/problem.h"
#include "cpu/cpu.h"

namespace strata_pa {

// Where the arrays lie. On a card the work is enqueued on the stream: no allocation, no synchronisation.
struct Memory {
  cuda::Card* card = nullptr;  // null: host memory
  Handle stream = nullptr;
};

// From state (A, b, L, O) to p.out and p.lse, which are C-contiguous.
void exact_finish(const Memory& memory, const Problem& p, const cpu::ExactState& state);

// Adds the anchors (A, b) of one more set to (A_all, b_all), n rows. NaN in A marks a bad row and stays.
void merge_anchors(const Memory& memory, int64_t n, float* A_all, float* b_all, const float* A, const float* b);

// Adds n sums. In host memory throws InvalidInput where 64 bits do not hold the result.
void merge_sums(const Memory& memory, int64_t n, int64_t* all, const int64_t* part);

// Anchors as keys A, B [n] each, and back (core/exact_keys.h).
void anchors_to_keys(const Memory& memory, int64_t n, const float* A, const float* b, int64_t* keys);
void anchors_from_keys(const Memory& memory, int64_t n, const int64_t* keys, float* A, float* b);

// Whole results, merged by their lse in the order given; out may be one of the parts' own.
constexpr int kMostParts = 64;
void merge_partials(const Memory& memory, int64_t rows, int64_t dim, DType dtype, const std::vector<cpu::Partial>& parts, void* out, float* lse);

}  // namespace strata_pa
