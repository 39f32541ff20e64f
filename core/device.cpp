#include "core/device.h"

#include <algorithm>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

#include "core/cuda_device.h"
#include "core/errors.h"

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

std::string Device::architecture() const { return id.kind == DeviceKind::kCPU ? isa->name : text("sm_", sm); }

std::string Device::describe() const { return text(name(), " (", card ? card->name + ", " : "", architecture(), ")"); }

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
  d.id = {DeviceKind::kCUDA, card.ordinal};
  d.sm = card.sm;
  d.card = &card;
  return d;
}

std::vector<Device> cuda_devices() {
  std::vector<Device> list;
  for (int i = 0, n = cuda::count_cards(); i < n; ++i) list.push_back(device_of(cuda::card(i)));
  return list;
}

Device cuda_device(int ordinal) {
  Device d = device_of(cuda::card(ordinal));
  std::string why = cuda::refusal(cuda::Vendor::kNvidia, d.sm, d.describe());
  if (!why.empty()) throw UnsupportedDevice(why);
  return d;
}

}  // namespace strata_pa
