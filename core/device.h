// Devices: where a problem runs. One Device is what a call decided once, before it plans.
#pragma once
#include <optional>
#include <string>

#include "core/switches.h"
#include "core/problem.h"
#include "cpu/cpu.h"

namespace strata_pa {

struct Device {
  DeviceId id;
  const cpu::Isa* isa = nullptr;  // CPU
  int num_threads = 0;            // CPU
  int sm = 0;                     // CUDA: 10 * major + minor

  std::string name() const;          // "cpu", "cuda:0"
  std::string architecture() const;  // "avx512", "sm_90"
};

const char* backend_name(DeviceKind kind);  // "cpu", "cuda", "hip"

// Throws UnsupportedDevice for an instruction set that is unknown or that this machine does not have. `isa` beats the environment.
Device cpu_device(const Environment& environment, std::optional<int64_t> num_threads = {}, const std::string& isa = "");

}  // namespace strata_pa
