#include "core/python_call.h"

#include <cmath>

#include "core/border.h"
#include "core/errors.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

void check_shape(const ArrayView& a, const std::vector<int64_t>& shape, const std::string& expected) {
  if (a.shape != shape) throw InvalidInput(text(a.name, " must be ", expected, " = [", join(shape), "], got ", a.describe()));
}

}  // namespace

void check_same_device(const ArrayView& a, const ArrayView& b) {
  if (a.device.kind == b.device.kind && a.device.ordinal == b.device.ordinal) return;
  auto where = [](const ArrayView& x) {
    return x.device.kind == DeviceKind::kCPU ? "in host memory" : text("on ", backend_name(x.device.kind), ":", x.device.ordinal);
  };
  throw InvalidInput(text(a.name, " is ", where(a), ", ", b.name, " ", where(b), "; all arrays must be on one device (but cu_seqlens_q and kv_len, on the host)"));
}

Problem::Pool PagedView::pool(const ArrayView& a) const {
  return nhd ? Problem::Pool{a.strides[0], a.strides[2], a.strides[1]} : Problem::Pool{a.strides[0], a.strides[1], a.strides[2]};
}

PagedView view_paged(py::handle k, py::handle v, py::handle k_scale, py::handle v_scale, py::handle page_table, py::handle layout,
                     const CallStream* stream) {
  std::string name = to_string(layout, "layout");
  if (name != "HND" && name != "NHD") throw InvalidInput(text("layout must be 'HND' or 'NHD', got '", name, "'"));
  auto view = [stream](py::handle object, const std::string& array, const std::vector<std::string>& dtypes, const std::vector<size_t>& ndims) {
    return view_array(object, array, dtypes, ndims, Innermost::kContiguous, stream ? stream->for_array(object) : kNoStream);
  };
  PagedView c;
  c.nhd = name == "NHD";
  c.k = view(k, "k", {"int8"}, {4});
  c.v = view(v, "v", {"int8"}, {4});
  c.k_scale = view(k_scale, "k_scale", {"float16"}, {4});
  c.v_scale = view(v_scale, "v_scale", {"float16"}, {4});
  c.page_table = view(page_table, "page_table", {"int32"}, {1, 2});
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

ArrayView Call::view(py::handle object, const std::string& name, const std::vector<std::string>& dtypes, const std::vector<size_t>& ndims,
                     Innermost innermost) const {
  return view_array(object, name, dtypes, ndims, innermost, stream_.for_array(object));
}

Call::Call(const CallArguments& a) : environment_(library().read_environment()) {
  if (std::optional<DeviceId> at = device_of(a.q, "q"); at && at->kind != DeviceKind::kCPU) stream_ = resolve_stream(a.stream, a.q, at->ordinal);
  std::vector<ArrayView> lists;
  auto keep = [&lists](ArrayView view) { lists.push_back(std::move(view)); };

  ArrayView q = view(a.q, "q", kFloats, {3});
  p_.q = q.data;
  p_.dtype = to_dtype(q);
  p_.n_q = q.shape[0], p_.n_head = q.shape[1], p_.head_dim = q.shape[2];
  p_.q_stride = q.strides[0], p_.q_head_stride = q.strides[1];
  p_.device = q.device;

  PagedView kv = view_paged(a.k, a.v, a.k_scale, a.v_scale, a.page_table, a.layout, &stream_);
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
    ArrayView ids = view(a.ids, "ids", {"int32"}, {2, 3});
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
    ArrayView widths = view(a.widths, "widths", {"int32"}, {1}, Innermost::kAny);
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
  for (ArrayView* view : {&q, &kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.page_table}) views_.push_back(std::move(*view));
  for (ArrayView& view : lists) views_.push_back(std::move(view));
  set_device(a);
  library().check_problem(p_);
}

// The one device of all arrays (those without elements are anywhere), and the stream that has to wait for their writers.
void Call::set_device(const CallArguments& a) {
  const ArrayView* first = nullptr;
  for (const ArrayView& view : views_) {
    if (view.size() == 0) continue;
    if (!first) p_.device = (first = &view)->device;
    check_same_device(*first, view);
  }
  if (p_.device.kind == DeviceKind::kCPU) {
    if (!a.stream.is_none()) throw InvalidInput("stream is for GPU arrays; these are in host memory");
    std::optional<int64_t> threads;
    if (!a.num_threads.is_none()) threads = to_int(a.num_threads, "num_threads");
    device_ = library().cpu_device(environment_, threads, a.isa.is_none() ? "" : to_string(a.isa, "isa"));
    return;
  }
  if (!a.num_threads.is_none()) throw InvalidInput("num_threads is for arrays in host memory; these are on a GPU");
  {
    py::gil_scoped_release release;
    device_ = library().gpu_device(p_.device);
  }
  wait_for_producers(views_, *device_.gpu, stream_.address);
}

void wait_for_producers(const std::vector<ArrayView>& views, Gpu& gpu, int64_t stream) {
  for (const ArrayView& view : views)
    if (view.producer_stream && dlpack_stream(*view.producer_stream) != dlpack_stream(stream))
      library().order(gpu, reinterpret_cast<void*>(*view.producer_stream), reinterpret_cast<void*>(stream));
}

void Call::synchronize() const {
  if (!device_.gpu) return;
  py::gil_scoped_release release;
  library().synchronize(*device_.gpu, reinterpret_cast<void*>(stream_.address));
}

std::string Call::device() const { return library().name_of(device_); }

const Plan& Call::plan() {
  if (plan_) return *plan_;
  py::gil_scoped_release release;  // a first call may load a module
  plan_ = library().make_plan(p_, device_, kernel_, environment_);
  return *plan_;
}

const Plan& Call::plan(py::object out) {
  if (!out.is_none()) bind_output(out, py::none());
  return plan();
}

void Call::bind_output(py::object out, py::object lse, bool fresh) {
  std::vector<ArrayView> written = {view(out, "out", {dtype_name(p_.dtype)}, {3})};
  check_shape(written[0], {p_.n_q, p_.n_head, p_.head_dim}, "of q's shape");
  p_.out = written[0].data;
  p_.out_stride = written[0].strides[0], p_.out_head_stride = written[0].strides[1];
  if (!lse.is_none()) {
    written.push_back(view(lse, "lse", {"float32"}, {2}));
    check_shape(written[1], {p_.n_q, p_.n_head}, "[n_q, n_head]");
    p_.lse = static_cast<float*>(written[1].data);
    p_.lse_stride = written[1].strides[0];
  }
  for (ArrayView& a : written) {
    if (a.readonly && !fresh) throw InvalidInput(text(a.name, " is read-only"));
    if (a.size() > 0)
      for (const ArrayView& input : views_)
        if (input.size() > 0) check_same_device(input, a);
  }
  if (device_.gpu) wait_for_producers(written, *device_.gpu, stream_.address);
  for (ArrayView& a : written) views_.push_back(std::move(a));
  library().check_output(p_);
}

// Null where the kernel has no use for one.
void* Call::bind_workspace(py::object workspace) {
  if (workspace.is_none()) return nullptr;
  if (p_.device.kind == DeviceKind::kCPU) throw InvalidInput("workspace is for GPU arrays; these are in host memory");
  ArrayView a = view(workspace, "workspace", {"uint8"}, {1});
  if (a.size() < plan_->workspace_bytes) throw InvalidInput(text("workspace has ", a.size(), " bytes, the plan's workspace_bytes are ", plan_->workspace_bytes));
  if (plan_->workspace_bytes == 0) return nullptr;
  if (a.readonly) throw InvalidInput("workspace is read-only");
  constexpr uintptr_t kAlignment = 256;
  if (uintptr_t rest = reinterpret_cast<uintptr_t>(a.data) % kAlignment)
    throw InvalidInput(text("workspace's address is not a multiple of ", kAlignment, " bytes (the remainder is ", rest, ")"));
  for (const ArrayView& input : views_)
    if (input.size() > 0) check_same_device(input, a);
  wait_for_producers({a}, *device_.gpu, stream_.address);
  views_.push_back(std::move(a));
  return views_.back().data;
}

const Plan& Call::run(py::object out, py::object lse, bool fresh, py::object workspace) {
  plan();
  bind_output(out, lse, fresh);
  Launch launch;
  launch.workspace = bind_workspace(workspace);
  launch.stream = reinterpret_cast<void*>(stream_.address);
  run_step(launch);
  return *plan_;
}

// An array of partial state, where the problem is.
template <class T>
T* Call::state(py::handle object, const std::string& name, const std::vector<int64_t>& shape, Access access) {
  T* data = static_cast<T*>(contiguous(object, name, dtype_of<T>(), shape, access, views_, device_.gpu ? &stream_ : nullptr));
  const ArrayView& last = views_.back();
  if (last.size() > 0 && p_.n_q > 0) check_same_device(views_.front(), last);
  if (device_.gpu) wait_for_producers({last}, *device_.gpu, stream_.address);
  return data;
}

void Call::exact_anchors(py::object A, py::object b) {
  plan();
  Launch launch;
  launch.stream = reinterpret_cast<void*>(stream_.address);
  launch.step = cpu::ExactStep::kAnchors;
  launch.state.A = state<float>(A, "A", {p_.n_q, p_.n_head}, kWritten);
  launch.state.b = state<float>(b, "b", {p_.n_q, p_.n_head}, kWritten);
  run_step(launch);
}

void Call::exact_sums(py::object A, py::object b, py::object L, py::object O) {
  plan();
  Launch launch;
  launch.stream = reinterpret_cast<void*>(stream_.address);
  launch.step = cpu::ExactStep::kSums;
  launch.state.A = state<float>(A, "A", {p_.n_q, p_.n_head}, kRead);
  launch.state.b = state<float>(b, "b", {p_.n_q, p_.n_head}, kRead);
  launch.state.L = state<int64_t>(L, "L", {p_.n_q, p_.n_head}, kWritten);
  launch.state.O = state<int64_t>(O, "O", {p_.n_q, p_.n_head, p_.head_dim}, kWritten);
  run_step(launch);
}

void Call::run_step(const Launch& launch) {
  py::gil_scoped_release release;
  library().run(*plan_, p_, launch);
}

void* contiguous(py::handle object, const std::string& name, const char* dtype, const std::vector<int64_t>& shape, Access access,
                 std::vector<ArrayView>& keep, const CallStream* stream) {
  ArrayView a = view_array(object, name, {dtype}, {shape.size()}, Innermost::kContiguous, stream ? stream->for_array(object) : kNoStream);
  if (!stream) need_host(a);
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
