// Partial results in strata_pa._core: states of `exact`, and whole results that merge by their lse; in host memory or on a card.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/border.h"
#include "core/errors.h"
#include "core/python_arrays.h"
#include "core/python_call.h"
#include "core/python_module.h"
#include "core/python_stream.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

// The arrays of one piece of work: C-contiguous, all where the first one is. On a card the stream is the current one of its library.
class Arrays {
 public:
  Arrays(py::handle first, const std::string& name) {
    std::optional<DeviceId> at = device_of(first, name);
    if (!at || at->kind == DeviceKind::kCPU) return;
    if (at->kind == DeviceKind::kHIP) throw UnsupportedDevice(text(name, " is on hip:", at->ordinal, "; partial results there are not in this version"));
    stream_ = resolve_stream(py::none(), first, at->ordinal);
    py::gil_scoped_release release;
    memory_.card = library().gpu_device(*at).card;
    memory_.stream = reinterpret_cast<void*>(stream_.address);
  }

  void* get(py::handle object, const std::string& name, const char* dtype, const std::vector<int64_t>& shape, Access access) {
    void* data = contiguous(object, name, dtype, shape, access, views_, memory_.card ? &stream_ : nullptr);
    if (views_.back().size() > 0) check_same_device(views_.front(), views_.back());
    if (DeviceId at = views_.back().device; at.kind == DeviceKind::kHIP)  // whatever its library says
      throw UnsupportedDevice(text(name, " is on hip:", at.ordinal, "; partial results there are not in this version"));
    if (memory_.card) wait_for_producers({views_.back()}, *memory_.card, stream_.address);
    return data;
  }
  template <class T>
  T* get(py::handle object, const std::string& name, const std::vector<int64_t>& shape, Access access) {
    return static_cast<T*>(get(object, name, dtype_of<T>(), shape, access));
  }
  const Memory& memory() const { return memory_; }

 private:
  CallStream stream_;
  Memory memory_;
  std::vector<ArrayView> views_;
};

void finish(py::object A, py::object b, py::object L, py::object O, py::object out, py::object lse) {
  ArrayView o = view_array(out, "out", kFloats, {3});
  std::vector<int64_t> rows = {o.shape[0], o.shape[1]};
  Arrays arrays(out, "out");
  Problem p;
  p.dtype = to_dtype(o);
  p.n_q = o.shape[0], p.n_head = o.shape[1], p.head_dim = o.shape[2];
  p.out = arrays.get(out, "out", dtype_name(p.dtype), o.shape, kWritten);
  p.out_stride = p.n_head * p.head_dim, p.out_head_stride = p.head_dim;
  p.lse = arrays.get<float>(lse, "lse", rows, kWritten);
  p.lse_stride = p.n_head;
  cpu::ExactState state;
  state.A = arrays.get<float>(A, "A", rows, kRead);
  state.b = arrays.get<float>(b, "b", rows, kRead);
  state.L = arrays.get<int64_t>(L, "L", rows, kRead);
  state.O = arrays.get<int64_t>(O, "O", o.shape, kRead);
  py::gil_scoped_release release;
  if (p.n_q > 0) library().exact_finish(arrays.memory(), p, state);
}

void add_anchors(py::object A_all, py::object b_all, py::object A, py::object b) {
  std::vector<int64_t> shape = view_array(A_all, "A", {"float32"}, {2}).shape;
  Arrays arrays(A_all, "A");
  auto* a0 = arrays.get<float>(A_all, "A", shape, kWritten);
  auto* b0 = arrays.get<float>(b_all, "b", shape, kWritten);
  const float* a1 = arrays.get<float>(A, "A", shape, kRead);
  const float* b1 = arrays.get<float>(b, "b", shape, kRead);
  py::gil_scoped_release release;
  library().merge_anchors(arrays.memory(), shape[0] * shape[1], a0, b0, a1, b1);
}

void add_sums(py::object all, py::object part, const std::string& name) {
  ArrayView view = view_array(all, name, {"int64"}, {2, 3});
  Arrays arrays(all, name);
  auto* to = arrays.get<int64_t>(all, name, view.shape, kWritten);
  const int64_t* from = arrays.get<int64_t>(part, name, view.shape, kRead);
  py::gil_scoped_release release;
  library().merge_sums(arrays.memory(), view.size(), to, from);
}

void keys_of_anchors(py::object A, py::object b, py::object keys) {
  std::vector<int64_t> shape = view_array(A, "A", {"float32"}, {2}).shape;
  Arrays arrays(A, "A");
  const float* a0 = arrays.get<float>(A, "A", shape, kRead);
  const float* b0 = arrays.get<float>(b, "b", shape, kRead);
  auto* to = arrays.get<int64_t>(keys, "keys", {2, shape[0], shape[1]}, kWritten);
  py::gil_scoped_release release;
  library().anchors_to_keys(arrays.memory(), shape[0] * shape[1], a0, b0, to);
}

void anchors_of_keys(py::object keys, py::object A, py::object b) {
  ArrayView view = view_array(keys, "keys", {"int64"}, {3});
  if (view.shape[0] != 2) throw InvalidInput(text("keys must be int64 [2, n_q, n_head], got ", view.describe()));
  std::vector<int64_t> rows = {view.shape[1], view.shape[2]};
  Arrays arrays(keys, "keys");
  const int64_t* from = arrays.get<int64_t>(keys, "keys", view.shape, kRead);
  auto* a0 = arrays.get<float>(A, "A", rows, kWritten);
  auto* b0 = arrays.get<float>(b, "b", rows, kWritten);
  py::gil_scoped_release release;
  library().anchors_from_keys(arrays.memory(), rows[0] * rows[1], from, a0, b0);
}

// out: an array of outs[0]'s dtype and shape, which may be one of outs; lse: float32.
void merge(const std::vector<py::object>& outs, const std::vector<py::object>& lses, py::object out, py::object lse) {
  if (outs.empty() || outs.size() > kMostParts || outs.size() != lses.size())
    throw InvalidInput(text("outs and lses must be as many, 1 to ", kMostParts, " each, got ", outs.size(), " and ", lses.size()));
  ArrayView first = view_array(outs[0], "outs[0]", kFloats, {3});
  std::vector<int64_t> rows = {first.shape[0], first.shape[1]};
  Arrays arrays(outs[0], "outs[0]");
  std::vector<cpu::Partial> parts;
  for (size_t i = 0; i < outs.size(); ++i)
    parts.push_back({arrays.get(outs[i], text("outs[", i, "]"), first.dtype.c_str(), first.shape, kRead),
                     arrays.get<float>(lses[i], text("lses[", i, "]"), rows, kRead)});
  void* to = arrays.get(out, "out", first.dtype.c_str(), first.shape, kWritten);
  auto* to_lse = arrays.get<float>(lse, "lse", rows, kWritten);
  // Each number of out is written after the parts' numbers of that place are read.
  const char* begin = static_cast<char*>(to);
  for (size_t i = 0; i < parts.size(); ++i) {
    const char* other = static_cast<const char*>(parts[i].out);
    const int64_t bytes = first.size() * first.itemsize;
    if (begin != other && begin < other + bytes && other < begin + bytes) throw InvalidInput(text("out overlaps outs[", i, "], without being it"));
  }
  py::gil_scoped_release release;
  library().merge_partials(arrays.memory(), rows[0] * rows[1], first.shape[2], to_dtype(first), parts, to, to_lse);
}

}  // namespace

void add_partial(py::module_& m) {
  m.def("array_shape", [](py::object array) { return py::tuple(py::cast(view_array(array, "array").shape)); });
  m.def("array_device", [](py::object array) {
    DeviceId at = view_array(array, "array").device;
    return at.kind == DeviceKind::kCPU ? std::string("cpu") : text(backend_name(at.kind), ":", at.ordinal);
  });
  m.def("array_dtype", [](py::object array) { return view_array(array, "array").dtype; });
  m.def("exact_finish", &finish);
  m.def("add_anchors", &add_anchors);
  m.def("add_sums", &add_sums);
  m.def("anchors_to_keys", &keys_of_anchors);
  m.def("anchors_from_keys", &anchors_of_keys);
  m.def("merge_partials", &merge);
}

}  // namespace strata_pa
