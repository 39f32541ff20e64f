// A problem as the parameters of GPU kernels, of both vendors: what cuda/launch.h asks of a host.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/problem.h"
#include "cuda/launch.h"

namespace strata_pa::cuda {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

// Everything but the queries and sequences of one launch. score_scale: what the kernel multiplies a score with.
Params whole_params(const Problem& p, float score_scale);

// The rows first .. first + n_q - 1 of the problem, which lie in the sequences s .. s + n_seq - 1.
void set_rows(Params& x, const Problem& p, int64_t first, int64_t n_q, int64_t s, int64_t n_seq);

// One launch serves at most kMaxSequences sequences and `most_blocks` blocks, of which a query has one for each KV head.
template <class Work>
void for_each_launch(const Problem& p, int64_t most_blocks, const Work& work) {
  const int64_t most_rows = std::max<int64_t>(1, most_blocks / p.n_kv);
  const int32_t* cu = p.cu_seqlens_q;
  int64_t first = 0, s = 0;
  while (first < p.n_q) {
    while (cu[s + 1] <= first) ++s;
    const int64_t last_s = std::min<int64_t>(p.n_seq, s + kMaxSequences);
    const int64_t end = std::min<int64_t>(cu[last_s], first + most_rows);
    int64_t n_seq = 1;
    while (cu[s + n_seq] < end) ++n_seq;
    work(first, end - first, s, n_seq);
    first = end;
  }
}

// What the kernels' layouts ask for: alignment, distances.
std::vector<std::string> layout_reasons(const Problem& p);

}  // namespace strata_pa::cuda
