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

std::string name_of(const Device& device) { return device.name(); }
std::string architecture_of(const Device& device) { return device.architecture(); }
bool built(const Kernel& kernel) { return kernel.built(); }

const Border border = {
    {guard<read_environment>},
    {guard<environment_variables>},
    {guard<set_imma>},
    {guard<get_imma>},
    {guard<cpu_device>},
    {guard<cuda_device>},
    {guard<cuda_devices>},
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

    {guard<cuda::built_images>},
    {guard<cuda::choose>},
    {guard<cuda::driver_facts>},
    {guard<cuda::card>},
    {guard<cuda::ordinal_of>},
    {guard<cuda::order>},
    {guard<cuda::synchronize>},
    {guard<cuda::quantize>},
    {guard<cuda::allocate>},
    {guard<cuda::free>},
    {guard<cuda::copy_to_device>},
    {guard<cuda::copy_to_host>},
    {guard<cuda::make_event>},
    {guard<cuda::destroy_event>},
    {guard<cuda::record_event>},
    {guard<cuda::milliseconds>},
};

}  // namespace
}  // namespace strata_pa

const strata_pa::Border* strata_pa_private_border(const char* version) {
  return std::strcmp(version, STRATA_PA_VERSION) == 0 ? &strata_pa::border : nullptr;
}
