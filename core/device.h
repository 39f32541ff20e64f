// Devices: where a problem runs. One Device is what a call decided once, before it plans.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/switches.h"
#include "core/problem.h"
#include "cpu/cpu.h"

namespace strata_pa {
namespace cuda {
class Card;
}

struct Device {
  DeviceId id;
  const cpu::Isa* isa = nullptr;  // CPU
  int num_threads = 0;            // CPU
  int sm = 0;                     // CUDA: 10 * major + minor
  cuda::Card* card = nullptr;     // CUDA

  std::string name() const;          // "cpu", "cuda:0"
  std::string architecture() const;  // "avx512", "sm_90"
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

// Every card that the driver has, also those that no kernel serves.
std::vector<Device> cuda_devices();
// Throws UnsupportedDevice for a card that no image of this build has code for, naming the card and what was built.
Device cuda_device(int ordinal);

}  // namespace strata_pa
