// The HIP kernels of the table, seen from the host (hip/launch.h).
#pragma once
#include <string>
#include <vector>

#include "core/device.h"
#include "core/problem.h"
#include "hip/launch.h"

namespace strata_pa {
struct Launch;
}

namespace strata_pa::hip {

// What launch.h asks of a problem (alignment, distances). Nothing is asked of the driver.
std::vector<std::string> not_supported_reasons(KernelId id, const Problem& p, const Device& device);

// Loads the kernel for this problem. "": it can be launched; else why the driver does not take it.
std::string prepare(KernelId id, const char* image, const Problem& p, const Device& device);

// Enqueues the kernel on launch.stream: no allocation, no synchronisation, nothing read from device memory, so a call can be captured.
void launch(KernelId id, const char* image, const Problem& p, const Device& device, const Launch& launch);

}  // namespace strata_pa::hip
