#include "core/table.h"

#include <algorithm>

#include "core/errors.h"

namespace strata_pa {
namespace {

const Serves kPortable = {
    /*head_dims=*/{64, 128, 256},
    /*groups=*/{32, 64, 128, 256},
    /*heads_per_kv=*/1,
    16,
    /*granularities=*/{1, 4, 16, 64, 128},
    {DType::kFloat32, DType::kFloat16, DType::kBFloat16},
    /*max_entries=*/int64_t{1} << 24,
};
// v1 and v2 serve the geometry that they were published for.
const Serves kPublished = {{256}, {64}, 12, 12, {1}, {DType::kFloat32}, int64_t{1} << 24};

cpu::RunOptions options(const Device& device, const Launch& launch) {
  cpu::RunOptions o;
  o.num_threads = device.num_threads;
  o.step = launch.step;
  o.state = launch.state;
  return o;
}
template <cpu::Kernel kernel>
int64_t cpu_workspace(const Problem& p, const Device& device) {
  return cpu::scratch_bytes(kernel, p, *device.isa, options(device, {}));
}
template <cpu::Kernel kernel>
void cpu_launch(const Problem& p, const Device& device, const Launch& launch) {
  cpu::run(kernel, p, *device.isa, options(device, launch));
}

bool contains(const std::vector<int64_t>& list, int64_t x) { return std::find(list.begin(), list.end(), x) != list.end(); }

const char* backend_in_words(DeviceKind kind) {
  return kind == DeviceKind::kCPU ? "the CPU" : kind == DeviceKind::kCUDA ? "CUDA devices" : "HIP devices";
}

}  // namespace

const std::vector<Kernel>& kernel_table() {
  constexpr DeviceKind cpu = DeviceKind::kCPU, cuda = DeviceKind::kCUDA;
  static const std::vector<Kernel> table = {
      // name, backend, min_sm, opt_in, portable
      {"fp32", cpu, 0, false, true, "FP32 arithmetic on dequantized values", kPortable, cpu_workspace<cpu::Kernel::kFp32>,
       cpu_launch<cpu::Kernel::kFp32>},
      {"imma", cpu, 0, true, true, "INT8 products with an exact 24-bit split of the other operand, online softmax", kPortable,
       cpu_workspace<cpu::Kernel::kImma>, cpu_launch<cpu::Kernel::kImma>},
      {"exact", cpu, 0, true, true, "order-free exact integer sums, for tiles of many queries", kPortable,
       cpu_workspace<cpu::Kernel::kExact>, cpu_launch<cpu::Kernel::kExact>},

      {"v2", cuda, 80, false, false, "FP16 MMA (m16n8k16), q and p as FP16 hi + lo, cp.async pipeline", kPublished, nullptr, nullptr},
      {"v1", cuda, 75, false, false, "FP16 MMA (m16n8k8), q and p as FP16 hi + lo", kPublished, nullptr, nullptr},
      {"fp32", cuda, 75, false, true, "FP32 arithmetic on dequantized values", kPortable, nullptr, nullptr},
      {"imma", cuda, 80, true, true, "INT8 MMA with an exact 24-bit split of the other operand, online softmax", kPortable, nullptr, nullptr},
      {"exact", cuda, 80, true, true, "order-free exact integer sums, for tiles of many queries", kPortable, nullptr, nullptr},
  };
  return table;
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& k : kernel_table())
    if (std::find(names.begin(), names.end(), k.name) == names.end()) names.push_back(k.name);
  return names;
}

std::string needs(const Kernel& k) { return k.min_sm ? text(backend_in_words(k.backend), " from sm_", k.min_sm) : backend_in_words(k.backend); }

std::vector<std::string> not_supported_reasons(const Kernel& k, const Device& device) {
  if (k.backend != device.id.kind) return {text("exists for ", needs(k), " only, this device is ", device.name())};
  if (!k.launch) return {text("this build has no ", backend_name(k.backend), " kernels")};
  if (device.sm < k.min_sm) return {text("needs sm_", k.min_sm, ", this device is ", device.architecture())};
  return {};
}

std::vector<std::string> not_supported_reasons(const Kernel& k, const Problem& p, const Device& device) {
  std::vector<std::string> reasons = not_supported_reasons(k, device);
  if (!reasons.empty()) return reasons;
  const Serves& s = k.serves;
  if (!contains(s.head_dims, p.head_dim)) reasons.push_back(text("head_dim ", p.head_dim, " is not one of ", join(s.head_dims)));
  if (!contains(s.groups, p.group)) reasons.push_back(text("scale group ", p.group, " is not one of ", join(s.groups)));
  if (p.heads_per_kv() < s.heads_per_kv_min || p.heads_per_kv() > s.heads_per_kv_max)
    reasons.push_back(text(p.heads_per_kv(), " query heads per KV head (", p.n_head, " / ", p.n_kv, ") are not from ", s.heads_per_kv_min, " to ",
                           s.heads_per_kv_max));
  if (!contains(s.granularities, p.granularity))
    reasons.push_back(text("granularity ", p.granularity, " is not one of ", join(s.granularities)));
  if (std::find(s.dtypes.begin(), s.dtypes.end(), p.dtype) == s.dtypes.end()) reasons.push_back(text("q is ", dtype_name(p.dtype)));
  if (p.max_entries() > s.max_entries) reasons.push_back(text("a row's list has up to ", p.max_entries(), " entries, more than ", s.max_entries));
  return reasons;
}

}  // namespace strata_pa
