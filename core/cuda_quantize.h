// strata_quantize on a card (cuda/quantize_launch.h).
#pragma once
#include "core/cuda_driver.h"
#include "cuda/quantize_launch.h"

namespace strata_pa::cuda {

class Card;

// Enqueues the kernel: no allocation, no synchronisation. Throws UnsupportedDevice where the driver does not take it.
void quantize(Card& card, const QuantizeParams& params, Handle stream);

}  // namespace strata_pa::cuda
