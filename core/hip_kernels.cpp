#include "core/hip_kernels.h"

#include <limits>

#include "core/errors.h"
#include "core/gpu_params.h"
#include "core/hip_device.h"
#include "core/table.h"

namespace strata_pa::hip {
namespace {

// image: a kernel's own, of its name.
Function load(const char* image, const Problem& p, Card& card) {
  return card.function(*find_image(image), text("strata_", image, "_d", p.head_dim, "_r", rows_rounded(static_cast<uint32_t>(p.heads_per_kv()))));
}

}  // namespace

std::vector<std::string> not_supported_reasons(KernelId id, const Problem& p, const Device& device) {
  std::vector<std::string> reasons = cuda::layout_reasons(p);
  cuda::Params x = {};
  x.heads_per_kv = static_cast<int32_t>(p.heads_per_kv()), x.group = static_cast<int32_t>(p.group);
  if (uint32_t bytes = config(id, x, static_cast<int32_t>(p.head_dim)).shared_bytes; bytes > static_cast<uint32_t>(device.gpu->max_shared))
    reasons.push_back(text("needs ", bytes, " bytes of shared memory in a block, ", device.describe(), " allows ", device.gpu->max_shared));
  return reasons;
}

std::string prepare(KernelId, const char* image, const Problem& p, const Device& device) { return load(image, p, *device.hip_card).reason; }

void launch(KernelId id, const char* image, const Problem& p, const Device& device, const Launch& launch) {
  if (launch.step != cpu::ExactStep::kWhole) throw UnsupportedProblem("partial states of exact are computed in host memory and on CUDA devices only");
  Card& card = *device.hip_card;
  Current current(card);
  Function f = load(image, p, card);
  if (!f.reason.empty()) throw DriverError(text(image, ": ", f.reason));
  cuda::Params x = cuda::whole_params(p, cuda::score_scale(cuda::KernelId::kFp32, p.sm_scale));
  const int64_t most_blocks = std::numeric_limits<uint32_t>::max() / (4 * chunk_of(id));  // a grid has fewer than 2^32 threads
  cuda::for_each_launch(p, most_blocks, [&](int64_t first, int64_t n_q, int64_t s, int64_t n_seq) {
    cuda::set_rows(x, p, first, n_q, s, n_seq);
    cuda::Config c = config(id, x, static_cast<int32_t>(p.head_dim));
    void* arguments[] = {&x};
    card.driver(card.driver.launch, f.handle, c.grid, 1u, 1u, c.block, 1u, 1u, c.shared_bytes, launch.stream, arguments, nullptr);
  });
}

}  // namespace strata_pa::hip
