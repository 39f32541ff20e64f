// The CUDA stream of a Python call.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace strata_pa {

// `stream` is None (the current stream of q's library on that device: PyTorch's or CuPy's; of other libraries the legacy default stream 0),
// an address, or an object of PyTorch, CuPy or with __cuda_stream__. Returns the address; 0: the legacy default stream.
int64_t resolve_stream(pybind11::handle stream, pybind11::handle q, int ordinal);

// The same stream as DLPack numbers it: it calls the legacy default stream 1.
inline int64_t dlpack_stream(int64_t stream) { return stream == 0 ? 1 : stream; }

}  // namespace strata_pa
