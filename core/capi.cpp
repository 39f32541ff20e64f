// The C API (include/strata_pa.h) over the core. Every function ends in guarded(), or cannot fail.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>

#include "core/build_facts.h"
#include "core/device.h"
#include "core/partial.h"
#include "core/failure.h"
#include "core/gpu.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/quantize.h"
#include "core/run.h"
#include "core/switches.h"
#include "core/table.h"
#include "include/strata_pa.h"

using namespace strata_pa;

struct strata_pa_context {
  Device device;  // of a CPU: as it was at the creation; a plan asks the environment anew
  std::optional<int64_t> num_threads;
  std::string isa;
  std::string text;
  std::map<std::string, std::string> refusals;  // "": the device has the kernel
};

struct strata_pa_plan {
  Plan plan;
  std::string text;
  std::map<std::string, std::string> refusals;
};

namespace {

constexpr uintptr_t kAlignment = 256;  // of allocated memory and of a workspace

static_assert(int{STRATA_PA_INVALID_INPUT} == static_cast<int>(Failure::kInvalidInput) && int{STRATA_PA_INVALID_TYPE} == static_cast<int>(Failure::kInvalidType) &&
              int{STRATA_PA_UNSUPPORTED_PROBLEM} == static_cast<int>(Failure::kUnsupportedProblem) &&
              int{STRATA_PA_UNSUPPORTED_DEVICE} == static_cast<int>(Failure::kUnsupportedDevice) &&
              int{STRATA_PA_DRIVER_ERROR} == static_cast<int>(Failure::kDriver) && int{STRATA_PA_OUT_OF_MEMORY} == static_cast<int>(Failure::kOutOfMemory) &&
              int{STRATA_PA_INTERNAL_ERROR} == static_cast<int>(Failure::kInternal));
static_assert(int{STRATA_PA_FLOAT16} == static_cast<int>(DType::kFloat16) && int{STRATA_PA_BFLOAT16} == static_cast<int>(DType::kBFloat16));
static_assert(int{STRATA_PA_CUDA} == static_cast<int>(DeviceKind::kCUDA) && int{STRATA_PA_HIP} == static_cast<int>(DeviceKind::kHIP));

thread_local std::string last_error;

template <class Work>
strata_pa_status guarded(const Work& work) noexcept {
  try {
    work();
    return STRATA_PA_OK;
  } catch (...) {
    Thrown thrown = current_exception();
    last_error = std::move(thrown.what);
    return static_cast<strata_pa_status>(thrown.failure);
  }
}

template <class T>
T& need(T* pointer, const char* name) {
  if (!pointer) throw InvalidInput(text(name, " is NULL"));
  return *pointer;
}

// The first fields of a structure, as many as the caller knows; `rest` has the others. `least`: the size that its first version had.
template <class T>
T known(const T* given, const char* name, size_t least, const T& rest) {
  static_assert(std::is_trivially_copyable_v<T>);
  size_t size = need(given, name).size;
  if (size < least || size > sizeof(T))
    throw InvalidInput(text(name, "->size must be the size of the structure, from ", least, " to ", sizeof(T), ", got ", size));
  T copy = rest;
  std::memcpy(&copy, given, size);
  return copy;
}

strata_pa_problem empty_problem() {
  strata_pa_problem p = {};
  p.size = sizeof p;
  p.n_seq = p.granularity = 1;
  p.causal = 1;
  p.window_left = -1;
  return p;
}

DType to_dtype(int32_t tag, const char* name) {
  if (tag < STRATA_PA_FLOAT32 || tag > STRATA_PA_BFLOAT16)
    throw InvalidType(text(name, " must be STRATA_PA_FLOAT32 (0), STRATA_PA_FLOAT16 (1) or STRATA_PA_BFLOAT16 (2), got ", tag));
  return static_cast<DType>(tag);
}

Problem::Pool to_pool(const strata_pa_pool_stride& s) { return {s.page, s.head, s.cell}; }

// The core's problem, and the sequence bounds where the caller has none.
struct Checked {
  Problem p;
  int32_t whole[2] = {0, 0};

  Checked(const strata_pa_problem* given, const Device& device) {
    const strata_pa_problem c = known(given, "problem", sizeof(strata_pa_problem), empty_problem());
    p.device = device.id;
    p.q = c.q, p.dtype = to_dtype(c.dtype, "problem->dtype");
    p.n_q = c.n_q, p.n_head = c.n_head, p.head_dim = c.head_dim;
    p.q_stride = c.q_stride, p.q_head_stride = c.q_head_stride;
    p.k = c.k, p.v = c.v, p.k_scale = c.k_scale, p.v_scale = c.v_scale;
    p.pages = c.pages, p.n_kv = c.n_kv, p.page_size = c.page_size, p.group = c.group;
    p.k_stride = to_pool(c.k_stride), p.v_stride = to_pool(c.v_stride);
    p.k_scale_stride = to_pool(c.k_scale_stride), p.v_scale_stride = to_pool(c.v_scale_stride);
    p.page_table = c.page_table, p.n_seq = c.n_seq, p.max_pages = c.max_pages, p.page_table_stride = c.page_table_stride;
    p.kv_len = c.kv_len, p.cu_seqlens_q = c.cu_seqlens_q;
    if (!p.cu_seqlens_q && p.n_seq == 1) {
      if (p.n_q < 0 || p.n_q > INT32_MAX) throw InvalidInput(text("the number of queries must be from 0 to ", INT32_MAX, ", got ", p.n_q));
      whole[1] = static_cast<int32_t>(p.n_q);
      p.cu_seqlens_q = whole;
    }
    p.ids = c.ids, p.cap = c.cap, p.ids_stride = c.ids_stride, p.ids_head_stride = c.ids_head_stride;
    p.widths = c.widths, p.widths_stride = c.widths_stride, p.granularity = c.granularity;
    if (c.causal != 0 && c.causal != 1) throw InvalidInput(text("problem->causal must be 0 or 1, got ", c.causal));
    p.causal = c.causal == 1;
    p.window_left = c.window_left;
    p.sm_scale = c.sm_scale == 0 && p.head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(p.head_dim)) : c.sm_scale;
    p.out = c.out, p.out_stride = c.out_stride, p.out_head_stride = c.out_head_stride;
    p.lse = c.lse, p.lse_stride = c.lse_stride;
    check_problem(p);
    if (device.id.kind != DeviceKind::kCPU) {
      check_memory(device, {{"q", p.q, p.n_q}, {"ids", p.ids, p.n_q * p.cap}, {"widths", p.widths, p.n_q}, {"page_table", p.page_table, p.max_pages}});
      check_memory(device, {{"k", p.k, p.pages}, {"v", p.v, p.pages}, {"k_scale", p.k_scale, p.pages}, {"v_scale", p.v_scale, p.pages}});
    }
  }
  Checked(const Checked&) = delete;  // p points into it

  void check_output(const Device& device) const {
    strata_pa::check_output(p);
    if (device.id.kind != DeviceKind::kCPU) check_memory(device, {{"out", p.out, p.n_q}, {"lse", p.lse, p.n_q}});
  }

 private:
  struct Array {
    const char* name;
    const void* data;
    int64_t size;  // 0: no memory is needed
  };
  // A GPU that is given an address of the host, or of another card, takes the whole process's context down.
  static void check_memory(const Device& device, std::initializer_list<Array> arrays) {
    for (const Array& a : arrays) {
      if (!a.data || a.size == 0) continue;
      int ordinal = device_of_memory(device.id.kind, a.data, a.name).ordinal;
      if (ordinal != device.id.ordinal)
        throw InvalidInput(text(a.name, " is memory of ", backend_name(device.id.kind), ":", ordinal, ", the context is of ", device.name()));
    }
  }
};

Device device_of(int32_t kind, int32_t ordinal, std::optional<int64_t> num_threads, const std::string& isa) {
  switch (kind) {
    case STRATA_PA_CPU:
      if (ordinal != 0) throw UnsupportedDevice(text("there is one CPU device, of ordinal 0, got ", ordinal));
      return cpu_device(read_environment(), num_threads, isa);
    case STRATA_PA_CUDA:
      if (!has_images(DeviceKind::kCUDA)) throw UnsupportedDevice("this build is without CUDA (STRATA_PA_CUDA=OFF)");
      return gpu_device({DeviceKind::kCUDA, ordinal});
    case STRATA_PA_HIP:
      if (!has_images(DeviceKind::kHIP)) throw UnsupportedDevice("this build is without HIP (STRATA_PA_HIP=OFF)");
      return gpu_device({DeviceKind::kHIP, ordinal});
    default:
      throw InvalidType(text("options->device must be STRATA_PA_CPU (0), STRATA_PA_CUDA (1) or STRATA_PA_HIP (2), got ", kind));
  }
}

const char* find(const std::map<std::string, std::string>& texts, const char* name) {
  auto found = name ? texts.find(name) : texts.end();
  return found == texts.end() ? nullptr : found->second.c_str();
}

// A map with "" for each kernel that is not refused.
std::map<std::string, std::string> refusals(const std::vector<Refusal>& refused) {
  std::map<std::string, std::string> texts;
  for (const std::string& name : kernel_names()) texts[name] = "";
  for (const Refusal& r : refused) texts[r.kernel] = join(r.reasons, "; ");
  return texts;
}

bool is_cpu(const Device& device) { return device.id.kind == DeviceKind::kCPU; }

// The plan may have been made for another problem.
void check_kernel(const Plan& plan, const Problem& p) {
  if (auto reasons = not_supported_reasons(*plan.kernel, p, plan.device); !reasons.empty())
    throw UnsupportedProblem(
        text("the plan's kernel ", plan.kernel->name, " cannot run this problem on ", plan.device.describe(), ": ", join(reasons, "; ")));
}

void* bind_workspace(const strata_pa_plan& plan, const Problem& p, void* workspace, size_t bytes) {
  const Device& device = plan.plan.device;
  if (!workspace) return nullptr;
  if (is_cpu(device)) throw InvalidInput("workspace must be NULL on a CPU, which allocates its own");
  auto needed = static_cast<size_t>(plan.plan.kernel->workspace(p, device));
  if (bytes < needed) throw InvalidInput(text("workspace has ", bytes, " bytes, the problem's are ", needed));
  if (uintptr_t rest = reinterpret_cast<uintptr_t>(workspace) % kAlignment)
    throw InvalidInput(text("workspace's address must be a multiple of ", kAlignment, " bytes, the remainder is ", rest));
  return needed ? workspace : nullptr;
}

std::string quoted(const std::string& s) {
  std::string q = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') q += '\\';
    q += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return q + '"';
}
std::string quoted(const std::vector<std::string>& list) {
  std::vector<std::string> items;
  for (const std::string& s : list) items.push_back(quoted(s));
  return text("[", join(items), "]");
}

struct KernelTexts {
  std::vector<std::string> needs;
  KernelTexts() {
    for (const Kernel& k : kernel_table()) needs.push_back(strata_pa::needs(k));
  }
};

}  // namespace

int32_t strata_pa_abi(void) { return STRATA_PA_ABI; }

const char* strata_pa_version(void) { return STRATA_PA_VERSION; }

const char* strata_pa_build_info(void) {
  static const char* info = nullptr;
  guarded([] {
    static const std::string json = [] {
      BuildFacts f = build_facts();
      return text("{\"version\": ", quoted(f.version), ", \"compiler\": ", quoted(f.compiler), ", \"build_type\": ", quoted(f.build_type), ", \"sanitize\": ",
                  quoted(f.sanitize), ", \"cpu_paths\": ", quoted(f.cpu_paths), ", \"nvcc\": ", quoted(f.nvcc), ", \"cuda_archs\": ", quoted(f.cuda_archs),
                  ", \"hip_compiler\": ", quoted(f.hip_compiler), ", \"hip_archs\": ", quoted(f.hip_archs), "}");
    }();
    info = json.c_str();
  });
  return info;
}

const char* strata_pa_last_error(void) { return last_error.c_str(); }

strata_pa_status strata_pa_context_create(const strata_pa_context_options* options, strata_pa_context** context) {
  return guarded([&] {
    need(context, "context") = nullptr;
    const auto o = known(options, "options", sizeof(strata_pa_context_options), strata_pa_context_options{});
    auto made = std::make_unique<strata_pa_context>();
    if (o.device != STRATA_PA_CPU && (o.num_threads || o.isa)) throw InvalidInput("num_threads and isa are for the CPU; the context is of a GPU");
    if (o.num_threads) made->num_threads = o.num_threads;
    if (o.isa) made->isa = o.isa;
    made->device = device_of(o.device, o.ordinal, made->num_threads, made->isa);
    made->text = made->device.describe();
    made->refusals = refusals(kernels_of(made->device).refused);
    *context = made.release();
  });
}

void strata_pa_context_destroy(strata_pa_context* context) { delete context; }

const char* strata_pa_context_text(const strata_pa_context* context) { return context ? context->text.c_str() : nullptr; }

const char* strata_pa_context_refusal(const strata_pa_context* context, const char* kernel) {
  return context ? find(context->refusals, kernel) : nullptr;
}

strata_pa_status strata_pa_problem_init(strata_pa_problem* problem, size_t size) {
  return guarded([&] {
    need(problem, "problem");
    if (size != sizeof(strata_pa_problem)) throw InvalidInput(text("size must be that of strata_pa_problem, ", sizeof(strata_pa_problem), ", got ", size));
    *problem = empty_problem();
  });
}

strata_pa_status strata_pa_problem_set_strides(strata_pa_problem* problem, int32_t layout) {
  return guarded([&] {
    known(problem, "problem", sizeof(strata_pa_problem), empty_problem());
    strata_pa_problem& p = *problem;
    if (layout != STRATA_PA_HND && layout != STRATA_PA_NHD)
      throw InvalidType(text("layout must be STRATA_PA_HND (0) or STRATA_PA_NHD (1), got ", layout));
    const int64_t sizes[] = {p.n_head, p.head_dim, p.n_kv, p.page_size, p.group, p.max_pages, p.cap};
    for (int64_t size : sizes)
      if (size < 0 || size > INT32_MAX) throw InvalidInput(text("a size is from 0 to ", INT32_MAX, ", got ", size));
    if (p.group == 0) throw InvalidInput("group must be set");
    auto pool = [&](int64_t dims) {
      if (layout == STRATA_PA_HND) return strata_pa_pool_stride{p.n_kv * p.page_size * dims, p.page_size * dims, dims};
      return strata_pa_pool_stride{p.page_size * p.n_kv * dims, dims, p.n_kv * dims};
    };
    p.q_stride = p.out_stride = p.n_head * p.head_dim;
    p.q_head_stride = p.out_head_stride = p.head_dim;
    p.k_stride = p.v_stride = pool(p.head_dim);
    p.k_scale_stride = p.v_scale_stride = pool(p.head_dim / p.group);
    p.page_table_stride = p.max_pages;
    p.ids_stride = p.cap, p.ids_head_stride = 0;
    p.widths_stride = 1;
    p.lse_stride = p.n_head;
  });
}

strata_pa_status strata_pa_plan_create(const strata_pa_context* context, const strata_pa_problem* problem, const char* kernel, strata_pa_plan** plan) {
  return guarded([&] {
    need(plan, "plan") = nullptr;
    const strata_pa_context& c = need(context, "context");
    const Environment environment = read_environment();
    const Device device = is_cpu(c.device) ? cpu_device(environment, c.num_threads, c.isa) : c.device;
    const Checked checked(problem, device);
    auto made = std::make_unique<strata_pa_plan>();
    made->plan = make_plan(checked.p, device, kernel ? std::optional<std::string>(kernel) : std::nullopt, environment);
    made->text = describe(made->plan);
    made->refusals = refusals(made->plan.refused);
    *plan = made.release();
  });
}

void strata_pa_plan_destroy(strata_pa_plan* plan) { delete plan; }

const char* strata_pa_plan_kernel(const strata_pa_plan* plan) { return plan ? plan->plan.kernel->name : nullptr; }
const char* strata_pa_plan_chosen_by(const strata_pa_plan* plan) { return plan ? plan->plan.chosen_by.c_str() : nullptr; }
const char* strata_pa_plan_text(const strata_pa_plan* plan) { return plan ? plan->text.c_str() : nullptr; }
const char* strata_pa_plan_refusal(const strata_pa_plan* plan, const char* kernel) { return plan ? find(plan->refusals, kernel) : nullptr; }
int64_t strata_pa_plan_workspace_bytes(const strata_pa_plan* plan) { return plan ? plan->plan.workspace_bytes : 0; }

strata_pa_status strata_pa_run(const strata_pa_plan* plan, const strata_pa_problem* problem, void* stream, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    const Plan& x = need(plan, "plan").plan;
    if (is_cpu(x.device) && stream) throw InvalidInput("stream must be NULL on a CPU");
    const Checked checked(problem, x.device);
    checked.check_output(x.device);
    check_kernel(x, checked.p);
    Launch launch;
    launch.stream = stream;
    launch.workspace = bind_workspace(*plan, checked.p, workspace, workspace_bytes);
    run(x, checked.p, launch);
  });
}

// Parts of `exact`, here on a CPU only: with a GPU's arrays the functions would need a stream.
static const Device& host_of(const strata_pa_plan* plan) {
  const Device& device = need(plan, "plan").plan.device;
  if (!is_cpu(device)) throw UnsupportedProblem(text("parts of exact are computed on a CPU only, the plan is for ", device.describe()));
  return device;
}

// A step of `exact` on one part.
static void run_step(const strata_pa_plan* plan, const strata_pa_problem* problem, cpu::ExactStep step, const cpu::ExactState& state) {
  host_of(plan);
  const Plan& x = plan->plan;
  if (std::string(x.kernel->name) != "exact") throw InvalidInput(text("parts are of the kernel exact, the plan's is ", x.kernel->name));
  const Checked checked(problem, x.device);
  check_kernel(x, checked.p);
  Launch launch;
  launch.step = step;
  launch.state = state;
  run(x, checked.p, launch);
}

strata_pa_status strata_pa_exact_anchors(const strata_pa_plan* plan, const strata_pa_problem* problem, float* A, float* b) {
  return guarded([&] { run_step(plan, problem, cpu::ExactStep::kAnchors, {&need(A, "A"), &need(b, "b"), nullptr, nullptr}); });
}

strata_pa_status strata_pa_exact_sums(const strata_pa_plan* plan, const strata_pa_problem* problem, const float* A, const float* b, int64_t* L, int64_t* O) {
  return guarded([&] {
    need(A, "A"), need(b, "b");
    run_step(plan, problem, cpu::ExactStep::kSums, {const_cast<float*>(A), const_cast<float*>(b), &need(L, "L"), &need(O, "O")});
  });
}

strata_pa_status strata_pa_exact_finish(const strata_pa_plan* plan, const strata_pa_problem* problem, const float* A, const float* b, const int64_t* L,
                                        const int64_t* O) {
  return guarded([&] {
    const Device& device = host_of(plan);
    need(A, "A"), need(b, "b"), need(L, "L"), need(O, "O");
    const Checked checked(problem, device);
    checked.check_output(device);
    if (checked.p.n_q > 0)
      exact_finish({}, checked.p, {const_cast<float*>(A), const_cast<float*>(b), const_cast<int64_t*>(L), const_cast<int64_t*>(O)});
  });
}

strata_pa_status strata_pa_merge_anchors(int64_t n, float* A_all, float* b_all, const float* A, const float* b) {
  return guarded([&] {
    if (n < 0) throw InvalidInput(text("n must not be negative, got ", n));
    if (n) merge_anchors({}, n, &need(A_all, "A_all"), &need(b_all, "b_all"), &need(A, "A"), &need(b, "b"));
  });
}

strata_pa_status strata_pa_merge_sums(int64_t n, int64_t* all, const int64_t* part) {
  return guarded([&] {
    if (n < 0) throw InvalidInput(text("n must not be negative, got ", n));
    if (n) merge_sums({}, n, &need(all, "all"), &need(part, "part"));
  });
}

strata_pa_status strata_pa_set_imma(int32_t value) {
  return guarded([&] {
    if (value < -1 || value > 1) throw InvalidInput(text("value must be 1, 0 or -1, got ", value));
    set_imma(value < 0 ? std::nullopt : std::optional<bool>(value == 1));
  });
}

int32_t strata_pa_get_imma(void) {
  std::optional<bool> value = get_imma();
  return value ? *value : -1;
}

int32_t strata_pa_kernel_count(void) {
  int32_t count = 0;
  guarded([&] { count = static_cast<int32_t>(kernel_table().size()); });
  return count;
}

strata_pa_status strata_pa_kernel_at(int32_t index, strata_pa_kernel_info* info) {
  return guarded([&] {
    static const KernelTexts texts;
    const auto given = known(info, "info", sizeof(strata_pa_kernel_info), {});
    if (index < 0 || index >= strata_pa_kernel_count()) throw InvalidInput(text("index must be from 0 to ", strata_pa_kernel_count() - 1, ", got ", index));
    const Kernel& k = kernel_table()[static_cast<size_t>(index)];
    strata_pa_kernel_info x = {};
    x.size = given.size;
    x.name = k.name, x.needs = texts.needs[static_cast<size_t>(index)].c_str(), x.what = k.what;
    x.device = static_cast<int32_t>(k.backend);
    x.built = k.built(), x.opt_in = k.opt_in, x.portable = k.portable;
    std::memcpy(info, &x, given.size);
  });
}

strata_pa_status strata_pa_quantize(const void* x, int32_t dtype, int64_t cells, int64_t head_dim, int64_t group, int64_t x_stride, int8_t* codes,
                                    int64_t code_stride, uint16_t* scales, int64_t scale_stride) {
  return guarded([&] {
    const DType type = to_dtype(dtype, "dtype");
    if (cells < 0) throw InvalidInput(text("cells must not be negative, got ", cells));
    if (group < 1 || head_dim < 1 || head_dim % group != 0) throw InvalidInput(text("group ", group, " does not divide head_dim, ", head_dim));
    if (cells > 1 && (x_stride < 0 || code_stride < head_dim || scale_stride < head_dim / group))
      throw InvalidInput(text("strides of ", x_stride, " (x), ", code_stride, " (codes) and ", scale_stride, " (scales) do not fit rows of ", head_dim, ", ",
                              head_dim, " and ", head_dim / group, " elements"));
    if (cells == 0) return;
    need(codes, "codes");
    need(scales, "scales");
    if (!x) throw InvalidInput("x is NULL");
    if (reinterpret_cast<uintptr_t>(x) % static_cast<uintptr_t>(dtype_bytes(type)) || reinterpret_cast<uintptr_t>(scales) % 2)
      throw InvalidInput("x or scales is misaligned");
    for (int64_t i = 0; i < cells; ++i) {
      const char* row = static_cast<const char*>(x) + i * x_stride * dtype_bytes(type);
      if (int64_t bad = quantize_cell(row, type, head_dim, group, codes + i * code_stride, scales + i * scale_stride); bad >= 0)
        throw InvalidInput(text("x[", i, ", ", bad, "] is not finite, or too large for a float16 scale (at most about 8.32e6)"));
    }
  });
}

strata_pa_status strata_pa_allocate(const strata_pa_context* context, size_t bytes, void** memory) {
  return guarded([&] {
    need(memory, "memory") = nullptr;
    const Device& device = need(context, "context").device;
    if (bytes > static_cast<size_t>(INT64_MAX) - kAlignment) throw InvalidInput(text("bytes is ", bytes));
    if (is_cpu(device))
      *memory = ::operator new(std::max<size_t>(bytes, 1), std::align_val_t{kAlignment});
    else
      *memory = reinterpret_cast<void*>(device.gpu->allocate(static_cast<int64_t>(bytes)));
  });
}

strata_pa_status strata_pa_release(const strata_pa_context* context, void* memory) {
  return guarded([&] {
    const Device& device = need(context, "context").device;
    if (!memory) return;
    if (is_cpu(device))
      ::operator delete(memory, std::align_val_t{kAlignment});
    else
      device.gpu->free(reinterpret_cast<Address>(memory));
  });
}

strata_pa_status strata_pa_upload(const strata_pa_context* context, void* to, const void* from, size_t bytes) {
  return guarded([&] {
    const Device& device = need(context, "context").device;
    if (bytes && (!to || !from)) throw InvalidInput("an address is NULL");
    if (!bytes) return;
    if (is_cpu(device))
      std::memcpy(to, from, bytes);
    else
      device.gpu->copy_to_device(reinterpret_cast<Address>(to), from, static_cast<int64_t>(bytes));
  });
}

strata_pa_status strata_pa_download(const strata_pa_context* context, void* to, const void* from, size_t bytes) {
  return guarded([&] {
    const Device& device = need(context, "context").device;
    if (bytes && (!to || !from)) throw InvalidInput("an address is NULL");
    if (!bytes) return;
    if (is_cpu(device))
      std::memcpy(to, from, bytes);
    else
      device.gpu->copy_to_host(to, reinterpret_cast<Address>(from), static_cast<int64_t>(bytes));
  });
}

strata_pa_status strata_pa_synchronize(const strata_pa_context* context, void* stream) {
  return guarded([&] {
    const Device& device = need(context, "context").device;
    if (!is_cpu(device))
      device.gpu->synchronize(stream);
    else if (stream)
      throw InvalidInput("stream must be NULL on a CPU");
  });
}
