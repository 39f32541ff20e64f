// The kernels on partial results on a card (cuda/partial_launch.h).
#pragma once
#include "core/cuda_device.h"
#include "cuda/partial_launch.h"

namespace strata_pa::cuda {

// Enqueues the kernel with as many threads. Throws UnsupportedDevice where the driver does not take it.
void launch_partial(Card& card, const char* symbol, const PartialParams& params, int64_t threads, Handle stream);

}  // namespace strata_pa::cuda
