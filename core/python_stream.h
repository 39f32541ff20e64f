// The CUDA stream of a Python call.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace strata_pa {

struct CallStream {
  int64_t address = 0;       // 0: the legacy default stream
  pybind11::object in_order;  // arrays of this type are in order with the stream already: it is their library's current one. Null: none

  // What the array's library is told by DLPack: the stream that has to wait for its work, or nothing.
  int64_t for_array(pybind11::handle array) const;
};

// DLPack's number of a stream: it calls the legacy default stream 1.
inline int64_t dlpack_stream(int64_t address) { return address == 0 ? 1 : address; }

// `stream` is None (the current stream of q's library on that device: PyTorch's or CuPy's; of other libraries the legacy default stream),
// an address, or an object of PyTorch, CuPy or with __cuda_stream__.
CallStream resolve_stream(pybind11::handle stream, pybind11::handle q, int ordinal);

}  // namespace strata_pa
