#include "core/python_call.h"

#include <cmath>

#include "core/errors.h"
#include "core/run.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

const std::vector<std::string> kFloats = {"float32", "float16", "bfloat16"};

void check_shape(const ArrayView& a, const std::vector<int64_t>& shape, const std::string& expected) {
  if (a.shape != shape) throw InvalidInput(text(a.name, " must be ", expected, " = [", join(shape), "], got ", a.describe()));
}

}  // namespace

Problem::Pool PagedView::pool(const ArrayView& a) const {
  return nhd ? Problem::Pool{a.strides[0], a.strides[2], a.strides[1]} : Problem::Pool{a.strides[0], a.strides[1], a.strides[2]};
}

PagedView view_paged(py::handle k, py::handle v, py::handle k_scale, py::handle v_scale, py::handle page_table, py::handle layout) {
  std::string name = to_string(layout, "layout");
  if (name != "HND" && name != "NHD") throw InvalidInput(text("layout must be 'HND' or 'NHD', got '", name, "'"));
  PagedView c;
  c.nhd = name == "NHD";
  c.k = view_array(k, "k", {"int8"}, {4});
  c.v = view_array(v, "v", {"int8"}, {4});
  c.k_scale = view_array(k_scale, "k_scale", {"float16"}, {4});
  c.v_scale = view_array(v_scale, "v_scale", {"float16"}, {4});
  c.page_table = view_array(page_table, "page_table", {"int32"}, {1, 2});
  c.pages = c.k.shape[0];
  c.n_kv = c.k.shape[c.nhd ? 2 : 1];
  c.page_size = c.k.shape[c.nhd ? 1 : 2];
  c.head_dim = c.k.shape[3];
  const char* dims = c.nhd ? "pages, page_size, n_kv" : "pages, n_kv, page_size";
  if (c.n_kv < 1 || c.page_size < 1 || c.head_dim < 1) throw InvalidInput(text("k [", dims, ", head_dim] has an empty dimension: ", c.k.describe()));
  check_shape(c.v, c.k.shape, "of k's shape");
  int64_t groups = c.k_scale.shape[3];
  if (groups < 1 || c.head_dim % groups != 0)
    throw InvalidInput(text("k_scale must be [", dims, ", head_dim / group]: its last dimension, ", groups, ", does not divide head_dim ", c.head_dim));
  c.group = c.head_dim / groups;
  std::vector<int64_t> shape = c.k.shape;
  shape[3] = groups;
  check_shape(c.k_scale, shape, text("[", dims, ", head_dim / group]"));
  check_shape(c.v_scale, shape, "of k_scale's shape");
  return c;
}

Call::Call(const CallArguments& a) : environment_(read_environment()) {
  auto keep = [this](ArrayView view) { views_.push_back(std::move(view)); };

  ArrayView q = view_array(a.q, "q", kFloats, {3});
  p_.q = q.data;
  p_.dtype = to_dtype(q);
  p_.n_q = q.shape[0], p_.n_head = q.shape[1], p_.head_dim = q.shape[2];
  p_.q_stride = q.strides[0], p_.q_head_stride = q.strides[1];
  p_.device = q.device;

  PagedView kv = view_paged(a.k, a.v, a.k_scale, a.v_scale, a.page_table, a.layout);
  if (kv.head_dim != p_.head_dim) throw InvalidInput(text("q's head_dim is ", p_.head_dim, ", the cache's is ", kv.head_dim));
  p_.k = static_cast<const int8_t*>(kv.k.data), p_.k_stride = kv.pool(kv.k);
  p_.v = static_cast<const int8_t*>(kv.v.data), p_.v_stride = kv.pool(kv.v);
  p_.k_scale = static_cast<const uint16_t*>(kv.k_scale.data), p_.k_scale_stride = kv.pool(kv.k_scale);
  p_.v_scale = static_cast<const uint16_t*>(kv.v_scale.data), p_.v_scale_stride = kv.pool(kv.v_scale);
  p_.pages = kv.pages, p_.n_kv = kv.n_kv, p_.page_size = kv.page_size, p_.group = kv.group;
  p_.page_table = static_cast<const int32_t*>(kv.page_table.data);
  bool batch = kv.page_table.shape.size() == 2;
  p_.n_seq = batch ? kv.page_table.shape[0] : 1;
  p_.max_pages = kv.page_table.shape.back();
  p_.page_table_stride = batch ? kv.page_table.strides[0] : 0;

  if (!a.cu_seqlens_q.is_none()) {
    cu_seqlens_q_ = to_int32_list(a.cu_seqlens_q, "cu_seqlens_q");
    if (cu_seqlens_q_.size() != static_cast<size_t>(p_.n_seq) + 1)
      throw InvalidInput(text("cu_seqlens_q must have ", p_.n_seq + 1, " entries, one more than the page table has sequences, got ", cu_seqlens_q_.size()));
  } else {
    if (p_.n_seq != 1) throw InvalidInput(text("a page table of ", p_.n_seq, " sequences needs cu_seqlens_q"));
    if (p_.n_q > INT32_MAX) throw InvalidInput(text("too many queries: ", p_.n_q));
    cu_seqlens_q_ = {0, static_cast<int32_t>(p_.n_q)};
  }
  if (!a.kv_len.is_none()) {
    kv_len_ = to_int32_list(a.kv_len, "kv_len");
    if (kv_len_.size() != static_cast<size_t>(p_.n_seq))
      throw InvalidInput(text("kv_len must have one entry for each of ", p_.n_seq, " sequences, got ", kv_len_.size()));
  } else {
    if (p_.max_pages > INT32_MAX / p_.page_size)
      throw InvalidInput(text("kv_len: the page table's ", p_.max_pages, " pages of ", p_.page_size, " cells are too many; pass kv_len"));
    kv_len_.assign(static_cast<size_t>(p_.n_seq), static_cast<int32_t>(p_.max_pages * p_.page_size));
  }
  p_.cu_seqlens_q = cu_seqlens_q_.data();
  p_.kv_len = kv_len_.data();

  p_.granularity = to_int(a.granularity, "granularity");
  if (!a.ids.is_none()) {
    ArrayView ids = view_array(a.ids, "ids", {"int32"}, {2, 3});
    bool per_head = ids.shape.size() == 3;
    if (per_head)
      check_shape(ids, {p_.n_q, p_.n_kv, ids.shape[2]}, "[n_q, n_kv, cap]");
    else
      check_shape(ids, {p_.n_q, ids.shape[1]}, "[n_q, cap]");
    static const int32_t none = -1;  // an empty list is a list: its pointer must not be null
    p_.ids = ids.size() > 0 ? static_cast<const int32_t*>(ids.data) : &none;
    p_.cap = ids.shape.back();
    p_.ids_stride = ids.strides[0];
    p_.ids_head_stride = per_head ? ids.strides[1] : 0;
    keep(std::move(ids));
  }
  if (!a.widths.is_none()) {
    ArrayView widths = view_array(a.widths, "widths", {"int32"}, {1}, Innermost::kAny);
    check_shape(widths, {p_.n_q}, "[n_q]");
    static const int32_t zero = 0;
    p_.widths = widths.size() > 0 ? static_cast<const int32_t*>(widths.data) : &zero;
    p_.widths_stride = widths.strides[0];
    keep(std::move(widths));
  }
  p_.causal = to_bool(a.causal, "causal");
  p_.window_left = to_int(a.window_left, "window_left");
  p_.sm_scale = a.sm_scale.is_none() ? 1.0 / std::sqrt(static_cast<double>(p_.head_dim)) : to_double(a.sm_scale, "sm_scale");
  if (!a.kernel.is_none()) kernel_ = to_string(a.kernel, "kernel");
  if (!a.stream.is_none()) throw InvalidInput("stream is for GPU arrays; these are in host memory");

  std::optional<int64_t> threads;
  if (!a.num_threads.is_none()) threads = to_int(a.num_threads, "num_threads");
  device_ = cpu_device(environment_, threads, a.isa.is_none() ? "" : to_string(a.isa, "isa"));
  check_problem(p_);
  for (ArrayView* view : {&q, &kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.page_table}) keep(std::move(*view));
}

const Plan& Call::plan() {
  if (!plan_) plan_ = make_plan(p_, device_, kernel_, environment_);
  return *plan_;
}

const Plan& Call::plan(py::object out) {
  if (!out.is_none()) bind_output(out, py::none());
  return plan();
}

void Call::bind_output(py::object out, py::object lse) {
  ArrayView view = view_array(out, "out", {dtype_name(p_.dtype)}, {3});
  check_shape(view, {p_.n_q, p_.n_head, p_.head_dim}, "of q's shape");
  if (view.readonly) throw InvalidInput("out is read-only");
  p_.out = view.data;
  p_.out_stride = view.strides[0], p_.out_head_stride = view.strides[1];
  views_.push_back(std::move(view));
  if (!lse.is_none()) {
    p_.lse = contiguous<float>(lse, "lse", {p_.n_q, p_.n_head}, kWritten, views_);
    p_.lse_stride = p_.n_head;
  }
  check_output(p_);
}

const Plan& Call::run(py::object out, py::object lse) {
  plan();
  bind_output(out, lse);
  run_step({});
  return *plan_;
}

void Call::exact_anchors(py::object A, py::object b) {
  plan();
  Launch launch;
  launch.step = cpu::ExactStep::kAnchors;
  launch.state.A = contiguous<float>(A, "A", {p_.n_q, p_.n_head}, kWritten, views_);
  launch.state.b = contiguous<float>(b, "b", {p_.n_q, p_.n_head}, kWritten, views_);
  run_step(launch);
}

void Call::exact_sums(py::object A, py::object b, py::object L, py::object O) {
  plan();
  Launch launch;
  launch.step = cpu::ExactStep::kSums;
  launch.state.A = contiguous<float>(A, "A", {p_.n_q, p_.n_head}, kRead, views_);
  launch.state.b = contiguous<float>(b, "b", {p_.n_q, p_.n_head}, kRead, views_);
  launch.state.L = contiguous<int64_t>(L, "L", {p_.n_q, p_.n_head}, kWritten, views_);
  launch.state.O = contiguous<int64_t>(O, "O", {p_.n_q, p_.n_head, p_.head_dim}, kWritten, views_);
  run_step(launch);
}

void Call::run_step(const Launch& launch) {
  py::gil_scoped_release release;
  strata_pa::run(*plan_, p_, launch);
}

void* contiguous(py::handle object, const std::string& name, const char* dtype, const std::vector<int64_t>& shape, Access access,
                 std::vector<ArrayView>& keep) {
  ArrayView a = view_array(object, name, {dtype}, {shape.size()});
  check_shape(a, shape, "of the shape");
  int64_t room = 1;
  for (size_t i = shape.size(); i-- > 0; room *= shape[i])
    if (a.size() > 0 && shape[i] > 1 && a.strides[i] != room) throw InvalidInput(text(name, " must be C-contiguous"));
  if (reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(a.itemsize) != 0) throw InvalidInput(text(name, " is misaligned"));
  if (access == kWritten && a.readonly) throw InvalidInput(text(name, " is read-only"));
  keep.push_back(std::move(a));
  return keep.back().data;
}

}  // namespace strata_pa
