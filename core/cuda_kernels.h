// The CUDA kernels of the table, seen from the host: what each needs beyond the table's columns, and its launches (cuda/launch.h).
#pragma once
#include <string>
#include <vector>

#include "core/device.h"
#include "core/problem.h"
#include "cuda/launch.h"

namespace strata_pa {
struct Launch;
}

namespace strata_pa::cuda {

// What launch.h asks of a problem (alignment, distances) and of the card (shared memory). Nothing is asked of the driver.
std::vector<std::string> not_supported_reasons(KernelId id, const Problem& p, const Device& device);

// Loads the kernel for this problem. "": it can be launched; else why the driver does not take it.
std::string prepare(KernelId id, const char* image, const Problem& p, const Device& device);

// Enqueues the kernel on launch.stream: no allocation, no synchronisation, nothing read from device memory, so a call can be captured.
void launch(KernelId id, const char* image, const Problem& p, const Device& device, const Launch& launch);

// Bytes of device memory with which launch() takes a faster way to the same bytes; 0: there is none for the problem on this card.
int64_t workspace(KernelId id, const Problem& p, const Device& device);

// The function that runs a problem: "strata_v2_d256_g64".
std::string symbol(KernelId id, const Problem& p);

}  // namespace strata_pa::cuda
