#include "core/cuda_kernels.h"

#include <algorithm>

#include "core/cuda_device.h"
#include "core/errors.h"
#include "core/gpu_params.h"
#include "core/table.h"
#include "cuda/exact_tile_sm80.h"
#include "cuda/tile_launch.h"

namespace strata_pa::cuda {
namespace {

const char* name_of(KernelId id) {
  switch (id) {
    case KernelId::kFp32:
      return "fp32";
    case KernelId::kV1:
      return "v1";
    case KernelId::kV2:
      return "v2";
    case KernelId::kImma:
      return "imma";
    default:
      return "exact";
  }
}

Config config_of(KernelId id, const Problem& p, const Params& x) { return config(id, x, static_cast<int32_t>(p.head_dim)); }

constexpr const char* kTileImage = "exact_tile_sm90a";
constexpr const char* kRowsImage = "exact_tile_sm80";
constexpr const char* kPartImage = "exact_part_sm80";

// What the larger of k and v spans, in bytes.
int64_t pool_bytes(const Problem& p) {
  auto span = [&p](const Problem::Pool& s) { return (p.pages - 1) * s.page + (p.n_kv - 1) * s.head + (p.page_size - 1) * s.slot + p.head_dim; };
  return std::max(span(p.k_stride), span(p.v_stride));
}

// The parameters and the shape of exact's tiled form for sm_90; the shape says whether it serves the problem on this card.
tile::Shape tiled(KernelId id, const Problem& p, const Device& device, Params& x) {
  if (id != KernelId::kExact || p.n_q == 0 || p.n_seq != 1 || p.n_q > kInt32Max / p.n_kv) return {};
  const Image* image = find_image(kTileImage);
  const Card& card = *device.card;
  const int dim = static_cast<int>(p.head_dim);
  if (!image || choose(Vendor::kNvidia, device.sm, *image).kind != Choice::kCubin || card.max_shared < static_cast<int>(tile::shared_bytes(dim))) return {};
  x = whole_params(p, score_scale(id, p.sm_scale));
  set_rows(x, p, 0, p.n_q, 0, 1);
  return tile::shape(x, dim, card.processors, pool_bytes(p));
}

// Calls add(launch, Tiles) for each launch of a problem that it serves; returns the workspace's bytes.
template <class F>
int64_t plan_tiled(const Params& x, const tile::Shape& shape, const Problem& p, const Card& card, unsigned char* at, const F& add) {
  const int dim = static_cast<int>(p.head_dim);
  return tile::plan(x, dim, card.processors, shape, config(KernelId::kExact, x, dim).shared_bytes, at, add);
}

// The same for tiles of rows and one launch of the problem, x. 0, and no calls: they do not serve it.
template <class F>
int64_t plan_rows(KernelId id, const Problem& p, const Device& device, const Params& x, unsigned char* at, const F& add) {
  const Card& card = *device.card;
  const Image* image = find_image(kRowsImage);
  const int dim = static_cast<int>(p.head_dim), shared = std::max(rows::shared_bytes(dim, dim / x.group), rows::kListShared);
  if (id != KernelId::kExact || !image || choose(Vendor::kNvidia, device.sm, *image).kind == Choice::kNone || card.max_shared < shared) return 0;
  if (!rows::serves(x, pool_bytes(p))) return 0;
  return rows::plan(x, dim, card.processors, card.max_shared, config_of(id, p, x).shared_bytes, at, add);
}

constexpr auto kSizeAlone = [](const auto&, const auto&) {};

// One launch of a plan, and the kernel's second parameter.
template <class L, class R>
struct Step {
  L launch;
  R rest;
};
struct Symbol {
  const char* image;
  std::string name;
};

// symbols: by the steps' kinds. False, and nothing launched, where the driver does not take a function: the plain form gives the same bytes.
template <class S>
bool launch_steps(std::vector<S>& steps, const std::vector<Symbol>& symbols, Card& card, const Launch& launch, Params& x) {
  std::vector<Function> functions(symbols.size());
  for (const S& s : steps) {
    Function& f = functions[s.launch.step];
    if (f.handle) continue;
    f = card.function(*find_image(symbols[s.launch.step].image), symbols[s.launch.step].name, s.launch.shared_bytes);
    if (!f.reason.empty()) return false;
  }
  for (S& s : steps) {
    void* arguments[] = {&x, &s.rest};
    const auto& c = s.launch;
    card.driver(card.driver.launch, functions[c.step].handle, c.grid, 1u, 1u, c.block, 1u, 1u, c.shared_bytes, launch.stream, arguments, nullptr);
  }
  return true;
}

bool launch_tiled(const Problem& p, const Device& device, const Launch& launch, const tile::Shape& shape, Params& x) {
  std::vector<Step<tile::Launch, Tiles>> steps;
  plan_tiled(x, shape, p, *device.card, static_cast<unsigned char*>(launch.workspace), [&](const tile::Launch& l, const Tiles& t) { steps.push_back({l, t}); });
  const std::string geometry = text("d", p.head_dim, "_g", p.group);
  const std::vector<Symbol> symbols = {{kTileImage, tile::union_symbol(shape.t)},
                                       {kTileImage, "strata_tile_cells"},
                                       {kTileImage, "strata_exact_tile_" + geometry},
                                       {kTileImage, "strata_exact_tile_scores_" + geometry},
                                       {kTileImage, "strata_exact_tile_sums_" + geometry},
                                       {kTileImage, "strata_exact_rest_" + geometry}};
  return launch_steps(steps, symbols, *device.card, launch, x);
}

// False, too, where tiles of rows do not serve the launch.
bool launch_rows(KernelId id, const char* image, const Problem& p, const Device& device, const Launch& launch, Params& x) {
  std::vector<Step<rows::Launch, Rows>> steps;
  auto add = [&](const rows::Launch& l, const Rows& r) { steps.push_back({l, r}); };
  if (plan_rows(id, p, device, x, static_cast<unsigned char*>(launch.workspace), add) == 0) return false;
  const std::string geometry = text("_d", p.head_dim, "_g", p.group);
  const std::vector<Symbol> symbols = {
      {kRowsImage, "strata_rows_lists"}, {kRowsImage, "strata_rows_cells"}, {kRowsImage, "strata_exact_rows" + geometry}, {image, "strata_exact" + geometry}};
  return launch_steps(steps, symbols, *device.card, launch, x);
}

Function load(KernelId id, const char* image, const Problem& p, Card& card, uint32_t shared_bytes) {
  const Image* found = find_image(image);  // rows without one are refused before
  return card.function(*found, symbol(id, p), shared_bytes);
}

// One of exact's partial steps.
void launch_part(const Problem& p, Card& card, const Launch& launch) {
  const Image* image = find_image(kPartImage);
  if (!image) throw UnsupportedProblem(text("this build has no image ", kPartImage, ": partial states of exact are computed in host memory only"));
  Params x = whole_params(p, score_scale(KernelId::kExact, p.sm_scale));
  for_each_launch(p, kInt32Max, [&](int64_t first, int64_t n_q, int64_t s, int64_t n_seq) {
    set_rows(x, p, first, n_q, s, n_seq);
    Config c = config_of(KernelId::kExact, p, x);
    Function f = card.function(*image, text("strata_exact_part_d", p.head_dim, "_g", p.group), c.shared_bytes);
    if (!f.reason.empty()) throw DriverError(text("exact's partial steps: ", f.reason));
    const cpu::ExactState& state = launch.state;
    const int64_t row = first * p.n_head;
    ExactPart part = {state.A + row, state.b + row, nullptr, nullptr};
    if (launch.step == cpu::ExactStep::kSums) part.L = state.L + row, part.O = state.O + row * p.head_dim;
    void* arguments[] = {&x, &part};
    card.driver(card.driver.launch, f.handle, c.grid, 1u, 1u, c.block, 1u, 1u, c.shared_bytes, launch.stream, arguments, nullptr);
  });
}

}  // namespace

std::string symbol(KernelId id, const Problem& p) {
  if (id == KernelId::kFp32) return text("strata_fp32_d", p.head_dim, "_r", (p.heads_per_kv() + 3) / 4 * 4);
  return text("strata_", name_of(id), "_d", p.head_dim, "_g", p.group);
}

std::vector<std::string> not_supported_reasons(KernelId id, const Problem& p, const Device& device) {
  std::vector<std::string> reasons = layout_reasons(p);
  Params x = {};
  x.n_kv = 1, x.heads_per_kv = static_cast<int32_t>(p.heads_per_kv()), x.group = static_cast<int32_t>(p.group);
  x.max_entries = static_cast<int32_t>(std::min(p.max_entries(), kInt32Max));
  if (uint32_t bytes = config_of(id, p, x).shared_bytes; bytes > static_cast<uint32_t>(device.card->max_shared))
    reasons.push_back(text("needs ", bytes, " bytes of shared memory in a block, ", device.describe(), " allows ", device.card->max_shared));
  return reasons;
}

std::string prepare(KernelId id, const char* image, const Problem& p, const Device& device) {
  return load(id, image, p, *device.card, config_of(id, p, whole_params(p, score_scale(id, p.sm_scale))).shared_bytes).reason;
}

int64_t workspace(KernelId id, const Problem& p, const Device& device) {
  Params x;
  if (const tile::Shape shape = tiled(id, p, device, x); shape.served) return plan_tiled(x, shape, p, *device.card, nullptr, kSizeAlone);
  int64_t most = 0;
  x = whole_params(p, score_scale(id, p.sm_scale));
  for_each_launch(p, kInt32Max, [&](int64_t first, int64_t n_q, int64_t s, int64_t n_seq) {
    set_rows(x, p, first, n_q, s, n_seq);
    most = std::max(most, plan_rows(id, p, device, x, nullptr, kSizeAlone));
  });
  return most;
}

void launch(KernelId id, const char* image, const Problem& p, const Device& device, const Launch& launch) {
  Card& card = *device.card;
  Current current(card);
  if (launch.step != cpu::ExactStep::kWhole) return launch_part(p, card, launch);
  Params x;
  const tile::Shape shape = tiled(id, p, device, x);  // served: it is that form's workspace
  if (launch.workspace && shape.served && launch_tiled(p, device, launch, shape, x)) return;
  x = whole_params(p, score_scale(id, p.sm_scale));
  for_each_launch(p, kInt32Max, [&](int64_t first, int64_t n_q, int64_t s, int64_t n_seq) {
    set_rows(x, p, first, n_q, s, n_seq);
    if (launch.workspace && !shape.served && launch_rows(id, image, p, device, launch, x)) return;
    Config c = config_of(id, p, x);
    Function f = load(id, image, p, card, c.shared_bytes);
    if (!f.reason.empty()) throw DriverError(text(name_of(id), ": ", f.reason));
    Rows none = {};  // exact's second parameter: all queries
    void* arguments[] = {&x, &none};
    card.driver(card.driver.launch, f.handle, c.grid, 1u, 1u, c.block, 1u, 1u, c.shared_bytes, launch.stream, arguments, nullptr);
  });
}

}  // namespace strata_pa::cuda
