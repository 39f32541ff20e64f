// Which kernel runs a problem, and why not another.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/problem.h"
#include "core/switches.h"
#include "core/table.h"

namespace strata_pa {

struct Refusal {
  std::string kernel;
  std::vector<std::string> reasons;
};

struct Plan {
  const Kernel* kernel = nullptr;
  Device device;
  int64_t workspace_bytes = 0;     // CPU: what a run takes by itself; GPU: what it may be given
  std::string chosen_by;           // "default", "kernel=", "set_imma(True)", "STRATA_PROMPT_ATTN_OLD=1", ...
  std::vector<Refusal> refused;    // every other kernel
  std::vector<std::string> notes;  // switches that could not be followed
};

// Throws InvalidInput for an unknown kernel name, UnsupportedProblem if no kernel, or not the one of kernel=, can run the problem.
Plan make_plan(const Problem& problem, const Device& device, const std::optional<std::string>& kernel, const Environment& environment);

std::string describe(const Plan& plan);  // in lines: the choice, each refusal, each note

// The kernels that the device has, whatever the problem: the first is its default.
struct DeviceKernels {
  std::vector<const Kernel*> kernels;
  std::vector<Refusal> refused;
};
DeviceKernels kernels_of(const Device& device);

}  // namespace strata_pa
