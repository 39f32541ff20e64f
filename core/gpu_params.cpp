#include "core/gpu_params.h"

#include <utility>

#include "core/errors.h"

namespace strata_pa::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // of a cell's codes: kernels copy 16 bytes at once

int32_t log2_of(int64_t power_of_two) {
  int32_t log = 0;
  while ((int64_t{1} << log) < power_of_two) ++log;
  return log;
}

PoolStride pool_stride(const Problem::Pool& s) { return {s.head, static_cast<int32_t>(s.page), static_cast<int32_t>(s.slot)}; }

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

}  // namespace

Params whole_params(const Problem& p, float score_scale) {
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
  x.score_scale = score_scale;
  x.max_entries = static_cast<int32_t>(p.max_entries());
  if (p.pages == 0) {
    // In place of a masked cell's codes the kernels load those of page 0 and do not use them. Without a page: head_dim bytes of q's first row, which
    // has twice as many at least.
    x.k = x.v = reinterpret_cast<const int8_t*>((reinterpret_cast<uintptr_t>(p.q) + kAlignment - 1) / kAlignment * kAlignment);
    x.k_stride = x.v_stride = PoolStride{};
  }
  return x;
}

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

std::vector<std::string> layout_reasons(const Problem& p) {
  std::vector<std::string> reasons;
  check_codes("k", p.k, p.k_stride, p, reasons);
  check_codes("v", p.v, p.v_stride, p, reasons);
  check_pool("k", p.k_stride, p, reasons);
  check_pool("v", p.v_stride, p, reasons);
  check_pool("k_scale", p.k_scale_stride, p, reasons);
  check_pool("v_scale", p.v_scale_stride, p, reasons);
  return reasons;
}

}  // namespace strata_pa::cuda
