// What a host needs to launch the kernels on partial results (partial_sm75.cu), without a CUDA header. Each takes one PartialParams by value; arrays are
// C-contiguous over `rows` rows of `dim` dims.
//
// | symbol                   | a thread does | reads            | writes                        |
// | ------------------------ | ------------- | ---------------- | ----------------------------- |
// | strata_partial_merge     | 1/32 of a row | outs, lses       | out, lse                      |
// | strata_partial_finish    | 1/32 of a row | A, b, L, O       | out, lse                      |
// | strata_partial_anchors   | a row         | A, b, A2, b2     | A, b                          |
// | strata_partial_sums      | a number      | O, L             | O += L, of rows * dim numbers |
// | strata_partial_to_keys   | a row         | A, b             | L [2][rows]                   |
// | strata_partial_from_keys | a row         | L [2][rows]      | A, b                          |
#pragma once
#include <cstdint>

namespace strata_pa {
namespace cuda {

constexpr uint32_t kPartialThreads = 128;
constexpr int kMostParts = 64;  // of one merge by lse

struct PartialParams {
  int64_t rows;
  int32_t dim, dtype;  // of outs and out: 0 FP32, 1 binary16, 2 bfloat16
  float *A, *b;
  const float *A2, *b2;
  int64_t *L, *O;
  void* out;
  float* lse;
  int32_t parts;
  const void* outs[kMostParts];
  const float* lses[kMostParts];
};

}  // namespace cuda
}  // namespace strata_pa
