#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/errors.h"

namespace strata_pa {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

template <class... T>
[[noreturn]] void fail(const T&... parts) {
  throw InvalidInput(text(parts...));
}
void check_positive(int64_t x, const char* name) {
  if (x < 1) fail(name, " must be at least 1, got ", x);
}
void check_range(int64_t x, int64_t low, int64_t high, const char* name) {
  if (x < low || x > high) fail(name, " must be from ", low, " to ", high, ", got ", x);
}

// A strided array: what check_array, the overlap test and nothing else need to know of it.
struct Array {
  const char* name;
  const void* data;
  int64_t itemsize;
  std::vector<std::pair<int64_t, int64_t>> dims;  // size, stride in elements; innermost last

  bool empty() const {
    return std::any_of(dims.begin(), dims.end(), [](auto d) { return d.first == 0; });
  }
  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const {  // strides are not negative
    int64_t last = 0;
    for (auto [size, stride] : dims) last += (size - 1) * stride;
    return begin() + static_cast<uintptr_t>((last + 1) * itemsize);
  }
};

void check_array(const Array& a) {
  if (a.empty()) return;
  if (!a.data) fail(a.name, " has no memory (null pointer)");
  if (uintptr_t rest = a.begin() % static_cast<uintptr_t>(a.itemsize))
    fail(a.name, " is misaligned: its address must be a multiple of ", a.itemsize, " bytes, the remainder is ", rest);
  for (auto [size, stride] : a.dims)
    if (size > 1 && stride < 0) fail(a.name, " has a negative stride (", stride, " elements)");
}

std::vector<Array> inputs(const Problem& p) {
  auto pool = [&p](const char* name, const void* data, int64_t itemsize, const Problem::Pool& s, int64_t inner) {
    return Array{name, data, itemsize, {{p.pages, s.page}, {p.n_kv, s.head}, {p.page_size, s.slot}, {inner, 1}}};
  };
  std::vector<Array> list = {
      {"q", p.q, dtype_bytes(p.dtype), {{p.n_q, p.q_stride}, {p.n_head, p.q_head_stride}, {p.head_dim, 1}}},
      pool("k", p.k, 1, p.k_stride, p.head_dim),
      pool("v", p.v, 1, p.v_stride, p.head_dim),
      pool("k_scale", p.k_scale, 2, p.k_scale_stride, p.groups()),
      pool("v_scale", p.v_scale, 2, p.v_scale_stride, p.groups()),
      {"page_table", p.page_table, 4, {{p.n_seq, p.page_table_stride}, {p.max_pages, 1}}},
  };
  if (p.ids) list.push_back({"ids", p.ids, 4, {{p.n_q, p.ids_stride}, {p.n_kv, p.ids_head_stride}, {p.cap, 1}}});
  if (p.widths) list.push_back({"widths", p.widths, 4, {{p.n_q, p.widths_stride}}});
  return list;
}

void check_sequences(const Problem& p) {
  check_positive(p.n_seq, "the number of sequences");
  if (!p.cu_seqlens_q || !p.kv_len) fail("cu_seqlens_q and kv_len must be set");
  const int32_t* cu = p.cu_seqlens_q;
  if (cu[0] != 0) fail("cu_seqlens_q must start at 0, got ", cu[0]);
  for (int64_t s = 0; s < p.n_seq; ++s) {
    if (cu[s + 1] < cu[s]) fail("cu_seqlens_q must not descend, got ", cu[s], " then ", cu[s + 1], " at position ", s + 1);
    if (int64_t cells = p.max_pages * p.page_size; p.kv_len[s] < 0 || p.kv_len[s] > cells)
      fail("kv_len[", s, "] must be from 0 to ", cells, " (", p.max_pages, " pages of ", p.page_size, " cells), got ", p.kv_len[s]);
  }
  if (cu[p.n_seq] != p.n_q) fail("cu_seqlens_q must end at the number of queries, ", p.n_q, ", got ", cu[p.n_seq]);
}

// Width of query i, a number of list entries.
int64_t checked_width(const Problem& p, int64_t i) {
  int64_t width = p.widths ? p.widths[i * p.widths_stride] : p.cap;
  if (width < 0 || width > p.cap) fail("widths[", i, "] is ", width, "; a width is from 0 to ", p.cap, ", the length of a row of ids");
  return width;
}

// The least and greatest of n numbers, in a loop that compilers vectorize.
std::pair<int32_t, int32_t> range(const int32_t* x, int64_t n) {
  int32_t low = 0, high = -1;
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  return {low, high};
}
int64_t position_of(const int32_t* x, int32_t value) {
  int64_t i = 0;
  while (x[i] != value) ++i;
  return i;
}

}  // namespace

int64_t Problem::max_entries() const {
  if (ids) return cap * granularity;
  return *std::max_element(kv_len, kv_len + n_seq);
}

void check_problem(const Problem& p) {
  check_positive(p.n_head, "the number of query heads");
  check_positive(p.n_kv, "the number of KV heads");
  check_positive(p.head_dim, "head_dim");
  check_positive(p.group, "the scale group");
  check_positive(p.page_size, "page_size");
  check_range(p.n_q, 0, kInt32Max, "the number of queries");
  check_range(p.pages, 0, kInt32Max, "the number of pages");
  check_range(p.granularity, 1, kInt32Max, "granularity");
  check_range(p.window_left, -1, kInt32Max, "window_left (-1: no window)");
  if (p.n_head % p.n_kv != 0) fail(p.n_head, " query heads are not a multiple of ", p.n_kv, " KV heads");
  if (p.head_dim % p.group != 0) fail("the scale group ", p.group, " does not divide head_dim ", p.head_dim);
  if (p.max_pages < 0 || p.max_pages > kInt32Max / p.page_size)
    fail("the page table has room for ", p.max_pages, " pages of ", p.page_size, " cells; at most ", kInt32Max, " cells can be numbered");
  // Kernels multiply by log2(e) and round to float32; that must stay a number.
  if (!std::isfinite(static_cast<float>(p.sm_scale * 0x1.71547652b82fep+0))) fail("sm_scale must be a finite float32, got ", p.sm_scale);
  if (p.ids) {
    check_range(p.cap, 0, kInt32Max, "the length of a row of ids");
  } else {
    if (p.widths) fail("widths needs ids");
    if (p.granularity != 1) fail("granularity ", p.granularity, " needs ids");
  }
  check_sequences(p);
  for (const Array& a : inputs(p)) check_array(a);
  // Before planning, because scratch sizes depend on them.
  if (p.widths && p.device.kind == DeviceKind::kCPU)
    for (int64_t i = 0; i < p.n_q; ++i) checked_width(p, i);
}

void check_output(const Problem& p) {
  std::vector<Array> outputs = {{"out", p.out, dtype_bytes(p.dtype), {{p.n_q, p.out_stride}, {p.n_head, p.out_head_stride}, {p.head_dim, 1}}}};
  if (p.lse) outputs.push_back({"lse", p.lse, 4, {{p.n_q, p.lse_stride}, {p.n_head, 1}}});
  for (const Array& o : outputs) {
    check_array(o);
    if (o.empty()) continue;
    auto dims = o.dims;
    std::sort(dims.begin(), dims.end(), [](auto a, auto b) { return a.second < b.second; });
    int64_t in_use = 1;  // elements that the dimensions so far span
    for (auto [size, stride] : dims) {
      if (size == 1) continue;
      if (stride < in_use) fail(o.name, " overlaps itself: a stride of ", stride, " elements over ", in_use, " that are in use");
      in_use = stride * size;
    }
    for (const Array& i : inputs(p))
      if (!i.empty() && o.begin() < i.end() && i.begin() < o.end()) fail(o.name, " overlaps the memory of ", i.name);
  }
}

void check_lists(const Problem& p) {
  for (int64_t s = 0; s < p.n_seq; ++s) {
    const int32_t* table = p.page_table + s * p.page_table_stride;
    auto [low, high] = range(table, (p.kv_len[s] + p.page_size - 1) / p.page_size);
    if (low >= -1 && high < p.pages) continue;
    int64_t i = position_of(table, low < -1 ? low : high);
    fail("page_table[", p.n_seq > 1 ? text(s, ", ") : "", i, "] is ", table[i], "; a page is from 0 to ", p.pages - 1, ", or -1: not resident");
  }
  if (!p.ids) return;
  int64_t lists = p.ids_head_stride == 0 ? 1 : p.n_kv;
  for (int64_t i = 0; i < p.n_q; ++i) {
    int64_t width = checked_width(p, i);
    for (int64_t h = 0; h < lists; ++h) {
      const int32_t* row = p.ids + i * p.ids_stride + h * p.ids_head_stride;
      int32_t low = range(row, width).first;
      if (low < -1)
        fail("ids[", i, lists > 1 ? text(", ", h) : "", ", ", position_of(row, low), "] is ", low, "; an id is a cell from 0 on, or -1: none");
    }
  }
}

}  // namespace strata_pa
