#include "core/partial.h"

#include <algorithm>
#include <cmath>

#include "core/cuda_partial.h"
#include "core/errors.h"
#include "core/exact_keys.h"

namespace strata_pa {
namespace {

constexpr int64_t kLanes = 32;  // threads of a row where a warp works on it

void launch(const Memory& memory, const char* symbol, const cuda::PartialParams& params, int64_t threads) {
  cuda::launch_partial(*memory.card, symbol, params, threads, memory.stream);
}

}  // namespace

void exact_finish(const Memory& memory, const Problem& p, const cpu::ExactState& state) {
  if (!memory.card) return cpu::exact_finish(p, state);
  cuda::PartialParams x = {};
  x.rows = p.n_q * p.n_head, x.dim = static_cast<int32_t>(p.head_dim), x.dtype = static_cast<int32_t>(p.dtype);
  x.A = state.A, x.b = state.b, x.L = state.L, x.O = state.O;
  x.out = p.out, x.lse = p.lse;
  launch(memory, "strata_partial_finish", x, x.rows * kLanes);
}

void merge_anchors(const Memory& memory, int64_t n, float* A_all, float* b_all, const float* A, const float* b) {
  if (memory.card) {
    cuda::PartialParams x = {};
    x.rows = n, x.A = A_all, x.b = b_all, x.A2 = A, x.b2 = b;
    return launch(memory, "strata_partial_anchors", x, n);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(A[i]) || std::isnan(A_all[i])) {
      A_all[i] = NAN;
      b_all[i] = kBFloor;
      continue;
    }
    float top = std::max(A_all[i], A[i]), floor = kBFloor;
    if (A_all[i] != -INFINITY) floor = std::max(floor, b_all[i] + (A_all[i] - top));
    if (A[i] != -INFINITY) floor = std::max(floor, b[i] + (A[i] - top));
    A_all[i] = top;
    b_all[i] = floor;
  }
}

void merge_sums(const Memory& memory, int64_t n, int64_t* all, const int64_t* part) {
  if (memory.card) {
    cuda::PartialParams x = {};
    x.rows = n, x.dim = 1, x.O = all, x.L = const_cast<int64_t*>(part);
    return launch(memory, "strata_partial_sums", x, n);
  }
  bool overflow = false;
  for (int64_t i = 0; i < n; ++i) overflow |= __builtin_add_overflow(all[i], part[i], &all[i]);
  if (overflow) throw InvalidInput("the sums do not fit 64 bits: the parts hold more than 2^24 entries of a row");
}

void anchors_to_keys(const Memory& memory, int64_t n, const float* A, const float* b, int64_t* keys) {
  if (memory.card) {
    cuda::PartialParams x = {};
    x.rows = n, x.A = const_cast<float*>(A), x.b = const_cast<float*>(b), x.L = keys;
    return launch(memory, "strata_partial_to_keys", x, n);
  }
  for (int64_t i = 0; i < n; ++i) {
    const AnchorKeys k = to_keys(A[i], b[i]);
    keys[i] = k.A, keys[n + i] = k.B;
  }
}

void anchors_from_keys(const Memory& memory, int64_t n, const int64_t* keys, float* A, float* b) {
  if (memory.card) {
    cuda::PartialParams x = {};
    x.rows = n, x.A = A, x.b = b, x.L = const_cast<int64_t*>(keys);
    return launch(memory, "strata_partial_from_keys", x, n);
  }
  for (int64_t i = 0; i < n; ++i) from_keys({keys[i], keys[n + i]}, A[i], b[i]);
}

void merge_partials(const Memory& memory, int64_t rows, int64_t dim, DType dtype, const std::vector<cpu::Partial>& parts, void* out, float* lse) {
  static_assert(kMostParts == cuda::kMostParts, "");
  if (!memory.card) return cpu::merge_partials(rows, dim, dtype, parts, out, lse);
  cuda::PartialParams x = {};
  x.rows = rows, x.dim = static_cast<int32_t>(dim), x.dtype = static_cast<int32_t>(dtype);
  x.parts = static_cast<int32_t>(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) x.outs[i] = parts[i].out, x.lses[i] = parts[i].lse;
  x.out = out, x.lse = lse;
  launch(memory, "strata_partial_merge", x, rows * kLanes);
}

}  // namespace strata_pa
