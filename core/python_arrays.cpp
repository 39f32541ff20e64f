#include "core/python_arrays.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "core/border.h"
#include "core/errors.h"
#include "core/python_stream.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

// DLPack's binary interface (versions 0 and 1): what a capsule points to.
namespace dlpack {
enum DeviceType : int32_t { kCPU = 1, kCUDA = 2, kCUDAHost = 3, kROCM = 10, kROCMHost = 11, kCUDAManaged = 13 };
struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;  // null: C-contiguous
  uint64_t byte_offset;
};
struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};
struct ManagedVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;  // 1: read-only, 2: a copy
  Tensor tensor;
};
}  // namespace dlpack

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

// Our own message in front of what a library's exporter said.
[[noreturn]] void exporter_failed(const std::string& name, const py::error_already_set& error) {
  throw InvalidInput(text(name, ": its library does not export it: ", std::string(py::str(error.value()))));
}

const char* vendor_name(DeviceKind kind) { return kind == DeviceKind::kHIP ? "HIP" : "CUDA"; }

[[noreturn]] void no_backend(const std::string& name, const std::string& device, const char* backend) {
  throw UnsupportedDevice(text(name, " is in the memory of ", device, "; this build is without ", backend, " (STRATA_PA_", backend,
                               "=OFF), and arrays are not copied between devices"));
}

// Where an array is whose library says `claimed`. Some of ROCm's libraries say CUDA, so of a GPU's memory the pointer decides.
DeviceId located(const std::string& name, DeviceId claimed, const void* data) {
  if (claimed.kind == DeviceKind::kCPU) return claimed;
  if (data)
    if (std::optional<DeviceId> id = library().hip_device_of(data)) return *id;
  if (!library().has_images(claimed.kind)) no_backend(name, text(vendor_name(claimed.kind), " device ", claimed.ordinal), vendor_name(claimed.kind));
  if (claimed.kind == DeviceKind::kHIP && data) return library().device_of_memory(claimed.kind, data, name);  // says what is wrong
  return claimed;
}

// What a library says by DLPack; refused where no pointer could make it right.
DeviceId claimed_device(const std::string& name, int64_t type, int64_t id) {
  DeviceId claimed{DeviceKind::kCPU, static_cast<int>(id)};
  switch (type) {
    case dlpack::kCPU:
    case dlpack::kCUDAHost:
    case dlpack::kROCMHost:
      return {};
    case dlpack::kCUDA:
    case dlpack::kCUDAManaged:
      claimed.kind = DeviceKind::kCUDA;
      break;
    case dlpack::kROCM:
      claimed.kind = DeviceKind::kHIP;
      break;
    default:
      throw UnsupportedDevice(text(name, " is on a device of a kind (DLPack type ", type, ") that no backend serves"));
  }
  return library().has_images(DeviceKind::kHIP) ? claimed : located(name, claimed, nullptr);
}

DeviceId dlpack_device(py::handle object, const std::string& name) {
  py::tuple device = object.attr("__dlpack_device__")();
  return claimed_device(name, py::int_(device[0]).cast<int64_t>(), py::int_(device[1]).cast<int64_t>());
}

bool has_dlpack(py::handle object) { return py::hasattr(object, "__dlpack__") && py::hasattr(object, "__dlpack_device__"); }
bool has_interface(py::handle object) { return py::hasattr(object, "__cuda_array_interface__"); }

bool is_jax(py::handle object) {
  std::string module = py::str(py::type::handle_of(object).attr("__module__"));
  return module.rfind("jax", 0) == 0;
}

// From strides in bytes (or elements, with unit 1) to the strides of a view.
void set_strides(ArrayView& a, const std::vector<int64_t>& strides, int64_t unit) {
  a.strides.assign(a.shape.size(), 0);
  if (a.size() == 0) return;
  for (size_t i = 0; i < a.shape.size(); ++i) {
    if (a.shape[i] == 1) continue;
    if (strides[i] < 0) throw InvalidInput(text(a.name, " has a negative stride in dimension ", i, " (", strides[i] / unit, " elements)"));
    if (strides[i] % unit != 0)
      throw InvalidInput(text(a.name, " has a stride of ", strides[i], " bytes in dimension ", i, ", not a multiple of its element of ", unit));
    a.strides[i] = strides[i] / unit;
  }
}

ArrayView view_numpy(py::handle object, const std::string& name) {
  auto array = py::reinterpret_borrow<py::array>(object);
  // A mask would be ignored.
  py::dict modules = py::module_::import("sys").attr("modules");
  if (modules.contains("numpy.ma") && py::isinstance(object, modules["numpy.ma"].attr("MaskedArray")))
    throw InvalidType(text(name, " is a numpy.ma.MaskedArray; masks are not served"));
  ArrayView a;
  a.name = name;
  a.owner = array;
  a.numpy = true;
  a.readonly = !array.writeable();
  a.data = const_cast<void*>(array.data());
  py::dtype dtype = array.dtype();
  a.dtype = py::str(dtype.attr("name"));
  a.itemsize = dtype.itemsize();
  if (!dtype.attr("isnative").cast<bool>()) a.dtype += " of foreign byte order";
  a.shape.assign(array.shape(), array.shape() + array.ndim());
  set_strides(a, std::vector<int64_t>(array.strides(), array.strides() + array.ndim()), std::max<int64_t>(1, a.itemsize));
  return a;
}

std::string dlpack_dtype(const dlpack::Tensor& t) {
  static const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  std::string kind = t.dtype.code < std::size(kinds) ? kinds[t.dtype.code] : text("DLPack type ", int{t.dtype.code}, " of bits ");
  if (kind == "bool" && t.dtype.bits == 8 && t.dtype.lanes == 1) return kind;
  return text(kind, int{t.dtype.bits}, t.dtype.lanes == 1 ? "" : text("x", t.dtype.lanes));
}

ArrayView view_dlpack(py::handle object, const std::string& name, int64_t stream) {
  ArrayView a;
  a.name = name;
  py::object capsule;
  try {
    a.device = dlpack_device(object, name);
    py::dict arguments;
    // JAX takes a stream's address only, not the protocol's -1; without one it waits until the array is there. ROCm's default stream has the number 0.
    const bool is_default = stream == dlpack_stream(0) && a.device.kind == DeviceKind::kHIP;
    if (a.device.kind != DeviceKind::kCPU && !is_jax(object)) arguments["stream"] = is_default ? 0 : stream;
    try {
      capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0), **arguments);
    } catch (py::error_already_set& error) {  // a library from before DLPack 1.0
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = object.attr("__dlpack__")(**arguments);
    }
  } catch (py::error_already_set& error) {
    exporter_failed(name, error);
  }
  const dlpack::Tensor* t = nullptr;
  // The capsule stays unconsumed: it frees the tensor when this view drops it.
  a.owner = capsule;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->major != 1) throw InvalidInput(text(name, " comes by DLPack version ", managed->major, ", versions 0 and 1 are understood"));
    if (managed->flags & 2) throw InvalidInput(text(name, ": its library exports a copy, not its memory"));
    a.readonly = managed->flags & 1;
    t = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    t = &static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor;
  } else {
    throw InvalidType(text(name, ": __dlpack__ gave no DLPack capsule"));
  }
  // JAX arrays are immutable; older exporters cannot say so.
  a.readonly = a.readonly || is_jax(object);
  a.data = static_cast<char*>(t->data) + t->byte_offset;
  a.device = located(name, a.device, t->data);
  a.dtype = dlpack_dtype(*t);
  if (a.dtype == "bfloat16" || t->dtype.lanes == 1) a.itemsize = t->dtype.bits / 8;
  a.shape.assign(t->shape, t->shape + t->ndim);
  std::vector<int64_t> strides(a.shape.size(), 1);
  for (size_t i = a.shape.size(); i-- > 1;) strides[i - 1] = strides[i] * a.shape[i];
  if (t->strides) strides.assign(t->strides, t->strides + t->ndim);
  set_strides(a, strides, 1);
  return a;
}

py::dict interface_of(py::handle object, const std::string& name) {
  try {
    return object.attr("__cuda_array_interface__");
  } catch (py::error_already_set& error) {
    exporter_failed(name, error);
  }
}

// A part of the dictionary as a C++ value.
template <class T>
T entry(const py::dict& d, const char* key, const std::string& name) {
  try {
    return d[key].cast<T>();
  } catch (const std::exception&) {  // absent, or of another type
    throw InvalidInput(text(name, ": its __cuda_array_interface__ has no usable '", key, "'"));
  }
}
bool has_entry(const py::dict& d, const char* key) { return d.contains(key) && !d[key].is_none(); }

using DataPair = std::pair<int64_t, bool>;  // an address, and whether it is read-only

// An array without elements has no address, and is nowhere.
DeviceId interface_device(const py::dict& d, const std::string& name) {
  const bool cuda = library().has_images(DeviceKind::kCUDA);
  if (!cuda && !library().has_images(DeviceKind::kHIP)) no_backend(name, "a CUDA device", "CUDA");
  const DeviceKind other = cuda ? DeviceKind::kCUDA : DeviceKind::kHIP;
  auto* data = reinterpret_cast<void*>(entry<DataPair>(d, "data", name).first);
  if (!data) return {other, 0};
  std::optional<DeviceId> id = library().hip_device_of(data);
  return id ? *id : library().device_of_memory(other, data, name);
}

std::string interface_dtype(const std::string& typestr, int64_t& itemsize) {
  std::string kind = typestr.substr(1, 1);
  itemsize = std::atoi(typestr.c_str() + 2);
  std::string name = kind == "f" ? "float" : kind == "i" ? "int" : kind == "u" ? "uint" : kind == "b" ? "bool" : kind == "c" ? "complex" : "void";
  return text(name, name == "bool" ? "" : text(8 * itemsize), typestr[0] == '>' && itemsize > 1 ? " of foreign byte order" : "");
}

ArrayView view_interface(py::handle object, const std::string& name) {
  py::dict d = interface_of(object, name);
  ArrayView a;
  a.name = name;
  a.owner = py::reinterpret_borrow<py::object>(object);
  a.device = interface_device(d, name);
  if (has_entry(d, "mask")) throw InvalidType(text(name, " has a mask; masks are not served"));
  auto [address, readonly] = entry<DataPair>(d, "data", name);
  a.data = reinterpret_cast<void*>(address);
  a.readonly = readonly;
  a.shape = entry<std::vector<int64_t>>(d, "shape", name);
  std::string typestr = entry<std::string>(d, "typestr", name);
  if (typestr.size() < 3) throw InvalidInput(text(name, ": '", typestr, "' is not a type of __cuda_array_interface__"));
  a.dtype = interface_dtype(typestr, a.itemsize);
  int64_t unit = std::max<int64_t>(1, a.itemsize);
  std::vector<int64_t> strides(a.shape.size(), unit);
  for (size_t i = a.shape.size(); i-- > 1;) strides[i - 1] = strides[i] * a.shape[i];
  if (has_entry(d, "strides")) strides = entry<std::vector<int64_t>>(d, "strides", name);
  if (strides.size() != a.shape.size()) throw InvalidInput(text(name, " has ", a.shape.size(), " dimensions and ", strides.size(), " strides"));
  set_strides(a, strides, unit);
  if (has_entry(d, "stream")) a.producer_stream = entry<int64_t>(d, "stream", name);
  return a;
}

}  // namespace

int64_t ArrayView::size() const {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

std::string ArrayView::describe() const { return text(dtype, " [", join(shape), "]"); }

std::optional<DeviceId> device_of(py::handle object, const std::string& name) {
  if (py::isinstance<py::array>(object)) return DeviceId{};
  try {
    if (has_dlpack(object)) return dlpack_device(object, name);
  } catch (py::error_already_set& error) {
    exporter_failed(name, error);
  }
  if (has_interface(object)) return interface_device(interface_of(object, name), name);
  return {};
}

void need_host(const ArrayView& a) {
  if (a.device.kind != DeviceKind::kCPU)
    throw UnsupportedDevice(text(a.name, " is in the memory of a ", vendor_name(a.device.kind), " device (", backend_name(a.device.kind), ":", a.device.ordinal,
                                 "); it must be in host memory"));
}

ArrayView view_array(py::handle object, const std::string& name, int64_t stream) {
  if (py::isinstance<py::array>(object)) return view_numpy(object, name);
  if (has_dlpack(object)) return view_dlpack(object, name, stream);
  if (has_interface(object)) return view_interface(object, name);
  throw InvalidType(text(name, " must be an array (NumPy, DLPack or __cuda_array_interface__), got ", type_name(object)));
}

ArrayView view_array(py::handle object, const std::string& name, const std::vector<std::string>& dtypes, const std::vector<size_t>& ndims,
                     Innermost innermost, int64_t stream) {
  ArrayView a = view_array(object, name, stream);
  if (std::find(dtypes.begin(), dtypes.end(), a.dtype) == dtypes.end()) {
    std::string hint = dtypes.size() > 1 ? "" : a.numpy ? text(" (use .astype(numpy.", dtypes[0], "))") : text(" (convert it to ", dtypes[0], ")");
    throw InvalidType(text(name, " must be ", join(dtypes, " or "), ", got ", a.describe(), hint));
  }
  if (std::find(ndims.begin(), ndims.end(), a.shape.size()) == ndims.end())
    throw InvalidInput(text(name, " must have ", join(ndims, " or "), " dimensions, got ", a.describe()));
  if (innermost == Innermost::kContiguous && a.size() > 0 && a.shape.back() > 1 && a.strides.back() != 1)
    throw InvalidInput(text(name, ": the innermost dimension must be contiguous, its stride is ", a.strides.back(), " elements"));
  return a;
}

DType to_dtype(const ArrayView& a) {
  return a.dtype == "float32" ? DType::kFloat32 : a.dtype == "float16" ? DType::kFloat16 : DType::kBFloat16;
}

int64_t to_int(py::handle object, const std::string& name) {
  auto index = py::reinterpret_steal<py::object>(PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr()));
  if (!index) {
    PyErr_Clear();
    throw InvalidType(text(name, " must be an integer, got ", type_name(object)));
  }
  int overflow = 0;
  int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow) throw InvalidInput(text(name, " does not fit 64 bits: ", std::string(py::str(index))));
  return value;
}

double to_double(py::handle object, const std::string& name) {
  double value = PyBool_Check(object.ptr()) ? -1.0 : PyFloat_AsDouble(object.ptr());
  if (PyBool_Check(object.ptr()) || PyErr_Occurred()) {
    PyErr_Clear();
    throw InvalidType(text(name, " must be a number, got ", type_name(object)));
  }
  return value;
}

bool to_bool(py::handle object, const std::string& name) {
  std::string type = type_name(object);
  if (!PyBool_Check(object.ptr()) && type != "bool" && type != "bool_") throw InvalidType(text(name, " must be True or False, got ", type));
  return py::bool_(py::reinterpret_borrow<py::object>(object));
}

std::string to_string(py::handle object, const std::string& name) {
  if (!py::isinstance<py::str>(object)) throw InvalidType(text(name, " must be a string, got ", type_name(object)));
  return object.cast<std::string>();
}

std::vector<int32_t> to_int32_list(py::handle object, const std::string& name) {
  std::vector<int64_t> values;
  bool array = py::isinstance<py::array>(object) || py::hasattr(object, "__dlpack_device__") || py::hasattr(object, "__cuda_array_interface__");
  if (array) {
    static const std::vector<std::string> integers = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"};
    ArrayView a = view_array(object, name, integers, {0, 1}, Innermost::kAny);
    need_host(a);
    int64_t stride = a.shape.empty() ? 0 : a.strides[0];
    for (int64_t i = 0; i < a.size(); ++i) {
      const char* x = static_cast<const char*>(a.data) + i * stride * a.itemsize;
      int64_t value = 0;
      // Little-endian, as every platform that is built for.
      std::memcpy(&value, x, static_cast<size_t>(a.itemsize));
      int shift = 64 - 8 * static_cast<int>(a.itemsize);
      if (a.dtype[0] == 'i') value = static_cast<int64_t>(static_cast<uint64_t>(value) << shift) >> shift;
      values.push_back(value);
    }
  } else if (py::isinstance<py::sequence>(object) && !py::isinstance<py::str>(object)) {
    for (py::handle item : py::reinterpret_borrow<py::sequence>(object)) values.push_back(to_int(item, text(name, "[", values.size(), "]")));
  } else {
    values.push_back(to_int(object, name));
  }
  std::vector<int32_t> list;
  for (int64_t value : values) {
    if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
      throw InvalidInput(text(name, "[", list.size(), "] does not fit 32 bits: ", value));
    list.push_back(static_cast<int32_t>(value));
  }
  return list;
}

}  // namespace strata_pa
