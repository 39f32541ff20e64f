// strata_pa: exact prompt attention over a paged int8 KV cache, for programs in C and C++ (C99, C++17).
//
// docs/embedding.md shows how an engine uses it, docs/numerics.md says what is computed.
//
// Every function may be called from any thread. A context, a plan and a problem may be used by any number of threads at once; only their
// creation and destruction must not run beside another use. Nothing here throws, prints or exits. No header of CUDA or HIP is needed; their
// drivers are opened by the first context on a device.
#ifndef STRATA_PA_H
#define STRATA_PA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define STRATA_PA_API __attribute__((visibility("default")))
#else
#define STRATA_PA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The version of this interface. It stays what it is while structures grow at their ends and functions are added; a library of another one
// is not compatible. strata_pa_abi() is the library's.
#define STRATA_PA_ABI 1
STRATA_PA_API int32_t strata_pa_abi(void);

// The package's version, "0.1.0".
STRATA_PA_API const char* strata_pa_version(void);

// How the library was built, as a JSON object: version, compiler, build_type, sanitize, cpu_paths, nvcc, cuda_archs, hip_compiler,
// hip_archs.
STRATA_PA_API const char* strata_pa_build_info(void);

// --- Errors

// What every function returns that can fail: STRATA_PA_OK or what went wrong.
typedef int32_t strata_pa_status;
enum {
  STRATA_PA_OK = 0,
  STRATA_PA_INVALID_INPUT = 1,        // an argument, an array's content or an environment variable has a value that it cannot have
  STRATA_PA_INVALID_TYPE = 2,         // a type tag that is none
  STRATA_PA_UNSUPPORTED_PROBLEM = 3,  // well formed, but no kernel, or not the one asked for, serves it there; the text lists each reason
  STRATA_PA_UNSUPPORTED_DEVICE = 4,   // a device or an instruction set that this build or this machine does not have
  STRATA_PA_DRIVER_ERROR = 5,         // a call of a GPU's driver failed: its name and the driver's text
  STRATA_PA_OUT_OF_MEMORY = 6,
  STRATA_PA_INTERNAL_ERROR = 7
};

// What was given and what was expected by the calling thread's last call that failed; "" before one has. It lasts until the thread's next
// failure.
STRATA_PA_API const char* strata_pa_last_error(void);

// --- Contexts: where problems are run

typedef struct strata_pa_context strata_pa_context;

enum {  // kinds of devices
  STRATA_PA_CPU = 0,
  STRATA_PA_CUDA = 1,
  STRATA_PA_HIP = 2
};

typedef struct strata_pa_context_options {
  size_t size;          // sizeof(strata_pa_context_options)
  int32_t device;       // STRATA_PA_CPU, ...
  int32_t ordinal;      // which of a GPU's kind, as its driver counts
  int32_t num_threads;  // of a CPU call, 1 to 1024; 0: as STRATA_PA_NUM_THREADS says, or one for each CPU that the process may run on
  const char* isa;      // instruction-set path of the CPU, "avx2"; NULL: as STRATA_PA_FORCE_ISA says, or the best one
} strata_pa_context_options;

STRATA_PA_API strata_pa_status strata_pa_context_create(const strata_pa_context_options* options, strata_pa_context** context);
STRATA_PA_API void strata_pa_context_destroy(strata_pa_context* context);  // NULL is allowed; its plans live on

// "cpu (avx512)", "cuda:0 (NVIDIA H200, sm_90)"; it lasts as long as the context.
STRATA_PA_API const char* strata_pa_context_text(const strata_pa_context* context);

// Why the context's device does not have a kernel at all; "": it has it (a problem may still be refused). NULL: no kernel of that name.
// It lasts as long as the context.
STRATA_PA_API const char* strata_pa_context_refusal(const strata_pa_context* context, const char* kernel);

// --- Problems

enum {  // types of q and out
  STRATA_PA_FLOAT32 = 0,
  STRATA_PA_FLOAT16 = 1,
  STRATA_PA_BFLOAT16 = 2
};

// Strides of a pool, in elements.
typedef struct strata_pa_pool_stride {
  int64_t page, head, cell;
} strata_pa_pool_stride;

// One call. Strides count elements, not bytes; the innermost dimension of every array is contiguous. Arrays are memory of the context's
// device, but cu_seqlens_q and kv_len, which are read on the host, by the call itself.
typedef struct strata_pa_problem {
  size_t size;  // sizeof(strata_pa_problem), set by strata_pa_problem_init

  // Queries [n_q, n_head, head_dim]. Query head h reads KV head h / (n_head / n_kv).
  const void* q;
  int64_t n_q, n_head, head_dim;
  int64_t q_stride, q_head_stride;
  int32_t dtype;  // STRATA_PA_FLOAT32, ...

  // 1: a query sees the cells up to its own, where query i of n sits at cell kv_len - n + i; 0: all of them
  int32_t causal;

  // The cache: codes [pages, n_kv, page_size, head_dim] in any order of strides; scales: binary16, head_dim / group in place of head_dim.
  // Key = code * scale.
  const int8_t* k;
  const int8_t* v;
  const uint16_t* k_scale;
  const uint16_t* v_scale;
  int64_t pages, n_kv, page_size, group;
  strata_pa_pool_stride k_stride, v_stride, k_scale_stride, v_scale_stride;

  // [n_seq, max_pages]: logical page -> physical page; -1: not resident, its cells are masked
  const int32_t* page_table;
  int64_t n_seq, max_pages, page_table_stride;

  // On the host. Sequence s has the queries cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 and kv_len[s] cells. NULL with one sequence: all.
  const int32_t* cu_seqlens_q;  // [n_seq + 1]
  const int32_t* kv_len;        // [n_seq]

  // The cells that each query attends to: [n_q, cap], or [n_q, n_kv, cap] with a head stride. Entry e names the cells granularity * e ..
  // granularity * e + granularity - 1; -1: none. NULL: every cell.
  const int32_t* ids;
  int64_t cap, ids_stride, ids_head_stride;

  // How many entries of its row a query has: widths[i * widths_stride], so that widths may lie in an array of records. NULL: cap.
  const int32_t* widths;
  int64_t widths_stride;
  int64_t granularity;

  int64_t window_left;  // cells further back than this are masked; -1: no window
  double sm_scale;      // 0: 1 / sqrt(head_dim)

  // Written: out [n_q, n_head, head_dim], typed as q; lse [n_q, n_head], the natural logarithm of each row's sum, or NULL
  void* out;
  int64_t out_stride, out_head_stride;
  float* lse;
  int64_t lse_stride;
} strata_pa_problem;

// Every field zero, but size, n_seq = 1, granularity = 1, causal = 1, window_left = -1. `size` is sizeof(strata_pa_problem).
STRATA_PA_API strata_pa_status strata_pa_problem_init(strata_pa_problem* problem, size_t size);

// The strides of arrays without gaps, from the sizes that are set: one list of ids for all KV heads; pools in the order
// [page][kv_head][cell][dim] or [page][cell][kv_head][dim].
enum {
  STRATA_PA_HND = 0,
  STRATA_PA_NHD = 1
};
STRATA_PA_API strata_pa_status strata_pa_problem_set_strides(strata_pa_problem* problem, int32_t layout);

// --- Plans: which kernel runs a problem, and why not another

typedef struct strata_pa_plan strata_pa_plan;

// `kernel` is a name, which runs or fails; NULL: strata_pa_set_imma, then the environment, then the device's default (docs/dispatch.md).
// The problem is checked. out and lse need not be set yet. A plan may be run for any problem that its kernel serves, so one plan can do for
// all layers of a model.
STRATA_PA_API strata_pa_status strata_pa_plan_create(const strata_pa_context* context, const strata_pa_problem* problem, const char* kernel,
                                                     strata_pa_plan** plan);
STRATA_PA_API void strata_pa_plan_destroy(strata_pa_plan* plan);  // NULL is allowed

// These last as long as the plan.
STRATA_PA_API const char* strata_pa_plan_kernel(const strata_pa_plan* plan);
STRATA_PA_API const char* strata_pa_plan_chosen_by(const strata_pa_plan* plan);  // "default", "kernel=", "set_imma(True)", "STRATA_PA_KERNEL=exact", ...
STRATA_PA_API const char* strata_pa_plan_text(const strata_pa_plan* plan);       // all of it in lines, with each refusal and note
// Why another kernel does not run, "; " between the reasons; "" for the plan's own; NULL: no kernel of that name.
STRATA_PA_API const char* strata_pa_plan_refusal(const strata_pa_plan* plan, const char* kernel);

// GPU: bytes of device memory with which the kernel takes a faster way to the same bytes, for the plan's problem; 0: it has no use for any.
// CPU: what a run allocates by itself.
STRATA_PA_API int64_t strata_pa_plan_workspace_bytes(const strata_pa_plan* plan);

// Runs the plan's kernel. On a CPU the call returns when it is done; stream and workspace must be NULL. On a GPU it enqueues the work on
// `stream` (a CUstream, hipStream_t; NULL: the legacy default stream), reads nothing of the device, allocates nothing there and waits for
// nothing: it can be captured into a graph, whose replays read every device array anew. `workspace` is NULL, or device memory of the
// problem's workspace bytes or more, aligned to 256 bytes, that no other work uses meanwhile.
STRATA_PA_API strata_pa_status strata_pa_run(const strata_pa_plan* plan, const strata_pa_problem* problem, void* stream, void* workspace,
                                             size_t workspace_bytes);

// --- `exact` over cells that lie in several places: the parts combine to the bytes of one call (docs/numerics.md, section 5)
//
// A state is four arrays without gaps in the device's memory: anchors A and b, float [n_q, n_head]; sums L, int64_t [n_q, n_head], and O, int64_t
// [n_q, n_head, head_dim]. Each part makes its anchors; all are merged; with the merged ones each part makes its sums; they are merged, and
// finished. The plan is one of `exact`. In this version parts are computed on a CPU only.

STRATA_PA_API strata_pa_status strata_pa_exact_anchors(const strata_pa_plan* plan, const strata_pa_problem* problem, float* A, float* b);
STRATA_PA_API strata_pa_status strata_pa_exact_sums(const strata_pa_plan* plan, const strata_pa_problem* problem, const float* A, const float* b,
                                                    int64_t* L, int64_t* O);
// Writes the problem's out and lse.
STRATA_PA_API strata_pa_status strata_pa_exact_finish(const strata_pa_plan* plan, const strata_pa_problem* problem, const float* A, const float* b,
                                                      const int64_t* L, const int64_t* O);

// In host memory: adds one more part's n anchors, or n sums, to those so far.
STRATA_PA_API strata_pa_status strata_pa_merge_anchors(int64_t n, float* A_all, float* b_all, const float* A, const float* b);
STRATA_PA_API strata_pa_status strata_pa_merge_sums(int64_t n, int64_t* all, const int64_t* part);

// --- Switches and kernels

// For the whole process. 1: run `imma` where the device has it; 0: the environment cannot ask for it; -1: as the environment says.
STRATA_PA_API strata_pa_status strata_pa_set_imma(int32_t value);
STRATA_PA_API int32_t strata_pa_get_imma(void);

typedef struct strata_pa_kernel_info {
  size_t size;  // sizeof(strata_pa_kernel_info), set by the caller
  const char* name;
  const char* needs;  // in words: "CUDA devices from sm_80"
  const char* what;
  int32_t device;    // STRATA_PA_CPU, ...
  int32_t built;     // 1: in this build
  int32_t opt_in;    // 1: runs only when it is switched on
  int32_t portable;  // 1: the same bytes on every device
} strata_pa_kernel_info;

// The one ordered table of kernels: for each kind of device its defaults in the order of choice, then the opt-in ones. Texts last for ever.
STRATA_PA_API int32_t strata_pa_kernel_count(void);
STRATA_PA_API strata_pa_status strata_pa_kernel_at(int32_t index, strata_pa_kernel_info* info);

// --- Helpers

// Keys or values to codes and scales, in host memory: `cells` rows of head_dim values x_stride apart (elements), codes code_stride and
// scales scale_stride apart. Per group: scale = binary16(max|x| / 127), code = clamp(rint(x / scale), -127, 127).
STRATA_PA_API strata_pa_status strata_pa_quantize(const void* x, int32_t dtype, int64_t cells, int64_t head_dim, int64_t group, int64_t x_stride,
                                                  int8_t* codes, int64_t code_stride, uint16_t* scales, int64_t scale_stride);

// Memory of the context's device, for programs without an allocator of their own: 256-byte aligned, its content undefined. Copies are done
// when they return; strata_pa_download waits for the legacy default stream first.
STRATA_PA_API strata_pa_status strata_pa_allocate(const strata_pa_context* context, size_t bytes, void** memory);
STRATA_PA_API strata_pa_status strata_pa_release(const strata_pa_context* context, void* memory);  // NULL is allowed
STRATA_PA_API strata_pa_status strata_pa_upload(const strata_pa_context* context, void* device, const void* host, size_t bytes);
STRATA_PA_API strata_pa_status strata_pa_download(const strata_pa_context* context, void* host, const void* device, size_t bytes);
// Waits until the work that was enqueued on the stream is done.
STRATA_PA_API strata_pa_status strata_pa_synchronize(const strata_pa_context* context, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // STRATA_PA_H
