// The one ordered table of kernels. Planning, running, capabilities(), the tests' parametrization and the documentation's support
// table read it; nothing else compares a capability.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/problem.h"
#include "cpu/cpu.h"

namespace strata_pa {

// The problems that a kernel serves: any page_size, number of pages, KV heads, queries and sequences, and these.
struct Serves {
  std::vector<int64_t> head_dims;
  std::vector<int64_t> groups;
  int64_t heads_per_kv_min, heads_per_kv_max;
  std::vector<int64_t> granularities;
  std::vector<DType> dtypes;
  int64_t max_entries;  // of one row's list
};

struct Launch {
  void* stream = nullptr;     // GPU backends
  void* workspace = nullptr;  // GPU backends: of at least the plan's workspace_bytes, 256-byte aligned; or null
  cpu::ExactStep step = cpu::ExactStep::kWhole;  // exact
  cpu::ExactState state;                         // exact
};

struct Kernel {
  const char* name;
  DeviceKind backend;
  int min_sm;         // CUDA: the least architecture that has it; 0 elsewhere
  bool opt_in;        // runs only when switched on; the others are a device's defaults, in the table's order
  bool portable;      // the same bytes on every device (docs/numerics.md)
  const char* what;
  Serves serves;
  const char* image;  // GPUs: the file of cuda/ or hip/ that has its code
  int64_t (*workspace)(const Problem&, const Device&);
  void (*launch)(const Kernel&, const Problem&, const Device&, const Launch&);
  // What the columns above cannot say of a problem on a device that has the kernel. Null: nothing.
  std::vector<std::string> (*more_reasons)(const Problem&, const Device&);
  // Asks the device's driver for the kernel. "": it is ready; else why not. Null: always ready.
  std::string (*prepare)(const Kernel&, const Problem&, const Device&);

  bool built() const;  // in this build
};

const std::vector<Kernel>& kernel_table();
std::vector<std::string> kernel_names();  // each once

// Which devices have the kernel, in words: "CUDA devices from sm_80", "the CPU".
std::string needs(const Kernel& kernel);

// Empty: the kernel can run the problem there, as far as can be said before prepare(). Otherwise each reason with the numbers in question.
std::vector<std::string> not_supported_reasons(const Kernel& kernel, const Problem& problem, const Device& device);
// The part of it that depends on the device alone.
std::vector<std::string> not_supported_reasons(const Kernel& kernel, const Device& device);

}  // namespace strata_pa
