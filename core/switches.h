// Every environment variable the library reads, in one table, and the switches that choose a kernel.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace strata_pa {

struct Variable {
  const char* name;
  const char* values;
  const char* meaning;
};
const std::vector<Variable>& environment_variables();

// What the variables say at one moment: a call reads them once, before it plans.
struct Environment {
  bool old = false;       // STRATA_PROMPT_ATTN_OLD
  bool imma = false;      // STRATA_PROMPT_ATTN_IMMA
  std::string kernel;     // STRATA_PA_KERNEL, empty: not set
  std::string force_isa;  // STRATA_PA_FORCE_ISA, empty: not set
  int num_threads = 0;    // STRATA_PA_NUM_THREADS, 0: not set
};
Environment read_environment();  // throws InvalidInput for a value that the variable cannot have

// STRATA_PA_CUDA_DRIVER, else "libcuda.so.1": read whenever the driver is needed.
std::string cuda_driver_path();
// STRATA_PA_HIP_DRIVER; empty: libamdhip64.so, wherever it is found.
std::string hip_driver_path();

inline constexpr int kMaxThreads = 1024;

// set_imma(true | false | none): process-wide, any thread.
void set_imma(std::optional<bool> value);
std::optional<bool> get_imma();

// The kernel that the switches ask for: kernel= beats set_imma beats the environment.
struct Wish {
  std::string kernel;  // empty: the device's default
  std::string by;      // "default", "kernel=", "set_imma(True)", "STRATA_PROMPT_ATTN_OLD=1", ...
  bool must = false;   // kernel=: run it or throw
  std::vector<std::string> notes;
};
// Throws InvalidInput for a name that is not a kernel's.
Wish resolve_switches(const std::optional<std::string>& kernel, const Environment& environment);

}  // namespace strata_pa
