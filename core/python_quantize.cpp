// quantize_kv, and the same into the slots of a paged cache: arrays in host memory or on a card.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "core/border.h"
#include "core/errors.h"
#include "core/python_arrays.h"
#include "core/python_call.h"
#include "core/python_module.h"
#include "core/python_stream.h"
#include "cuda/quantize_launch.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

// Where element `flat` of a C-ordered index lies in a strided view, in elements; `index` is filled with its coordinates.
int64_t offset_of(const ArrayView& a, int64_t flat, size_t dims, std::vector<int64_t>& index) {
  int64_t offset = 0;
  for (size_t i = dims; i-- > 0; flat /= a.shape[i]) {
    index[i] = flat % a.shape[i];
    offset += index[i] * a.strides[i];
  }
  return offset;
}

struct Unquantized {
  ArrayView x;
  int64_t dims, group;
};
Unquantized view_unquantized(py::object object, py::object group_object, int64_t stream) {
  Unquantized u{view_array(object, "x", {"float32", "float16", "bfloat16"}, {1, 2, 3, 4, 5, 6}, Innermost::kContiguous, stream), 0,
                to_int(group_object, "group")};
  u.dims = u.x.shape.back();
  if (u.group < 1 || u.dims < 1 || u.dims % u.group != 0 || u.dims > INT32_MAX)
    throw InvalidInput(text("group ", u.group, " does not divide x's last dimension, ", u.dims));
  if (reinterpret_cast<uintptr_t>(u.x.data) % static_cast<uintptr_t>(u.x.itemsize) != 0) throw InvalidInput("x is misaligned");
  return u;
}

// The shape of the codes, the number of groups, and the device's name.
py::tuple check_quantize(py::object object, py::object group_object) {
  Unquantized u = view_unquantized(object, group_object, kNoStream);
  std::string where = u.x.device.kind == DeviceKind::kCPU ? "cpu" : text(backend_name(u.x.device.kind), ":", u.x.device.ordinal);
  return py::make_tuple(py::tuple(py::cast(u.x.shape)), u.dims / u.group, where);
}

// Codes or scales: C-contiguous in `shape`, or, with slots, the pool [pages, heads, page_size, inner] in any order of strides.
struct Target {
  ArrayView view;
  cuda::QuantizeParams::Pool stride{};
};
Target view_target(py::object object, const std::string& name, const char* dtype, std::vector<int64_t> shape, bool pool, bool fresh, int64_t stream) {
  Target t{view_array(object, name, {dtype}, {pool ? size_t{4} : shape.size()}, Innermost::kContiguous, stream), {}};
  const ArrayView& a = t.view;
  if (pool) {
    if (a.shape[1] != shape[1] || a.shape[3] != shape[2] || a.shape[2] < 1)
      throw InvalidInput(text(name, " must be [pages, ", shape[1], ", page_size, ", shape[2], "], got ", a.describe()));
    t.stride = {a.strides[0], a.strides[1], a.strides[2]};
  } else {
    if (a.shape != shape) throw InvalidInput(text(name, " must be [", join(shape), "], got ", a.describe()));
    int64_t room = 1;
    for (size_t i = shape.size(); i-- > 0; room *= shape[i])
      if (a.size() > 0 && shape[i] > 1 && a.strides[i] != room) throw InvalidInput(text(name, " must be C-contiguous"));
  }
  if (reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(a.itemsize) != 0) throw InvalidInput(text(name, " is misaligned"));
  if (a.readonly && !fresh) throw InvalidInput(text(name, " is read-only"));
  return t;
}

void on_the_host(const Unquantized& u, const cuda::QuantizeParams& p) {
  const ArrayView& x = u.x;
  const int64_t groups = u.dims / u.group, places = p.pages * p.page_size;
  std::vector<int64_t> index(x.shape.size() - 1);
  if (p.slots)
    for (int64_t i = 0; i < x.shape[0]; ++i)
      if (p.slots[i] < 0 || p.slots[i] >= places) throw InvalidInput(text("slots[", i, "] is ", p.slots[i], ", the pool has ", places, " slots"));
  for (int64_t row = 0; row < p.rows; ++row) {
    const char* values = static_cast<const char*>(x.data) + offset_of(x, row, index.size(), index) * x.itemsize;
    int64_t code = row * u.dims, scale = row * groups;
    if (p.slots) {
      const int64_t page = p.slots[index[0]] / p.page_size, slot = p.slots[index[0]] % p.page_size;
      code = page * p.code_stride.page + index[1] * p.code_stride.head + slot * p.code_stride.slot;
      scale = page * p.scale_stride.page + index[1] * p.scale_stride.head + slot * p.scale_stride.slot;
    }
    int64_t bad = library().quantize_cell(values, static_cast<DType>(p.dtype), u.dims, u.group, p.codes + code, p.scales + scale);
    if (bad < 0) continue;
    index.push_back(bad);
    throw InvalidInput(text("x[", join(index), "] is not finite, or too large for a float16 scale (at most about 8.32e6)"));
  }
}

void quantize(py::object object, py::object group, py::object codes_object, py::object scales_object, py::object slots_object, py::object stream_object,
              bool fresh, bool wait) {
  CallStream stream;
  std::optional<DeviceId> at = device_of(object, "x");
  const bool on_card = at && at->kind != DeviceKind::kCPU;
  if (on_card) stream = resolve_stream(stream_object, object, at->ordinal);
  auto for_array = [&](py::handle array) { return on_card ? stream.for_array(array) : kNoStream; };
  Unquantized u = view_unquantized(object, group, for_array(object));
  const ArrayView& x = u.x;
  if (x.device.kind == DeviceKind::kHIP) throw UnsupportedDevice(text("x is on hip:", x.device.ordinal, "; quantizing there is not in this version"));
  if (!on_card && !stream_object.is_none()) throw InvalidInput("stream is for GPU arrays; these are in host memory");

  const bool pool = !slots_object.is_none();
  if (pool && x.shape.size() != 3) throw InvalidInput(text("x must be [n, n_kv, head_dim] for slots of a cache, got ", x.describe()));
  std::vector<int64_t> shape = x.shape;
  Target codes = view_target(codes_object, "codes", "int8", shape, pool, fresh, for_array(codes_object));
  shape.back() = u.dims / u.group;
  Target scales = view_target(scales_object, "scales", "float16", shape, pool, fresh, for_array(scales_object));
  std::vector<ArrayView> views = {x, codes.view, scales.view};

  cuda::QuantizeParams p = {};
  p.x = x.data;
  p.codes = static_cast<int8_t*>(codes.view.data), p.scales = static_cast<uint16_t*>(scales.view.data);
  p.dims = static_cast<int32_t>(u.dims), p.group = static_cast<int32_t>(u.group);
  p.dtype = static_cast<int32_t>(to_dtype(x));
  p.rows = x.size() / u.dims;
  std::fill(std::begin(p.shape), std::end(p.shape), int64_t{1});
  const size_t unused = cuda::kQuantizeDims - (x.shape.size() - 1);
  for (size_t i = 0; i + 1 < x.shape.size(); ++i) p.shape[unused + i] = x.shape[i], p.stride[unused + i] = x.strides[i];
  if (pool) {
    ArrayView slots = view_array(slots_object, "slots", {"int64"}, {1}, Innermost::kContiguous, for_array(slots_object));
    if (slots.shape[0] != x.shape[0]) throw InvalidInput(text("slots must be [", x.shape[0], "], got ", slots.describe()));
    p.pages = codes.view.shape[0], p.page_size = codes.view.shape[2];
    if (scales.view.shape[0] != p.pages || scales.view.shape[2] != p.page_size)
      throw InvalidInput(text("codes and scales must have the same pages and page_size, got ", codes.view.describe(), " and ", scales.view.describe()));
    p.code_stride = codes.stride, p.scale_stride = scales.stride;
    p.slots = static_cast<const int64_t*>(slots.data);
    views.push_back(std::move(slots));
  }
  for (const ArrayView& view : views)
    if (view.size() > 0 && x.size() > 0) check_same_device(x, view);
  if (p.rows == 0) return;

  if (!on_card) {
    py::gil_scoped_release release;
    return on_the_host(u, p);
  }
  Device device;
  {
    py::gil_scoped_release release;
    device = library().gpu_device(x.device);
  }
  wait_for_producers(views, *device.gpu, stream.address);
  py::gil_scoped_release release;
  auto* handle = reinterpret_cast<void*>(stream.address);
  library().quantize_on_card(*device.card, p, handle);
  if (wait) library().synchronize(*device.gpu, handle);
}

}  // namespace

void add_quantize(py::module_& m) {
  m.def("check_quantize", &check_quantize);
  m.def("quantize", &quantize, py::arg("x"), py::arg("group"), py::arg("codes"), py::arg("scales"), py::arg("slots") = py::none(),
        py::arg("stream") = py::none(), py::arg("fresh") = false, py::arg("wait") = false);
}

}  // namespace strata_pa
