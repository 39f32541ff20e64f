// Error against float64 and time of every kernel that the device has.
//
//     strata_pa_parity [--device cpu | cuda[:N] | hip[:N]] [context] [queries] [reps]
//
// The queries are the last ones of the context; each selects 2,051 cells at most, its 512 most recent ones among them. As many queries as
// cells, which is the default where a context is given: dense, causal. Without numbers: three shapes. Exit status 1: a bound is broken.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "golden.h"

namespace {

constexpr int kHeads = GOLDEN_HEADS, kKvHeads = GOLDEN_KV_HEADS, kRows = kHeads / kKvHeads, kDim = GOLDEN_DIM, kGroup = GOLDEN_GROUP;
constexpr int kPageSize = 4, kSampled = 32;

// The greatest max|out - float64| / max|float64|: what is promised of the portable kernels; of the others, that a defect shows.
double bound_of(const strata_pa_kernel_info& kernel) { return kernel.portable ? 1.0e-6 : 2.0e-6; }

struct Shape {
  int64_t context, queries;
};

double from_half(uint16_t h) { return std::ldexp(1024 + (h & 1023), (h >> 10) - 25); }  // normal and positive, as all scales here

// float64 attention of one query.
std::vector<double> reference(const golden& g, bool dense, int64_t query) {
  const int64_t visible = g.context - g.n_q + query + 1, cells = dense ? visible : g.widths[query];
  std::vector<double> out(size_t{kHeads} * kDim), scores(static_cast<size_t>(kRows * cells)), weights(kRows);
  for (int h = 0; h < kKvHeads; ++h) {
    auto row_of = [&](int64_t e) {
      const int64_t cell = dense ? e : g.ids[query * g.cap + e];
      return (int64_t{g.page_table[cell / g.page_size]} * kKvHeads + h) * g.page_size + cell % g.page_size;
    };
    const float* q = g.q + (query * kHeads + h * kRows) * kDim;
    double key[kDim];
    std::vector<double> top(kRows, -std::numeric_limits<double>::infinity());
    for (int64_t e = 0; e < cells; ++e) {
      const int64_t row = row_of(e);
      for (int d = 0; d < kDim; ++d) key[d] = g.k[row * kDim + d] * from_half(g.k_scale[row * (kDim / kGroup) + d / kGroup]);
      for (int r = 0; r < kRows; ++r) {
        double s = 0;
        for (int d = 0; d < kDim; ++d) s += q[r * kDim + d] * key[d];
        scores[r * cells + e] = s / 16;
        top[r] = std::max(top[r], s / 16);
      }
    }
    std::fill(weights.begin(), weights.end(), 0);
    double* o = &out[static_cast<size_t>(h) * kRows * kDim];
    for (int64_t e = 0; e < cells; ++e) {
      const int64_t row = row_of(e);
      for (int d = 0; d < kDim; ++d) key[d] = g.v[row * kDim + d] * from_half(g.v_scale[row * (kDim / kGroup) + d / kGroup]);
      for (int r = 0; r < kRows; ++r) {
        const double w = std::exp(scores[r * cells + e] - top[r]);
        weights[r] += w;
        for (int d = 0; d < kDim; ++d) o[r * kDim + d] += w * key[d];
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int d = 0; d < kDim; ++d) o[r * kDim + d] /= weights[r];
  }
  return out;
}

struct Times {
  double median, least;
};

// Milliseconds of a call. On a GPU each sample is the mean of ten calls back to back, so that starting and waiting hardly count.
template <class Call>
Times measure(const Device& device, int reps, const Call& call) {
  const int calls = device.is_cpu() ? 1 : 10;
  std::vector<double> times;
  for (int rep = 0; rep <= reps; ++rep) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    device.synchronize();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count() / calls);
  }
  times.erase(times.begin());  // the warm-up
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[0]};
}

// How many bounds are broken.
int compare(const Device& device, Shape shape, int reps) {
  const bool dense = shape.queries == shape.context;
  golden g;
  if (!golden_make(&g, shape.context, shape.queries, kPageSize, 0)) throw std::runtime_error("not enough memory");
  const std::unique_ptr<golden, decltype(&golden_free)> freed(&g, golden_free);
  std::printf("\n%lld / %lld %s\n", static_cast<long long>(shape.context), static_cast<long long>(shape.queries), dense ? "dense" : "selected");

  std::vector<int64_t> sampled;
  const int64_t samples = std::min<int64_t>(kSampled, g.n_q);
  for (int64_t i = 0; i < samples; ++i) sampled.push_back(samples == 1 ? 0 : i * (g.n_q - 1) / (samples - 1));
  std::vector<std::vector<double>> expected;
  double largest = 0;
  for (int64_t query : sampled) {
    expected.push_back(reference(g, dense, query));
    for (double x : expected.back()) largest = std::max(largest, std::fabs(x));
  }

  const size_t codes = static_cast<size_t>(g.pages * kKvHeads * g.page_size * kDim), values = static_cast<size_t>(g.n_q) * kHeads * kDim;
  const Memory<float> q(device, g.q, values);
  Memory<float> out(device, values);
  const Memory<int8_t> k(device, g.k, codes), v(device, g.v, codes);
  const Memory<uint16_t> k_scale(device, g.k_scale, codes / kGroup), v_scale(device, g.v_scale, codes / kGroup);
  const Memory<int32_t> table(device, g.page_table, static_cast<size_t>(g.pages));
  const Memory<int32_t> ids(device, g.ids, static_cast<size_t>(g.n_q * g.cap)), widths(device, g.widths, static_cast<size_t>(g.n_q));
  const int32_t kv_len = static_cast<int32_t>(g.context);
  strata_pa_problem p;
  check(strata_pa_problem_init(&p, sizeof p));
  p.n_q = g.n_q, p.n_head = kHeads, p.head_dim = kDim;
  p.pages = p.max_pages = g.pages, p.n_kv = kKvHeads, p.page_size = g.page_size, p.group = kGroup, p.cap = g.cap;
  check(strata_pa_problem_set_strides(&p, STRATA_PA_HND));
  p.q = q.data(), p.out = out.data(), p.k = k.data(), p.v = v.data(), p.k_scale = k_scale.data(), p.v_scale = v_scale.data();
  p.page_table = table.data(), p.kv_len = &kv_len;
  if (!dense) p.ids = ids.data(), p.widths = widths.data();

  const std::vector<float> poison(values, std::numeric_limits<float>::quiet_NaN());
  int broken = 0;
  for (int32_t i = 0; i < strata_pa_kernel_count(); ++i) {
    strata_pa_kernel_info info = {};
    info.size = sizeof info;
    check(strata_pa_kernel_at(i, &info));
    const char* refusal = strata_pa_context_refusal(device.get(), info.name);
    if (info.device != device.kind() || (refusal && *refusal)) continue;
    const Plan plan(device, p, info.name);
    std::unique_ptr<Memory<unsigned char>> workspace;
    if (!device.is_cpu() && plan.workspace_bytes()) workspace = std::make_unique<Memory<unsigned char>>(device, plan.workspace_bytes());
    out.write(poison.data(), values);
    const Times times = measure(device, reps, [&] { plan.run(p, nullptr, workspace ? workspace->data() : nullptr, workspace ? workspace->size() : 0); });
    const std::vector<float> answer = out.read();
    double error = 0;
    for (size_t s = 0; s < sampled.size(); ++s)
      for (size_t j = 0; j < expected[s].size(); ++j) {
        const double apart = std::fabs(answer[static_cast<size_t>(sampled[s]) * kHeads * kDim + j] - expected[s][j]) / largest;
        if (!std::isnan(error) && !(apart <= error)) error = apart;  // NaN stays
      }
    const bool ok = error <= bound_of(info);
    std::printf("  %-6s max rel. error %.2e (bound %.1e) %-6s  %9.3f ms, least %9.3f ms\n", info.name, error, bound_of(info), ok ? "ok" : "BROKEN", times.median,
                times.least);
    std::fflush(stdout);
    broken += !ok;
  }
  return broken;
}

int64_t number(const char* text, int64_t most) {
  char* end = nullptr;
  const long long x = std::strtoll(text, &end, 10);
  if (*end || end == text || x < 1 || x > most) throw std::runtime_error(std::string(text) + " is not a number from 1 to " + std::to_string(most));
  return x;
}

int run(std::vector<const char*> arguments) {
  std::unique_ptr<Device> device;
  if (arguments.size() >= 2 && std::strcmp(arguments[0], "--device") == 0) {
    device = std::make_unique<Device>(arguments[1]);
    arguments.erase(arguments.begin(), arguments.begin() + 2);
  } else {
    for (const char* name : {"cuda", "hip", "cpu"}) try {
        device = std::make_unique<Device>(name);
        break;
      } catch (const std::runtime_error& error) {
        std::printf("no %s: %s\n", name, error.what());
      }
    if (!device) throw std::runtime_error("no device");
  }
  if (arguments.size() > 3) throw std::runtime_error("usage: strata_pa_parity [--device cpu | cuda[:N] | hip[:N]] [context] [queries] [reps]");
  std::vector<Shape> shapes = {{32768, 2048}, {1500, 1500}, {2100, 256}};
  if (device->is_cpu()) shapes = {{8192, 64}, {600, 600}, {2100, 64}};
  if (!arguments.empty()) {
    const int64_t context = number(arguments[0], 1 << 24);
    shapes = {{context, arguments.size() > 1 ? number(arguments[1], context) : context}};
  }
  const int reps = arguments.size() > 2 ? static_cast<int>(number(arguments[2], 10000)) : device->is_cpu() ? 3 : 20;
  std::printf("strata_pa %s on %s, %d repetitions\n", strata_pa_version(), device->text().c_str(), reps);
  int broken = 0;
  for (Shape shape : shapes) broken += compare(*device, shape, reps);
  if (broken) std::printf("\n%d bounds are broken\n", broken);
  return broken != 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "strata_pa_parity: %s\n", error.what());
    return 2;
  }
}
