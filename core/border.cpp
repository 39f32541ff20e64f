#include "core/border.h"

#include <cstring>

#include "core/partial.h"
#include "core/quantize.h"
#include "core/run.h"

namespace strata_pa {
namespace {

// A function as its Crossing takes it.
template <auto function>
struct Guard;

template <class R, class... A, R (*function)(A...)>
struct Guard<function> {
  using Value = typename Crossing<R(A...)>::Value;

  static void call(Thrown& thrown, std::optional<Value>& value, A... arguments) {
    try {
      if constexpr (std::is_void_v<R>)
        function(std::forward<A>(arguments)...);
      else if constexpr (std::is_reference_v<R>)
        value = &function(std::forward<A>(arguments)...);
      else
        value.emplace(function(std::forward<A>(arguments)...));
    } catch (...) {
      thrown = current_exception();
    }
  }
};
template <auto function>
constexpr auto guard = &Guard<function>::call;

// A member function as a function of its object.
template <auto function>
struct Member;

template <class R, class C, class... A, R (C::*function)(A...)>
struct Member<function> {
  static R call(C& object, A... arguments) { return (object.*function)(std::forward<A>(arguments)...); }
};
template <auto function>
constexpr auto guard_member = guard<Member<function>::call>;

std::string name_of(const Device& device) { return device.name(); }
std::string architecture_of(const Device& device) { return device.architecture(); }
bool built(const Kernel& kernel) { return kernel.built(); }

const Border border = {
    {guard<read_environment>},
    {guard<environment_variables>},
    {guard<set_imma>},
    {guard<get_imma>},
    {guard<cpu_device>},
    {guard<name_of>},
    {guard<architecture_of>},
    {guard<cpu::isas>},
    {guard<cpu::dot_peak>},

    {guard<check_problem>},
    {guard<check_output>},
    {guard<make_plan>},
    {guard<run>},
    {guard<quantize_cell>},
    {guard<exact_finish>},
    {guard<merge_anchors>},
    {guard<merge_sums>},
    {guard<anchors_to_keys>},
    {guard<anchors_from_keys>},
    {guard<merge_partials>},

    {guard<kernel_table>},
    {guard<needs>},
    {guard<built>},
    {guard<kernels_of>},
    {guard<build_facts>},

    {guard<has_images>},
    {guard<gpu_devices>},
    {guard<gpu_device>},
    {guard<gpu>},
    {guard<device_of_memory>},
    {guard<hip_device_of>},
    {guard_member<&Gpu::order>},
    {guard_member<&Gpu::synchronize>},
    {guard_member<&Gpu::allocate>},
    {guard_member<&Gpu::free>},
    {guard_member<&Gpu::copy_to_device>},
    {guard_member<&Gpu::copy_to_host>},
    {guard_member<&Gpu::make_event>},
    {guard_member<&Gpu::destroy_event>},
    {guard_member<&Gpu::record_event>},
    {guard_member<&Gpu::milliseconds>},

    {guard<cuda::built_images>},
    {guard<hip::built_images>},
    {guard<cuda::choose>},
    {guard<cuda::driver_facts>},
    {guard<hip::driver_facts>},
    {guard<cuda::quantize>},
};

}  // namespace
}  // namespace strata_pa

const strata_pa::Border* strata_pa_private_border(const char* version) {
  return std::strcmp(version, STRATA_PA_VERSION) == 0 ? &strata_pa::border : nullptr;
}
