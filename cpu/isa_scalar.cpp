// The kernels in plain C++, and the last step of `exact` from partial state.
#include <algorithm>
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

const Path kScalarPath = {{"scalar", "nothing", false}, path_scratch<SimdScalar>, path_run<SimdScalar>, nullptr};

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

void merge_partials(int64_t rows, int64_t dim, DType dtype, const std::vector<Partial>& parts, void* out, float* lse) {
  using A = Arith<Scalar1>;
  std::vector<float> x(static_cast<size_t>(dim));
  Problem p;  // as many queries of one head
  p.dtype = dtype, p.q_stride = p.out_stride = dim, p.lse_stride = 1;
  p.out = out, p.lse = lse;
  const Job job{&p, nullptr, 1, static_cast<int>(dim), 0, 0, 0.0f};
  for (int64_t row = 0; row < rows; ++row) {
    float top = -__builtin_inff(), sum = 0.0f;
    bool bad = false;
    for (const Partial& part : parts) {
      bad |= !(part.lse[row] < __builtin_inff());
      top = Scalar1::max(top, part.lse[row]);
    }
    std::fill(x.begin(), x.end(), 0.0f);
    for (const Partial& part : parts) {
      const float w = bad || top == -__builtin_inff() ? 0.0f : A::merge_weight(part.lse[row], top);
      sum = sum + w;
      if (w == 0.0f) continue;
      p.q = part.out;
      for (int d = 0; d < job.dim; ++d) x[static_cast<size_t>(d)] = Scalar1::fma(w, load_q(p, row, 0, d), x[static_cast<size_t>(d)]);
    }
    for (float& value : x) value = value / sum;
    store_row(job, Tile{}, row, x.data(), A::merged_lse(top, sum), top == -__builtin_inff() && !bad, bad);
  }
}

}  // namespace strata_pa::cpu
