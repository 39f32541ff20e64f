// Quantizing K or V to the cache's format.
#pragma once
#include <cstdint>

#include "core/problem.h"

namespace strata_pa {

// `dims` contiguous values of one cell and KV head. Per group, in FP32: scale = binary16(max|x| / 127), code = clamp(rint(x / scale), -127, 127).
// A scale of 0 (every x is 0, or max|x| is at most 127 * 2^-25 so that binary16 has no such scale) gives codes 0.
// Returns -1, or the position of a value that is not finite or that is too large for a binary16 scale.
int64_t quantize_cell(const void* x, DType dtype, int64_t dims, int64_t group, int8_t* codes, uint16_t* scales);

}  // namespace strata_pa
