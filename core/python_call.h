// One call from Python: its arrays as views, the Problem they make, the device and the environment, read once.
#pragma once
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/python_arrays.h"
#include "core/python_stream.h"
#include "core/switches.h"

namespace strata_pa {

// A paged cache's arrays with their layout resolved.
struct PagedView {
  ArrayView k, v, k_scale, v_scale, page_table;
  int64_t pages, n_kv, page_size, head_dim, group;
  Problem::Pool pool(const ArrayView& a) const;
  bool nhd;
};
PagedView view_paged(pybind11::handle k, pybind11::handle v, pybind11::handle k_scale, pybind11::handle v_scale, pybind11::handle page_table,
                     pybind11::handle layout, const CallStream* stream = nullptr);

enum Access { kRead, kWritten };

struct CallArguments {
  pybind11::object q, k, v, k_scale, v_scale, page_table, layout, ids, widths, granularity, kv_len, cu_seqlens_q, causal, window_left, sm_scale,
      kernel, stream, num_threads, isa;
};

class Call {
 public:
  explicit Call(const CallArguments& arguments);

  // out: an array as q, or None; checked, not written.
  const Plan& plan(pybind11::object out);
  // out: an array as q, written; lse: float32 [n_q, n_head], or None. Fresh: both were made for this call, and may be written whatever
  // their library says.
  // workspace: uint8 [at least the plan's workspace_bytes] on the device, or None.
  const Plan& run(pybind11::object out, pybind11::object lse, bool fresh, pybind11::object workspace);
  // Waits until the stream of a GPU call is done.
  void synchronize() const;
  // The two partial steps of `exact`: float32 A, b [n_q, n_head]; int64 L [n_q, n_head], O [n_q, n_head, head_dim].
  void exact_anchors(pybind11::object A, pybind11::object b);
  void exact_sums(pybind11::object A, pybind11::object b, pybind11::object L, pybind11::object O);

  const Problem& problem() const { return p_; }
  std::string device() const;

 private:
  const Plan& plan();
  void set_device(const CallArguments& arguments);
  template <class T>
  T* state(pybind11::handle object, const std::string& name, const std::vector<int64_t>& shape, Access access);
  ArrayView view(pybind11::handle object, const std::string& name, const std::vector<std::string>& dtypes, const std::vector<size_t>& ndims,
                 Innermost innermost = Innermost::kContiguous) const;
  void bind_output(pybind11::object out, pybind11::object lse, bool fresh = false);
  void* bind_workspace(pybind11::object workspace);
  void run_step(const Launch& launch);

  Problem p_;
  Device device_;
  Environment environment_;
  std::optional<std::string> kernel_;
  std::optional<Plan> plan_;
  CallStream stream_;  // GPU
  std::vector<int32_t> cu_seqlens_q_, kv_len_;
  std::vector<ArrayView> views_;  // keep the memory
};

// Throws InvalidInput for two arrays on different devices.
void check_same_device(const ArrayView& a, const ArrayView& b);

// Makes the stream wait for those who wrote the arrays (__cuda_array_interface__).
void wait_for_producers(const std::vector<ArrayView>& views, Gpu& gpu, int64_t stream);

// The memory of a C-contiguous array of exactly this dtype and shape; its view is kept. Host memory, or with a stream that of a GPU.
void* contiguous(pybind11::handle object, const std::string& name, const char* dtype, const std::vector<int64_t>& shape, Access access,
                 std::vector<ArrayView>& keep, const CallStream* stream = nullptr);
template <class T>
T* contiguous(pybind11::handle object, const std::string& name, const std::vector<int64_t>& shape, Access access, std::vector<ArrayView>& keep) {
  return static_cast<T*>(contiguous(object, name, dtype_of<T>(), shape, access, keep));
}

}  // namespace strata_pa
