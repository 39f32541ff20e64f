// One attention problem: shapes, pointers, strides. Checked once (core/problem.cpp), then read by every kernel.
#pragma once
#include <cstdint>

namespace strata_pa {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Where the arrays live. kCPU: every pointer is host memory. kCUDA, kHIP: q, k, v, scales, page_table, ids, widths, out and lse
// are memory of device `ordinal`; cu_seqlens_q and kv_len are host memory always.
enum class DeviceKind : int { kCPU = 0, kCUDA = 1, kHIP = 2 };
struct DeviceId {
  DeviceKind kind = DeviceKind::kCPU;
  int ordinal = 0;
};

// All strides count elements, not bytes; the innermost dimension of every array is contiguous.
struct Problem {
  DeviceId device;

  // q, out: [n_q, n_head, head_dim]
  const void* q = nullptr;
  DType dtype = DType::kFloat32;
  int64_t n_q = 0, n_head = 0, head_dim = 0;
  int64_t q_stride = 0, q_head_stride = 0;

  // k, v: int8 [pages, n_kv, page_size, head_dim] in any stride order; scales: binary16, head_dim / group in place of head_dim
  const int8_t* k = nullptr;
  const int8_t* v = nullptr;
  const uint16_t* k_scale = nullptr;
  const uint16_t* v_scale = nullptr;
  int64_t pages = 0, n_kv = 0, page_size = 0, group = 0;
  struct Pool {
    int64_t page = 0, head = 0, slot = 0;
  } k_stride, v_stride, k_scale_stride, v_scale_stride;

  // page_table: [n_seq, max_pages]; -1: not resident
  const int32_t* page_table = nullptr;
  int64_t n_seq = 1, max_pages = 0, page_table_stride = 0;

  // Sequence s has the queries cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 and kv_len[s] cells. Always set, on the host.
  const int32_t* cu_seqlens_q = nullptr;  // [n_seq + 1]
  const int32_t* kv_len = nullptr;        // [n_seq]

  // ids: [n_q, n_kv, cap] (head stride 0: one list for all KV heads) or null: every cell of the sequence
  const int32_t* ids = nullptr;
  int64_t cap = 0, ids_stride = 0, ids_head_stride = 0;
  const int32_t* widths = nullptr;  // [n_q] or null: cap
  int64_t widths_stride = 0;
  int64_t granularity = 1;

  bool causal = true;
  int64_t window_left = -1;  // -1: no window
  double sm_scale = 0;

  void* out = nullptr;  // dtype as q
  int64_t out_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // [n_q, n_head] or null
  int64_t lse_stride = 0;

  int64_t heads_per_kv() const { return n_head / n_kv; }
  int64_t groups() const { return head_dim / group; }
  int64_t max_entries() const;  // upper bound of the length of a row's list, from the shapes and kv_len
};

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    default:
      return "bfloat16";
  }
}
inline int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Each throws InvalidInput with what was given and what was expected.
void check_problem(const Problem& p);  // shapes, strides, alignment, numbers, widths in host memory; not the output
void check_output(const Problem& p);   // out and lse: layout, and no overlap with an input
void check_lists(const Problem& p);    // page_table and ids in host memory: every entry in use can be a page, a cell

}  // namespace strata_pa
