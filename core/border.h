// How the Python module calls libstrata_pa. The two are objects of their own and may hold a copy each of the C++ runtime (as in a wheel whose
// compiler links it statically); an exception that crosses finds no handler there. So each function is called through a wrapper that catches
// on the library's side; the caller's side throws the same anew. Private to one build of the two: others have include/strata_pa.h.
#pragma once
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/build_facts.h"
#include "core/cuda_device.h"
#include "core/cuda_quantize.h"
#include "core/device.h"
#include "core/failure.h"
#include "core/hip_device.h"
#include "core/partial.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/switches.h"
#include "core/table.h"

namespace strata_pa {

template <class F>
struct Crossing;

template <class R, class... A>
struct Crossing<R(A...)> {
  using Value = std::conditional_t<std::is_reference_v<R>, std::remove_reference_t<R>*, std::conditional_t<std::is_void_v<R>, char, R>>;
  using Guarded = void (*)(Thrown&, std::optional<Value>&, A...);

  Guarded guarded;

  R operator()(A... arguments) const {
    Thrown thrown;
    std::optional<Value> value;
    guarded(thrown, value, std::forward<A>(arguments)...);
    if (thrown.failure != Failure::kNone) rethrow(thrown);
    if constexpr (std::is_reference_v<R>)
      return **value;
    else if constexpr (!std::is_void_v<R>)
      return *std::move(value);
  }
};

struct Border {
  // Switches and devices
  Crossing<Environment()> read_environment;
  Crossing<const std::vector<Variable>&()> environment_variables;
  Crossing<void(std::optional<bool>)> set_imma;
  Crossing<std::optional<bool>()> get_imma;
  Crossing<Device(const Environment&, std::optional<int64_t>, const std::string&)> cpu_device;
  Crossing<std::string(const Device&)> name_of, architecture_of;
  Crossing<const std::vector<cpu::Isa>&()> isas;
  Crossing<int64_t(const cpu::Isa&, int64_t)> dot_peak;

  // Problems
  Crossing<void(const Problem&)> check_problem, check_output;
  Crossing<Plan(const Problem&, const Device&, const std::optional<std::string>&, const Environment&)> make_plan;
  Crossing<void(const Plan&, const Problem&, const Launch&)> run;
  Crossing<int64_t(const void*, DType, int64_t, int64_t, int8_t*, uint16_t*)> quantize_cell;
  Crossing<void(const Memory&, const Problem&, const cpu::ExactState&)> exact_finish;
  Crossing<void(const Memory&, int64_t, float*, float*, const float*, const float*)> merge_anchors;
  Crossing<void(const Memory&, int64_t, int64_t*, const int64_t*)> merge_sums;
  Crossing<void(const Memory&, int64_t, const float*, const float*, int64_t*)> anchors_to_keys;
  Crossing<void(const Memory&, int64_t, const int64_t*, float*, float*)> anchors_from_keys;
  Crossing<void(const Memory&, int64_t, int64_t, DType, const std::vector<cpu::Partial>&, void*, float*)> merge_partials;

  // Kernels
  Crossing<const std::vector<Kernel>&()> kernel_table;
  Crossing<std::string(const Kernel&)> needs;
  Crossing<bool(const Kernel&)> built;
  Crossing<DeviceKernels(const Device&)> kernels_of;

  Crossing<BuildFacts()> build_facts;

  // GPUs
  Crossing<bool(DeviceKind)> has_images;
  Crossing<std::vector<Device>(DeviceKind)> gpu_devices;
  Crossing<Device(DeviceId)> gpu_device;
  Crossing<Gpu&(DeviceId)> gpu;
  Crossing<DeviceId(DeviceKind, const void*, const std::string&)> device_of_memory;
  Crossing<std::optional<DeviceId>(const void*)> hip_device_of;
  Crossing<void(Gpu&, Handle, Handle)> order;
  Crossing<void(Gpu&, Handle)> synchronize;
  Crossing<Address(Gpu&, int64_t)> allocate;
  Crossing<void(Gpu&, Address)> free;
  Crossing<void(Gpu&, Address, const void*, int64_t)> copy_to_device;
  Crossing<void(Gpu&, void*, Address, int64_t)> copy_to_host;
  Crossing<Handle(Gpu&)> make_event;
  Crossing<void(Gpu&, Handle)> destroy_event;
  Crossing<void(Gpu&, Handle, Handle)> record_event;
  Crossing<double(Gpu&, Handle, Handle)> milliseconds;

  // CUDA, HIP
  Crossing<const cuda::BuiltImages&()> built_images;
  Crossing<const hip::BuiltImages&()> built_code_objects;
  Crossing<cuda::Choice(cuda::Vendor, int, const cuda::Image&)> choose;
  Crossing<DriverFacts()> cuda_driver, hip_driver;
  Crossing<void(cuda::Card&, const cuda::QuantizeParams&, Handle)> quantize_on_card;
};

// The Python module's side. Throws where the library is of another version than the module.
const Border& library();

}  // namespace strata_pa

// The library's side. Null for another version than its own.
extern "C" __attribute__((visibility("default"))) const strata_pa::Border* strata_pa_private_border(const char* version);
