// A GPU of either vendor, as the host sees it beyond its kernels: what it is, its streams and its memory. One object for each device lives as long
// as the process. Every call makes the device current and restores what was current before; a failed call throws DriverError.
#pragma once
#include <cstdint>
#include <string>

#include "core/problem.h"

namespace strata_pa {

using Handle = void*;                // a driver's context, module, function, stream or event
using Address = unsigned long long;  // in a device's memory

class Gpu {
 public:
  explicit Gpu(DeviceId at) : id(at) {}
  virtual ~Gpu() = default;
  Gpu(const Gpu&) = delete;

  const DeviceId id;
  std::string name;          // "NVIDIA H200"
  std::string architecture;  // "sm_90", "gfx942"
  int max_shared = 0;        // bytes that a block may take
  int processors = 0;

  // "": the device runs code of its own of that image. Else a sentence on what is done instead.
  virtual std::string note(const char* image) = 0;

  // Work that is on `later` from now on waits for what is on `earlier`.
  virtual void order(Handle earlier, Handle later) = 0;
  virtual void synchronize(Handle stream) = 0;

  // For self tests and measurements where no array library is at hand.
  virtual Address allocate(int64_t bytes) = 0;  // throws InvalidInput for a negative number
  virtual void free(Address address) = 0;
  virtual void copy_to_device(Address to, const void* from, int64_t bytes) = 0;
  virtual void copy_to_host(void* to, Address from, int64_t bytes) = 0;  // waits for the legacy default stream
  virtual Handle make_event() = 0;
  virtual void destroy_event(Handle event) = 0;
  virtual void record_event(Handle event, Handle stream) = 0;
  virtual double milliseconds(Handle first, Handle last) = 0;  // between two events that have happened
};

struct DriverFacts {
  std::string path, version;  // version: "13.0", of CUDA or HIP
};

}  // namespace strata_pa
