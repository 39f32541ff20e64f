// Python arrays, as the core sees them: NumPy arrays directly, others by DLPack, then __cuda_array_interface__. Nothing is copied.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
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
  std::optional<int64_t> producer_stream;  // __cuda_array_interface__: what is written there must be waited for

  int64_t size() const;
  std::string describe() const;  // "float32 [4, 24, 256]"
};

// The CUDA stream that will read or write the array, as DLPack numbers it (1: the legacy default stream): its library makes that stream
// wait for what it has under way. kNoStream: only the shape is looked at.
inline constexpr int64_t kNoStream = -1;

// Throws InvalidType for what is not an array, InvalidInput for strides that are negative or no multiple of the element,
// UnsupportedDevice for memory that this build cannot reach.
ArrayView view_array(pybind11::handle object, const std::string& name, int64_t stream = kNoStream);

// The same with the dtypes and the numbers of dimensions that fit.
enum class Innermost { kContiguous, kAny };
ArrayView view_array(pybind11::handle object, const std::string& name, const std::vector<std::string>& dtypes, const std::vector<size_t>& ndims,
                     Innermost innermost = Innermost::kContiguous, int64_t stream = kNoStream);

// Where an array is, without exporting it. nullopt: not an array.
std::optional<DeviceId> device_of(pybind11::handle object, const std::string& name);

// Throws UnsupportedDevice for an array that is not in host memory.
void need_host(const ArrayView& view);

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

inline const std::vector<std::string> kFloats = {"float32", "float16", "bfloat16"};
DType to_dtype(const ArrayView& view);  // one of kFloats

// Python numbers with range checks; `name` is the argument's.
int64_t to_int(pybind11::handle object, const std::string& name);
double to_double(pybind11::handle object, const std::string& name);
bool to_bool(pybind11::handle object, const std::string& name);
std::string to_string(pybind11::handle object, const std::string& name);

// One-dimensional integers of any width in host memory (array or sequence) as int32. A single integer gives one element.
std::vector<int32_t> to_int32_list(pybind11::handle object, const std::string& name);

}  // namespace strata_pa
