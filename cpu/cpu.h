// What the host core sees of the CPU backend.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.h"

namespace strata_pa::cpu {

enum class Kernel : int { kFp32 = 0, kImma = 1, kExact = 2 };

// One compiled instruction-set path. All give the same bytes.
struct Isa {
  const char* name;      // "scalar", "avx2", "avxvnni", "avx512"; as STRATA_PA_FORCE_ISA takes it
  const char* requires_; // the CPU features it needs, in words
  bool supported;        // this machine has them (cpuid and the operating system's xgetbv)
};
const std::vector<Isa>& isas();  // best last
const Isa& best_isa();
const Isa* find_isa(const std::string& name);  // null: no such path was compiled

// Partial results of `exact` (docs/numerics.md, section 5). Arrays are C-contiguous over [n_q, n_head] and [n_q, n_head, head_dim].
struct ExactState {
  float* A = nullptr;      // anchors; -inf: no visible entry; NaN: a bad row
  float* b = nullptr;      // -60 where A is -inf
  int64_t* L = nullptr;
  int64_t* O = nullptr;
};
enum class ExactStep : int {
  kWhole = 0,    // the result, to p.out and p.lse
  kAnchors = 1,  // writes state.A and state.b only
  kSums = 2,     // reads state.A and state.b (of all parts), writes state.L and state.O
};

struct RunOptions {
  int num_threads = 1;
  int64_t score_bytes = 16 << 20;  // scratch a thread may use to keep scores between the two passes of `exact`
  ExactStep step = ExactStep::kWhole;
  ExactState state;
};

// Runs a checked problem; throws std::bad_alloc only. `isa` must be supported. The caller has released the GIL.
void run(Kernel kernel, const Problem& p, const Isa& isa, const RunOptions& options);

// Combines: from state (A, b, L, O) to p.out and p.lse.
void exact_finish(const Problem& p, const ExactState& state);

// Whole results over disjoint sets of cells, merged by their lse in the order given (docs/numerics.md, section 6). C-contiguous: out [rows, dim], lse [rows].
struct Partial {
  const void* out;
  const float* lse;
};
void merge_partials(int64_t rows, int64_t dim, DType dtype, const std::vector<Partial>& parts, void* out, float* lse);

// Scratch bytes a run takes, all threads together.
int64_t scratch_bytes(Kernel kernel, const Problem& p, const Isa& isa, const RunOptions& options);

// Byte dot products in registers, on this thread: the multiplications and additions that were done; 0 where the path has no instruction for
// them (VNNI).
int64_t dot_peak(const Isa& isa, int64_t rounds);

}  // namespace strata_pa::cpu
