#include "core/table.h"

#include <algorithm>

#include "core/cuda_device.h"
#include "core/cuda_kernels.h"
#include "core/errors.h"
#include "core/hip_images.h"
#include "core/hip_kernels.h"

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
// v1 and v2 serve the geometry that they were published for, with any lists and types.
const Serves kPublished = {{256}, {64}, 12, 12, kPortable.granularities, kPortable.dtypes, kPortable.max_entries};

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
void cpu_launch(const Kernel&, const Problem& p, const Device& device, const Launch& launch) {
  cpu::run(kernel, p, *device.isa, options(device, launch));
}

template <cuda::KernelId id>
int64_t cuda_workspace(const Problem& p, const Device& device) {
  return cuda::workspace(id, p, device);
}
int64_t no_workspace(const Problem&, const Device&) { return 0; }

// A GPU's columns: id is the vendor's name of the kernel, and the vendor's functions do the work.
template <auto id>
void gpu_launch(const Kernel& k, const Problem& p, const Device& device, const Launch& x) {
  launch(id, k.image, p, device, x);
}
template <auto id>
std::vector<std::string> gpu_reasons(const Problem& p, const Device& device) {
  return not_supported_reasons(id, p, device);
}
template <auto id>
std::string gpu_prepare(const Kernel& k, const Problem& p, const Device& device) {
  return prepare(id, k.image, p, device);
}

bool contains(const std::vector<int64_t>& list, int64_t x) { return std::find(list.begin(), list.end(), x) != list.end(); }

const char* backend_in_words(DeviceKind kind) {
  return kind == DeviceKind::kCPU ? "the CPU" : kind == DeviceKind::kCUDA ? "CUDA devices" : "HIP devices";
}

template <cpu::Kernel kernel>
Kernel cpu_row(const char* name, bool opt_in, const char* what) {
  return {name, DeviceKind::kCPU, 0, opt_in, true, what, kPortable, nullptr, cpu_workspace<kernel>, cpu_launch<kernel>, nullptr, nullptr};
}
template <cuda::KernelId id>
Kernel cuda_row(const char* name, int min_sm, bool opt_in, bool portable, const char* what, const Serves& serves, const char* image) {
  return {name,         DeviceKind::kCUDA, min_sm,          opt_in,           portable,        what, serves, image,
          cuda_workspace<id>, gpu_launch<id>, gpu_reasons<id>, gpu_prepare<id>};
}
// Its image has its name.
template <hip::KernelId id>
Kernel hip_row(const char* name, bool opt_in, const char* what) {
  return {name, DeviceKind::kHIP, 0, opt_in, true, what, kPortable, name, no_workspace, gpu_launch<id>, gpu_reasons<id>, gpu_prepare<id>};
}

// Of the embedded images: is there one, in words what it holds, and has it code for the device?
bool has_image(const Kernel& k) { return k.image && (k.backend == DeviceKind::kHIP ? hip::find_image(k.image) != nullptr : cuda::find_image(k.image) != nullptr); }
std::string image_in_words(const Kernel& k) {
  return k.backend == DeviceKind::kHIP ? hip::describe(*hip::find_image(k.image)) : cuda::describe(*cuda::find_image(k.image));
}
bool image_serves(const Kernel& k, const Device& device) {
  if (k.backend == DeviceKind::kHIP) return hip::choose(device.architecture(), *hip::find_image(k.image)) != nullptr;
  return cuda::choose(cuda::Vendor::kNvidia, device.sm, *cuda::find_image(k.image)).kind != cuda::Choice::kNone;
}

}  // namespace

const std::vector<Kernel>& kernel_table() {
  using cuda::KernelId;
  static const std::vector<Kernel> table = {
      // name, opt_in, what
      cpu_row<cpu::Kernel::kFp32>("fp32", false, "FP32 arithmetic on dequantized values"),
      cpu_row<cpu::Kernel::kImma>("imma", true, "INT8 products with an exact 24-bit split of the other operand, online softmax"),
      cpu_row<cpu::Kernel::kExact>("exact", true, "order-free exact integer sums, for tiles of many queries"),

      // name, min_sm, opt_in, portable, what, serves, image
      cuda_row<KernelId::kV2>("v2", 80, false, false, "FP16 MMA (m16n8k16), q and p as FP16 hi + lo, cp.async pipeline", kPublished, "v2_sm80"),
      cuda_row<KernelId::kV1>("v1", 75, false, false, "FP16 MMA (m16n8k8), q and p as FP16 hi + lo", kPublished, "v1_sm75"),
      cuda_row<KernelId::kFp32>("fp32", 75, false, true, "FP32 arithmetic on dequantized values", kPortable, "fp32_sm75"),
      cuda_row<KernelId::kImma>("imma", 80, true, true, "INT8 MMA with an exact 24-bit split of the other operand, online softmax", kPortable,
                                "imma_sm80"),
      cuda_row<KernelId::kExact>("exact", 80, true, true, "order-free exact integer sums, for tiles of many queries", kPortable, "exact_sm80"),

      // name, opt_in, what
      hip_row<hip::KernelId::kFp32>("fp32", false, "FP32 arithmetic on dequantized values"),
      hip_row<hip::KernelId::kImma>("imma", true, "INT8 dot products (v_dot4) with an exact 24-bit split of the other operand, online softmax"),
      hip_row<hip::KernelId::kExact>("exact", true, "order-free exact integer sums, by INT8 dot products (v_dot4)"),
  };
  return table;
}

bool Kernel::built() const { return backend == DeviceKind::kCPU || has_image(*this); }

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& k : kernel_table())
    if (std::find(names.begin(), names.end(), k.name) == names.end()) names.push_back(k.name);
  return names;
}

std::string needs(const Kernel& k) { return k.min_sm ? text(backend_in_words(k.backend), " from sm_", k.min_sm) : backend_in_words(k.backend); }

std::vector<std::string> not_supported_reasons(const Kernel& k, const Device& device) {
  if (k.backend != device.id.kind) return {text("exists for ", needs(k), " only, this device is ", device.name())};
  if (!k.built())
    return {has_images(k.backend) ? text("this build has no image ", k.image) : text("this build has no ", backend_name(k.backend), " kernels")};
  if (device.sm < k.min_sm) return {text("needs sm_", k.min_sm, ", this device is ", device.architecture())};
  if (k.image && !image_serves(k, device)) return {text("its image has ", image_in_words(k), ", nothing for ", device.architecture())};
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
  if (reasons.empty() && k.more_reasons) reasons = k.more_reasons(p, device);
  return reasons;
}

}  // namespace strata_pa
