// What a host needs to launch the kernels of hip/. They take the parameters of cuda/launch.h; one block answers one (query, KV head).
//
// | kernel | symbol                | file      | threads |
// | ------ | --------------------- | --------- | ------- |
// | fp32   | strata_fp32_d{D}_r{R}  | fp32.hip  | 256     |
// | imma   | strata_imma_d{D}_r{R}  | imma.hip  | 128     |
// | exact  | strata_exact_d{D}_r{R} | exact.hip | 128     |
//
// head_dim D 64, 128, 256; R = heads per KV head rounded up to 4, 8, 12, 16; everything else is a parameter. k and v (pointer and strides) are
// multiples of 16 bytes.
#pragma once
#include "../cuda/launch.h"

namespace strata_pa {
namespace hip {

enum class KernelId : int { kFp32, kImma, kExact };

constexpr uint32_t kMaxShared = 64 << 10;  // bytes of LDS that a block may take, the least of the listed architectures

constexpr uint32_t rows_rounded(uint32_t rows) { return (rows + 3) / 4 * 4; }
// Entries that a block handles at a time, with four threads for each.
constexpr uint32_t chunk_of(KernelId id) { return id == KernelId::kFp32 ? 64 : 32; }

// Bytes of LDS, all of it dynamic.
namespace shared {
constexpr uint32_t kSources = cuda::shared::kSources;
constexpr uint32_t pitch(uint32_t chunk) { return chunk + 4; }  // floats of a row of scores
// hip/block.h: places in k and v, Sources, three words per row, masks, scores, scales of k and v.
constexpr uint32_t block(uint32_t chunk, uint32_t rows, uint32_t groups) {
  return 2 * chunk * 8 + kSources + 3 * 16 * 4 + 16 + rows * pitch(chunk) * 4 + 2 * chunk * groups * 4;
}
// q, what a score rounds away.
constexpr uint32_t fp32(uint32_t dim, uint32_t rows, uint32_t groups) { return block(64, rows, groups) + dim * rows * 4 + rows * pitch(64) * 4; }
// Three digits of q, largest values and factors, digits of the weights.
constexpr uint32_t digits(uint32_t dim, uint32_t rows, uint32_t groups) {
  return block(32, rows, groups) + 3 * dim * rows + rows * groups * 4 * 2 + rows * groups * 8 * 16;
}
static_assert(fp32(256, 16, 8) <= kMaxShared && digits(256, 16, 8) <= kMaxShared, "every problem fits");
}  // namespace shared

inline cuda::Config config(KernelId id, const cuda::Params& p, int32_t head_dim) {
  const uint32_t dim = static_cast<uint32_t>(head_dim), groups = dim / static_cast<uint32_t>(p.group);
  const uint32_t rows = rows_rounded(static_cast<uint32_t>(p.heads_per_kv));
  return {static_cast<uint32_t>(p.n_q) * static_cast<uint32_t>(p.n_kv), 4 * chunk_of(id),
          id == KernelId::kFp32 ? shared::fp32(dim, rows, groups) : shared::digits(dim, rows, groups)};
}

}  // namespace hip
}  // namespace strata_pa
