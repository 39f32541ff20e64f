#include "core/python_stream.h"

#include <string>
#include <utility>

#include "core/errors.h"
#include "core/python_arrays.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

int64_t checked(py::handle value) {
  int64_t address = to_int(value, "stream");
  if (address < 0) throw InvalidInput(text("stream must be the address of a stream, or 0, got ", address));
  return address;
}

// The library's module if it has been imported and q is one of its arrays, and their type.
std::pair<py::object, py::object> library_of(py::handle q, const char* name, const char* type) {
  py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains(name) || !py::hasattr(modules[name], type)) return {};
  py::object module = modules[name], array = module.attr(type);
  return py::isinstance(q, array) ? std::make_pair(module, array) : std::pair<py::object, py::object>{};
}

CallStream current_stream(py::handle q, int ordinal) {
  if (auto [torch, tensor] = library_of(q, "torch", "Tensor"); torch)
    return {checked(torch.attr("cuda").attr("current_stream")(ordinal).attr("cuda_stream")), tensor};
  if (auto [cupy, ndarray] = library_of(q, "cupy", "ndarray"); cupy) {
    py::object cuda = cupy.attr("cuda"), device = cuda.attr("Device")(ordinal);
    device.attr("__enter__")();  // CuPy keeps a current stream for each device
    py::object stream = cuda.attr("get_current_stream")();
    device.attr("__exit__")(py::none(), py::none(), py::none());
    return {checked(stream.attr("ptr")), ndarray};
  }
  return {};
}

}  // namespace

int64_t CallStream::for_array(py::handle array) const { return in_order && py::isinstance(array, in_order) ? kNoStream : dlpack_stream(address); }

CallStream resolve_stream(py::handle stream, py::handle q, int ordinal) {
  try {
    if (stream.is_none()) return current_stream(q, ordinal);
    if (py::hasattr(stream, "__cuda_stream__")) {  // (version, address), from a method or, as first proposed, a property
      py::object protocol = stream.attr("__cuda_stream__");
      if (PyCallable_Check(protocol.ptr())) protocol = protocol();
      if (!py::isinstance<py::tuple>(protocol) || py::len(protocol) != 2)
        throw InvalidType("stream: its __cuda_stream__ is not a pair (version, address)");
      return {checked(py::reinterpret_borrow<py::tuple>(protocol)[1]), {}};
    }
    for (const char* name : {"cuda_stream", "ptr"})
      if (py::hasattr(stream, name)) return {checked(stream.attr(name)), {}};
    if (PyIndex_Check(stream.ptr()) && !PyBool_Check(stream.ptr())) return {checked(stream), {}};
  } catch (py::error_already_set& error) {
    throw InvalidInput(text("stream: ", std::string(py::str(error.value()))));
  }
  throw InvalidType(text("stream must be None, an address, or a stream of PyTorch, CuPy or with __cuda_stream__, got ",
                         std::string(py::str(py::type::handle_of(stream).attr("__name__")))));
}

}  // namespace strata_pa
