// What an engine does around prompt attention: pools for several layers, a cache that is filled token by token, step records of the
// queries, one plan for all layers. Layer 1 gets the cells of the golden case `tiny`, in other pages and another page size than there, so its
// answers must have that case's digests. Exit status 0: they have.
//
//     engine [cpu | cuda | cuda:N | hip | hip:N]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "device.h"
#include "golden.h"

namespace {

constexpr int kLayers = 2, kPageSize = 16, kPages = 9;  // two more than the sequence takes
constexpr int kHeads = GOLDEN_HEADS, kKvHeads = GOLDEN_KV_HEADS, kDim = GOLDEN_DIM, kGroup = GOLDEN_GROUP, kGroups = kDim / kGroup;

// What an engine keeps for each query of a step. The library reads the widths where they are.
struct StepRecord {
  int32_t sequence, position, width, flags;
};

// [layer][page][kv_head][page_size][dim] in one allocation, scales alike.
class Pools {
 public:
  explicit Pools(const Device& device)
      : k(device, kLayers * kLayerCodes), v(device, kLayers * kLayerCodes), k_scale(device, kLayers * kLayerScales), v_scale(device, kLayers * kLayerScales) {}

  // The quantized keys or values of a token, kv_head by kv_head, into its place of a layer.
  void append(Memory<int8_t>& pool, Memory<uint16_t>& scales, int layer, int page, int slot, const int8_t* codes, const uint16_t* code_scales) {
    for (int h = 0; h < kKvHeads; ++h) {
      const size_t row = ((static_cast<size_t>(layer) * kPages + page) * kKvHeads + h) * kPageSize + slot;
      pool.write(codes + h * kDim, kDim, row * kDim);
      scales.write(code_scales + h * kGroups, kGroups, row * kGroups);
    }
  }

  // The same from numbers.
  void append(Memory<int8_t>& pool, Memory<uint16_t>& scales, int layer, int page, int slot, const float* x) {
    int8_t codes[kKvHeads * kDim];
    uint16_t code_scales[kKvHeads * kGroups];
    check(strata_pa_quantize(x, STRATA_PA_FLOAT32, kKvHeads, kDim, kGroup, kDim, codes, kDim, code_scales, kGroups));
    append(pool, scales, layer, page, slot, codes, code_scales);
  }

  void bind(strata_pa_problem& p, int layer) const {
    p.k = k.data() + layer * kLayerCodes, p.v = v.data() + layer * kLayerCodes;
    p.k_scale = k_scale.data() + layer * kLayerScales, p.v_scale = v_scale.data() + layer * kLayerScales;
  }

  static constexpr size_t kLayerCodes = size_t{kPages} * kKvHeads * kPageSize * kDim, kLayerScales = kLayerCodes / kGroup;
  Memory<int8_t> k, v;
  Memory<uint16_t> k_scale, v_scale;
};

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::fabs(double{a[i]} - b[i]));
    largest = std::max(largest, std::fabs(double{b[i]}));
  }
  return most / largest;
}

int run(const std::string& device_name) {
  const Device device(device_name);
  std::printf("strata_pa %s on %s\n", strata_pa_version(), device.text().c_str());
  golden g;
  if (!golden_make(&g, 96, 8, 4, 1)) throw std::runtime_error("not enough memory");

  // The cache: the sequence's pages are taken from the end of the pool.
  Pools pools(device);
  std::vector<int32_t> page_table;
  for (int page = 0; page * kPageSize < g.context; ++page) page_table.push_back(kPages - 1 - page);
  for (int token = 0; token < g.context; ++token) {
    const int page = page_table[token / kPageSize], slot = token % kPageSize;
    std::vector<float> x(2 * kKvHeads * kDim);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>((7 * i + 13 * token) % 1009));
    pools.append(pools.k, pools.k_scale, 0, page, slot, x.data());
    pools.append(pools.v, pools.v_scale, 0, page, slot, x.data() + kKvHeads * kDim);
    // tiny's own arrays are [page][kv_head][4][dim]
    for (auto [pool, scales, codes, code_scales] : {std::tuple(&pools.k, &pools.k_scale, g.k, g.k_scale), std::tuple(&pools.v, &pools.v_scale, g.v, g.v_scale)}) {
      std::vector<int8_t> c(kKvHeads * kDim);
      std::vector<uint16_t> s(kKvHeads * kGroups);
      for (int h = 0; h < kKvHeads; ++h) {
        const int64_t row = (int64_t{g.page_table[token / g.page_size]} * kKvHeads + h) * g.page_size + token % g.page_size;
        std::copy_n(codes + row * kDim, kDim, c.begin() + h * kDim);
        std::copy_n(code_scales + row * kGroups, kGroups, s.begin() + h * kGroups);
      }
      pools.append(*pool, *scales, 1, page, slot, c.data(), s.data());
    }
  }

  // The step: its queries, what each selects, and a record for each.
  std::vector<StepRecord> records;
  for (int i = 0; i < g.n_q; ++i) records.push_back({0, static_cast<int32_t>(g.context - g.n_q + i), g.widths[i], 0});
  const size_t values = static_cast<size_t>(g.n_q) * kHeads * kDim;
  const Memory<float> q(device, g.q, values);
  const Memory<int32_t> table(device, page_table.data(), page_table.size()), ids(device, g.ids, static_cast<size_t>(g.n_q * g.cap));
  const Memory<StepRecord> steps(device, records.data(), records.size());
  Memory<float> out(device, values);
  const int32_t kv_len = static_cast<int32_t>(g.context);

  strata_pa_problem p;
  check(strata_pa_problem_init(&p, sizeof p));
  p.n_q = g.n_q, p.n_head = kHeads, p.head_dim = kDim;
  p.pages = kPages, p.n_kv = kKvHeads, p.page_size = kPageSize, p.group = kGroup;
  p.max_pages = static_cast<int64_t>(page_table.size()), p.cap = g.cap;
  check(strata_pa_problem_set_strides(&p, STRATA_PA_HND));
  p.q = q.data(), p.out = out.data();
  p.page_table = table.data(), p.kv_len = &kv_len;
  p.ids = ids.data();
  p.widths = &steps.data()->width, p.widths_stride = sizeof(StepRecord) / sizeof(int32_t);
  pools.bind(p, 0);

  std::printf("%s\n", Plan(device, p, nullptr).text().c_str());
  int wrong = 0;
  std::vector<std::vector<float>> answers;  // of layer 0
  for (const char* kernel : {"fp32", "imma", "exact"}) {
    const Plan plan(device, p, kernel);
    const Memory<unsigned char> workspace(device, plan.workspace_bytes());
    char digest[65] = "";
    for (int layer = 0; layer < kLayers; ++layer) {
      pools.bind(p, layer);
      if (device.is_cpu())
        plan.run(p);
      else
        plan.run(p, nullptr, workspace.data(), workspace.size());
      device.synchronize();
      const std::vector<float> answer = out.read();
      if (layer == 0) answers.push_back(answer);
      golden_sha256(answer.data(), answer.size() * sizeof(float), digest);
    }
    const bool ok = std::string(digest) == golden_tiny(kernel);
    std::printf("%-6s layer 1: %s %s\n", kernel, digest, ok ? "ok" : "WRONG");
    wrong += !ok;
  }
  for (const auto& answer : answers) {  // each is within 1e-6 of float64
    const double apart = difference(answer, answers[0]);
    std::printf("layer 0: %.1e from fp32 %s\n", apart, apart <= 2e-6 ? "ok" : "WRONG");
    wrong += !(apart <= 2e-6);
  }
  golden_free(&g);
  return wrong != 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "cpu");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine: %s\n", error.what());
    return 2;
  }
}
