#include "core/cuda_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cuda_device.h"
#include "core/errors.h"
#include "core/table.h"

namespace strata_pa::cuda {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kAlignment = 16;  // of a cell's codes: kernels copy 16 bytes at once

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

int32_t log2_of(int64_t power_of_two) {
  int32_t log = 0;
  while ((int64_t{1} << log) < power_of_two) ++log;
  return log;
}

PoolStride pool_stride(const Problem::Pool& s) { return {s.head, static_cast<int32_t>(s.page), static_cast<int32_t>(s.slot)}; }

// Everything but the queries and sequences of one launch.
Params whole_params(KernelId id, const Problem& p) {
  Params x = {};
  x.k = p.k, x.v = p.v, x.k_scale = p.k_scale, x.v_scale = p.v_scale;
  x.q_stride = p.q_stride, x.q_head_stride = p.q_head_stride;
  x.out_stride = p.out_stride, x.out_head_stride = p.out_head_stride, x.lse_stride = p.lse_stride;
  x.page_table_stride = p.page_table_stride;
  x.ids_stride = p.ids_stride, x.ids_head_stride = p.ids_head_stride, x.widths_stride = p.widths_stride;
  x.k_stride = pool_stride(p.k_stride), x.v_stride = pool_stride(p.v_stride);
  x.k_scale_stride = pool_stride(p.k_scale_stride), x.v_scale_stride = pool_stride(p.v_scale_stride);
  x.n_kv = static_cast<int32_t>(p.n_kv);
  x.heads_per_kv = static_cast<int32_t>(p.heads_per_kv());
  x.group = static_cast<int32_t>(p.group);
  x.pages = static_cast<int32_t>(p.pages);
  x.max_pages = static_cast<int32_t>(p.max_pages);
  set_page_size(x, static_cast<int32_t>(p.page_size));
  x.cap = static_cast<int32_t>(p.cap);
  x.granularity_log2 = log2_of(p.granularity);
  x.causal = p.causal;
  x.window_left = static_cast<int32_t>(p.window_left);
  x.dtype = static_cast<int32_t>(p.dtype);
  x.score_scale = score_scale(id, p.sm_scale);
  x.max_entries = static_cast<int32_t>(p.max_entries());
  return x;
}

// The rows first .. first + n_q - 1 of the problem, which lie in the sequences s .. s + n_seq - 1.
void set_rows(Params& x, const Problem& p, int64_t first, int64_t n_q, int64_t s, int64_t n_seq) {
  const int64_t bytes = dtype_bytes(p.dtype);
  x.q = static_cast<const char*>(p.q) + first * p.q_stride * bytes;
  x.out = static_cast<char*>(p.out) + first * p.out_stride * bytes;
  x.lse = p.lse ? p.lse + first * p.lse_stride : nullptr;
  x.ids = p.ids ? p.ids + first * p.ids_stride : nullptr;
  x.widths = p.widths ? p.widths + first * p.widths_stride : nullptr;
  x.page_table = p.page_table + s * p.page_table_stride;
  x.n_q = static_cast<int32_t>(n_q);
  x.n_seq = static_cast<int32_t>(n_seq);
  // A sequence that goes on in the next launch ends past this one's rows: positions count from its end.
  for (int64_t i = 0; i < n_seq; ++i) x.seq[i] = {static_cast<int32_t>(p.cu_seqlens_q[s + i + 1] - first), p.kv_len[s + i]};
}

// One launch serves at most kMaxSequences sequences and a grid that the hardware can count.
template <class Work>
void for_each_launch(const Problem& p, const Work& work) {
  const int64_t most_rows = std::max<int64_t>(1, kInt32Max / p.n_kv);
  const int32_t* cu = p.cu_seqlens_q;
  int64_t first = 0, s = 0;
  while (first < p.n_q) {
    while (cu[s + 1] <= first) ++s;
    const int64_t last_s = std::min<int64_t>(p.n_seq, s + kMaxSequences);
    const int64_t end = std::min<int64_t>(cu[last_s], first + most_rows);
    int64_t n_seq = 1;
    while (cu[s + n_seq] < end) ++n_seq;
    work(first, end - first, s, n_seq);
    first = end;
  }
}

void check_pool(const char* name, const Problem::Pool& stride, const Problem& p, std::vector<std::string>& reasons) {
  if (p.pages > 1 && stride.page > kInt32Max)
    reasons.push_back(text(name, "'s pages are ", stride.page, " elements apart, more than ", kInt32Max));
  if (p.page_size > 1 && stride.slot > kInt32Max)
    reasons.push_back(text(name, "'s cells are ", stride.slot, " elements apart, more than ", kInt32Max));
}

void check_codes(const char* name, const void* data, const Problem::Pool& s, const Problem& p, std::vector<std::string>& reasons) {
  if (p.pages == 0) return;
  if (uintptr_t rest = reinterpret_cast<uintptr_t>(data) % kAlignment)
    reasons.push_back(text(name, "'s address is not a multiple of ", kAlignment, " bytes (the remainder is ", rest, ")"));
  const std::pair<const char*, int64_t> strides[] = {
      {"page", p.pages > 1 ? s.page : 0}, {"KV head", p.n_kv > 1 ? s.head : 0}, {"cell", p.page_size > 1 ? s.slot : 0}};
  for (auto [what, stride] : strides)
    if (stride % kAlignment != 0) reasons.push_back(text(name, "'s stride of a ", what, ", ", stride, " bytes, is not a multiple of ", kAlignment));
}

Config config_of(KernelId id, const Problem& p, const Params& x) { return config(id, x, static_cast<int32_t>(p.head_dim)); }

Function load(KernelId id, const char* image, const Problem& p, Card& card, uint32_t shared_bytes) {
  const Image* found = find_image(image);  // rows without one are refused before
  return card.function(*found, symbol(id, p), shared_bytes);
}

}  // namespace

std::string symbol(KernelId id, const Problem& p) {
  if (id == KernelId::kFp32) return text("strata_fp32_d", p.head_dim, "_r", (p.heads_per_kv() + 3) / 4 * 4);
  return text("strata_", name_of(id), "_d", p.head_dim, "_g", p.group);
}

std::vector<std::string> not_supported_reasons(KernelId id, const Problem& p, const Device& device) {
  std::vector<std::string> reasons;
  check_codes("k", p.k, p.k_stride, p, reasons);
  check_codes("v", p.v, p.v_stride, p, reasons);
  check_pool("k", p.k_stride, p, reasons);
  check_pool("v", p.v_stride, p, reasons);
  check_pool("k_scale", p.k_scale_stride, p, reasons);
  check_pool("v_scale", p.v_scale_stride, p, reasons);
  Params x = {};
  x.n_kv = 1, x.heads_per_kv = static_cast<int32_t>(p.heads_per_kv()), x.group = static_cast<int32_t>(p.group);
  x.max_entries = static_cast<int32_t>(std::min(p.max_entries(), kInt32Max));
  if (uint32_t bytes = config_of(id, p, x).shared_bytes; bytes > static_cast<uint32_t>(device.card->max_shared))
    reasons.push_back(text("needs ", bytes, " bytes of shared memory in a block, ", device.describe(), " allows ", device.card->max_shared));
  return reasons;
}

std::string prepare(KernelId id, const char* image, const Problem& p, const Device& device) {
  return load(id, image, p, *device.card, config_of(id, p, whole_params(id, p)).shared_bytes).reason;
}

void launch(KernelId id, const char* image, const Problem& p, const Device& device, const Launch& launch) {
  if (launch.step != cpu::ExactStep::kWhole) throw UnsupportedProblem("partial states of exact are computed from arrays in host memory only");
  Card& card = *device.card;
  Current current(card);
  Params x = whole_params(id, p);
  for_each_launch(p, [&](int64_t first, int64_t n_q, int64_t s, int64_t n_seq) {
    set_rows(x, p, first, n_q, s, n_seq);
    Config c = config_of(id, p, x);
    Function f = load(id, image, p, card, c.shared_bytes);
    if (!f.reason.empty()) throw DriverError(text(name_of(id), ": ", f.reason));
    void* arguments[] = {&x};
    card.driver(card.driver.launch, f.handle, c.grid, 1u, 1u, c.block, 1u, 1u, c.shared_bytes, launch.stream, arguments, nullptr);
  });
}

}  // namespace strata_pa::cuda
