#include "core/device.h"

#include <algorithm>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

#include "core/cuda_device.h"
#include "core/errors.h"
#include "core/hip_device.h"

namespace strata_pa {
namespace {

// The CPUs that the process may run on.
int available_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return std::min(CPU_COUNT(&set), kMaxThreads);
#endif
  return std::min(std::max(1, static_cast<int>(std::thread::hardware_concurrency())), kMaxThreads);
}

const cpu::Isa& forced_isa(const std::string& name, const char* by) {
  const cpu::Isa* isa = cpu::find_isa(name);
  if (isa && isa->supported) return *isa;
  std::vector<std::string> paths;
  for (const cpu::Isa& i : cpu::isas()) paths.push_back(text(i.name, i.supported ? "" : text(" (not on this machine: needs ", i.requires_, ")")));
  throw UnsupportedDevice(text(by, "'", name, "' ", isa ? "is not supported by this machine" : "is not an instruction-set path of this build",
                               "; paths: ", join(paths)));
}

}  // namespace

std::string Device::name() const { return id.kind == DeviceKind::kCPU ? "cpu" : text(backend_name(id.kind), ":", id.ordinal); }

std::string Device::architecture() const { return id.kind == DeviceKind::kCPU ? isa->name : gpu->architecture; }

std::string Device::describe() const { return text(name(), " (", gpu ? gpu->name + ", " : "", architecture(), ")"); }

Device cpu_device(const Environment& environment, std::optional<int64_t> num_threads, const std::string& isa) {
  if (num_threads && (*num_threads < 1 || *num_threads > kMaxThreads))
    throw InvalidInput(text("num_threads must be from 1 to ", kMaxThreads, ", got ", *num_threads));
  Device d;
  d.isa = !isa.empty()                     ? &forced_isa(isa, "isa=")
          : !environment.force_isa.empty() ? &forced_isa(environment.force_isa, "STRATA_PA_FORCE_ISA=")
                                           : &cpu::best_isa();
  d.num_threads = num_threads ? static_cast<int>(*num_threads) : environment.num_threads ? environment.num_threads : available_cpus();
  return d;
}

static Device device_of(cuda::Card& card) {
  Device d;
  d.id = card.id;
  d.gpu = d.card = &card;
  d.sm = card.sm;
  return d;
}
static Device device_of(hip::Card& card) {
  Device d;
  d.id = card.id;
  d.gpu = d.hip_card = &card;
  return d;
}
static Device any_device(DeviceId id) { return id.kind == DeviceKind::kHIP ? device_of(hip::card(id.ordinal)) : device_of(cuda::card(id.ordinal)); }

bool has_images(DeviceKind kind) { return kind == DeviceKind::kHIP ? !hip::built_images().images.empty() : !cuda::built_images().images.empty(); }

std::vector<Device> gpu_devices(DeviceKind kind) {
  std::vector<Device> list;
  for (int i = 0, n = kind == DeviceKind::kHIP ? hip::count_cards() : cuda::count_cards(); i < n; ++i) list.push_back(any_device({kind, i}));
  return list;
}

Device gpu_device(DeviceId id) {
  Device d = any_device(id);
  std::string why = id.kind == DeviceKind::kHIP ? hip::refusal(d.architecture(), d.describe()) : cuda::refusal(cuda::Vendor::kNvidia, d.sm, d.describe());
  if (!why.empty()) throw UnsupportedDevice(why);
  return d;
}

Gpu& gpu(DeviceId id) { return *any_device(id).gpu; }

DeviceId device_of_memory(DeviceKind kind, const void* address, const std::string& name) {
  if (kind == DeviceKind::kCUDA) return {kind, cuda::ordinal_of(address, name)};
  hip::Driver::get();  // says why there is none
  if (std::optional<DeviceId> id = hip_device_of(address)) return *id;
  throw InvalidInput(text(name, " is not memory of a HIP device"));
}

std::optional<DeviceId> hip_device_of(const void* address) {
  if (!has_images(DeviceKind::kHIP)) return {};
  std::optional<int> ordinal = hip::ordinal_of(address);
  return ordinal ? std::optional<DeviceId>({DeviceKind::kHIP, *ordinal}) : std::nullopt;
}

}  // namespace strata_pa
