// Partial results in strata_pa._core: states of `exact`, and whole results that merge by their lse.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/border.h"
#include "core/errors.h"
#include "core/python_arrays.h"
#include "core/python_call.h"
#include "core/python_module.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

constexpr size_t kMostParts = 64;  // of one merge by lse

void exact_finish(py::object A, py::object b, py::object L, py::object O, py::object out, py::object lse) {
  ArrayView o = view_array(out, "out", kFloats, {3});
  std::vector<int64_t> rows = {o.shape[0], o.shape[1]};
  std::vector<ArrayView> keep;
  Problem p;
  p.dtype = to_dtype(o);
  p.n_q = o.shape[0], p.n_head = o.shape[1], p.head_dim = o.shape[2];
  p.out = contiguous(out, "out", dtype_name(p.dtype), o.shape, kWritten, keep);
  p.out_stride = p.n_head * p.head_dim, p.out_head_stride = p.head_dim;
  p.lse = contiguous<float>(lse, "lse", rows, kWritten, keep);
  p.lse_stride = p.n_head;
  cpu::ExactState state;
  state.A = contiguous<float>(A, "A", rows, kRead, keep);
  state.b = contiguous<float>(b, "b", rows, kRead, keep);
  state.L = contiguous<int64_t>(L, "L", rows, kRead, keep);
  state.O = contiguous<int64_t>(O, "O", o.shape, kRead, keep);
  py::gil_scoped_release release;
  if (p.n_q > 0) library().exact_finish(p, state);
}

void add_anchors(py::object A_all, py::object b_all, py::object A, py::object b) {
  std::vector<ArrayView> keep;
  std::vector<int64_t> shape = view_array(A_all, "A", {"float32"}, {2}).shape;
  auto* a0 = contiguous<float>(A_all, "A", shape, kWritten, keep);
  auto* b0 = contiguous<float>(b_all, "b", shape, kWritten, keep);
  const float* a1 = contiguous<float>(A, "A", shape, kRead, keep);
  const float* b1 = contiguous<float>(b, "b", shape, kRead, keep);
  library().merge_anchors(shape[0] * shape[1], a0, b0, a1, b1);
}

void add_sums(py::object all, py::object part, const std::string& name) {
  std::vector<ArrayView> keep;
  ArrayView view = view_array(all, name, {"int64"}, {2, 3});
  auto* to = contiguous<int64_t>(all, name, view.shape, kWritten, keep);
  const int64_t* from = contiguous<int64_t>(part, name, view.shape, kRead, keep);
  library().merge_sums(view.size(), to, from);
}

void anchors_to_keys(py::object A, py::object b, py::object keys) {
  std::vector<ArrayView> keep;
  std::vector<int64_t> shape = view_array(A, "A", {"float32"}, {2}).shape;
  const float* a0 = contiguous<float>(A, "A", shape, kRead, keep);
  const float* b0 = contiguous<float>(b, "b", shape, kRead, keep);
  auto* to = contiguous<int64_t>(keys, "keys", {2, shape[0], shape[1]}, kWritten, keep);
  library().anchors_to_keys(shape[0] * shape[1], a0, b0, to);
}

void anchors_from_keys(py::object keys, py::object A, py::object b) {
  std::vector<ArrayView> keep;
  std::vector<int64_t> shape = view_array(keys, "keys", {"int64"}, {3}).shape;
  if (shape[0] != 2) throw InvalidInput(text("keys must be int64 [2, n_q, n_head], got ", view_array(keys, "keys").describe()));
  const int64_t* from = contiguous<int64_t>(keys, "keys", shape, kRead, keep);
  shape.erase(shape.begin());
  auto* a0 = contiguous<float>(A, "A", shape, kWritten, keep);
  auto* b0 = contiguous<float>(b, "b", shape, kWritten, keep);
  library().anchors_from_keys(shape[0] * shape[1], from, a0, b0);
}

// out: an array of outs[0]'s dtype and shape, which may be one of outs; lse: float32.
void merge_partials(const std::vector<py::object>& outs, const std::vector<py::object>& lses, py::object out, py::object lse) {
  if (outs.empty() || outs.size() > kMostParts || outs.size() != lses.size())
    throw InvalidInput(text("outs and lses must be as many, 1 to ", kMostParts, " each, got ", outs.size(), " and ", lses.size()));
  ArrayView first = view_array(outs[0], "outs[0]", kFloats, {3});
  std::vector<int64_t> rows = {first.shape[0], first.shape[1]};
  std::vector<ArrayView> keep;
  std::vector<cpu::Partial> parts;
  for (size_t i = 0; i < outs.size(); ++i)
    parts.push_back({contiguous(outs[i], text("outs[", i, "]"), first.dtype.c_str(), first.shape, kRead, keep),
                     contiguous<float>(lses[i], text("lses[", i, "]"), rows, kRead, keep)});
  void* to = contiguous(out, "out", first.dtype.c_str(), first.shape, kWritten, keep);
  auto* to_lse = contiguous<float>(lse, "lse", rows, kWritten, keep);
  // Each number of out is written after the parts' numbers of that place are read.
  const char* begin = static_cast<char*>(to);
  for (size_t i = 0; i < parts.size(); ++i) {
    const char* other = static_cast<const char*>(parts[i].out);
    const int64_t bytes = first.size() * first.itemsize;
    if (begin != other && begin < other + bytes && other < begin + bytes) throw InvalidInput(text("out overlaps outs[", i, "], without being it"));
  }
  py::gil_scoped_release release;
  library().merge_partials(rows[0] * rows[1], first.shape[2], to_dtype(first), parts, to, to_lse);
}

}  // namespace

void add_partial(py::module_& m) {
  m.def("array_shape", [](py::object array) { return py::tuple(py::cast(view_array(array, "array").shape)); });
  m.def("array_dtype", [](py::object array) { return view_array(array, "array").dtype; });
  m.def("exact_finish", &exact_finish);
  m.def("add_anchors", &add_anchors);
  m.def("add_sums", &add_sums);
  m.def("anchors_to_keys", &anchors_to_keys);
  m.def("anchors_from_keys", &anchors_from_keys);
  m.def("merge_partials", &merge_partials);
}

}  // namespace strata_pa
