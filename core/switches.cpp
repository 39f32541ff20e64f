#include "core/switches.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "core/errors.h"
#include "core/table.h"

namespace strata_pa {
namespace {

constexpr const char* kOld = "STRATA_PROMPT_ATTN_OLD";
constexpr const char* kImma = "STRATA_PROMPT_ATTN_IMMA";
constexpr const char* kKernel = "STRATA_PA_KERNEL";
constexpr const char* kForceIsa = "STRATA_PA_FORCE_ISA";
constexpr const char* kNumThreads = "STRATA_PA_NUM_THREADS";
constexpr const char* kCudaDriver = "STRATA_PA_CUDA_DRIVER";
constexpr const char* kHipDriver = "STRATA_PA_HIP_DRIVER";

std::string value_of(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool flag(const char* name) {
  std::string value = value_of(name);
  if (value != "" && value != "0" && value != "1") throw InvalidInput(text(name, " must be 1, 0 or empty, got '", value, "'"));
  return value == "1";
}

void check_kernel_name(const std::string& name, const char* where) {
  std::vector<std::string> known = kernel_names();
  if (std::find(known.begin(), known.end(), name) == known.end())
    throw InvalidInput(text(where, " '", name, "' is not a kernel; known kernels: ", join(known)));
}

std::atomic<int> imma_switch{-1};  // -1: as the environment says

}  // namespace

const std::vector<Variable>& environment_variables() {
  static const std::vector<Variable> table = {
      {kOld, "1; 0 or empty: off", "run the `fp32` kernel"},
      {kImma, "1; 0 or empty: off", "run the `imma` kernel where the device has it"},
      {kKernel, "a kernel's name; empty: off", "run this kernel where the device has it"},
      {kForceIsa, "scalar, avx2, avxvnni, avx512; empty: the best that the CPU has", "instruction set of the CPU kernels (the bytes are the same)"},
      {kNumThreads, "1 to 1024; empty: the CPUs that the process may run on", "threads of a CPU call that has no `num_threads=`"},
      {kCudaDriver, "a path; empty: libcuda.so.1", "the CUDA driver library, opened at the first GPU call"},
      {kHipDriver, "a path; empty: libamdhip64.so", "the HIP driver library, opened at the first GPU call of a build with AMD kernels"},
  };
  return table;
}

Environment read_environment() {
  Environment e;
  e.old = flag(kOld);
  e.imma = flag(kImma);
  e.kernel = value_of(kKernel);
  if (!e.kernel.empty()) check_kernel_name(e.kernel, kKernel);
  e.force_isa = value_of(kForceIsa);
  std::string threads = value_of(kNumThreads);
  if (!threads.empty()) {
    bool digits = threads.size() <= 4 && threads.find_first_not_of("0123456789") == std::string::npos;
    e.num_threads = digits ? std::atoi(threads.c_str()) : 0;
    if (e.num_threads < 1 || e.num_threads > kMaxThreads)
      throw InvalidInput(text(kNumThreads, " must be a number from 1 to ", kMaxThreads, ", got '", threads, "'"));
  }
  return e;
}

std::string cuda_driver_path() {
  std::string path = value_of(kCudaDriver);
  return path.empty() ? "libcuda.so.1" : path;
}

std::string hip_driver_path() { return value_of(kHipDriver); }

void set_imma(std::optional<bool> value) { imma_switch.store(value ? *value : -1); }

std::optional<bool> get_imma() {
  int value = imma_switch.load();
  return value < 0 ? std::nullopt : std::optional<bool>(value == 1);
}

Wish resolve_switches(const std::optional<std::string>& kernel, const Environment& environment) {
  if (kernel) {
    check_kernel_name(*kernel, "kernel=");
    return {*kernel, "kernel=", true, {}};
  }
  std::optional<bool> imma = get_imma();
  if (imma == true) return {"imma", "set_imma(True)", false, {}};

  Wish wish{"", "default", false, {}};
  auto ask = [&](const std::string& name, const std::string& by) {
    if (!wish.kernel.empty()) return;  // an earlier switch has spoken
    if (imma == false && name == "imma")
      wish.notes.push_back(by + " is overruled by set_imma(False)");
    else
      wish.kernel = name, wish.by = by;
  };
  if (environment.old) ask("fp32", text(kOld, "=1"));
  if (environment.imma) ask("imma", text(kImma, "=1"));
  if (!environment.kernel.empty()) ask(environment.kernel, text(kKernel, "=", environment.kernel));
  return wish;
}

}  // namespace strata_pa
