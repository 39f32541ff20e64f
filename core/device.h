// Devices: where a problem runs. One Device is what a call decided once, before it plans.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/switches.h"
#include "core/problem.h"
#include "cpu/cpu.h"

namespace strata_pa {
class Gpu;
namespace cuda {
class Card;
}
namespace hip {
class Card;
}

struct Device {
  DeviceId id;
  const cpu::Isa* isa = nullptr;  // CPU
  int num_threads = 0;            // CPU
  Gpu* gpu = nullptr;             // GPUs
  int sm = 0;                     // CUDA: 10 * major + minor
  cuda::Card* card = nullptr;     // CUDA: gpu
  hip::Card* hip_card = nullptr;  // HIP: gpu

  std::string name() const;          // "cpu", "cuda:0", "hip:0"
  std::string architecture() const;  // "avx512", "sm_90", "gfx942"
  std::string describe() const;      // "cpu (avx512)", "cuda:0 (NVIDIA H200, sm_90)"
};

inline const char* backend_name(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCPU:
      return "cpu";
    case DeviceKind::kCUDA:
      return "cuda";
    default:
      return "hip";
  }
}

// Throws UnsupportedDevice for an instruction set that is unknown or that this machine does not have. `isa` beats the environment.
Device cpu_device(const Environment& environment, std::optional<int64_t> num_threads = {}, const std::string& isa = "");

// For the GPUs of a kind, which must not be kCPU. Each throws UnsupportedDevice where the vendor's driver cannot be used.
bool has_images(DeviceKind kind);  // in this build; throws nothing
// Every card that the driver has, also those that no kernel serves.
std::vector<Device> gpu_devices(DeviceKind kind);
// Throws UnsupportedDevice for a card that no image of this build has code for, naming the card and what was built.
Device gpu_device(DeviceId id);
Gpu& gpu(DeviceId id);  // also of a card that no kernel serves

// Whose memory an address is; the kind must have images. Throws InvalidInput where the driver does not know it as a device's.
DeviceId device_of_memory(DeviceKind kind, const void* address, const std::string& name);
// Whether it is of a HIP device, whatever its library says of it: some of ROCm's call their devices CUDA's. Throws nothing.
std::optional<DeviceId> hip_device_of(const void* address);

}  // namespace strata_pa
