// The kernels in plain C++, and the last step of `exact` from partial state.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/arith.h"
#include "core/half.h"
#include "cpu/job.h"

namespace strata_pa::cpu {
namespace {
#include "cpu/simd_scalar.h"
#include "cpu/kernels.h"
}  // namespace

const Path kScalarPath = {{"scalar", "nothing", false}, path_scratch<SimdScalar>, path_run<SimdScalar>};

void exact_finish(const Problem& p, const ExactState& state) {
  std::vector<float> x(static_cast<size_t>(p.head_dim));
  const Job job{&p, nullptr, static_cast<int>(p.n_head), static_cast<int>(p.head_dim), 0, 0, 0.0f};
  for (int64_t q = 0; q < p.n_q; ++q) {
    Tile t{};
    t.q0 = q;
    for (int64_t h = 0; h < p.n_head; ++h) {  // as one tile of n_head rows
      const int64_t row = q * p.n_head + h;
      const float A = state.A[row];
      const float lse = exact_row(state.O + row * p.head_dim, state.L[row], A, state.b[row], job.dim, x.data());
      store_row(job, t, h, x.data(), lse, A == -HUGE_VALF, A != A);
    }
  }
}

}  // namespace strata_pa::cpu
