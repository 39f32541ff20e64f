// Python arrays, as the core sees them: NumPy arrays directly, others by DLPack, then __cuda_array_interface__. Nothing is copied.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.h"

namespace strata_pa {

struct ArrayView {
  std::string name;  // the argument's, for messages
  void* data = nullptr;
  std::string dtype;  // "float32", "int8", "bfloat16", ...
  int64_t itemsize = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements; 0 for dimensions of size 1
  DeviceId device;
  bool readonly = false;
  bool numpy = false;
  pybind11::object owner;  // keeps the memory

  int64_t size() const;
  std::string describe() const;  // "float32 [4, 24, 256]"
};

// Throws InvalidType for what is not an array, InvalidInput for strides that are negative or no multiple of the element,
// UnsupportedDevice for memory that this build cannot reach.
ArrayView view_array(pybind11::handle object, const std::string& name);

// The same with the dtypes and the numbers of dimensions that fit.
enum class Innermost { kContiguous, kAny };
ArrayView view_array(pybind11::handle object, const std::string& name, const std::vector<std::string>& dtypes, const std::vector<size_t>& ndims,
                     Innermost innermost = Innermost::kContiguous);

template <class T>
constexpr const char* dtype_of();
template <>
constexpr const char* dtype_of<float>() {
  return "float32";
}
template <>
constexpr const char* dtype_of<int8_t>() {
  return "int8";
}
template <>
constexpr const char* dtype_of<int64_t>() {
  return "int64";
}

DType to_dtype(const ArrayView& view);  // float32, float16, bfloat16

// Python numbers with range checks; `name` is the argument's.
int64_t to_int(pybind11::handle object, const std::string& name);
double to_double(pybind11::handle object, const std::string& name);
bool to_bool(pybind11::handle object, const std::string& name);
std::string to_string(pybind11::handle object, const std::string& name);

// One-dimensional integers of any width in host memory (array or sequence) as int32. A single integer gives one element.
std::vector<int32_t> to_int32_list(pybind11::handle object, const std::string& name);

}  // namespace strata_pa
