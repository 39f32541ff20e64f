#include "core/cuda_partial.h"

#include <limits>

#include "core/errors.h"

namespace strata_pa::cuda {
namespace {

constexpr const char* kImage = "partial_sm75";

}  // namespace

void launch_partial(Card& card, const char* symbol, const PartialParams& params, int64_t threads, Handle stream) {
  const int64_t grid = (threads + kPartialThreads - 1) / kPartialThreads;
  if (grid == 0) return;
  if (grid > std::numeric_limits<int32_t>::max()) throw InvalidInput(text("too much for one call: ", params.rows, " rows of ", params.dim));
  const Image* image = find_image(kImage);
  if (!image) throw UnsupportedDevice(text("this build has no image ", kImage));
  Function f = card.function(*image, symbol, 0);
  if (!f.reason.empty()) throw UnsupportedDevice(text("partial results on cuda:", card.ordinal, " (", card.name, "): ", f.reason));
  Current current(card);
  void* arguments[] = {const_cast<PartialParams*>(&params)};
  card.driver(card.driver.launch, f.handle, static_cast<unsigned>(grid), 1u, 1u, unsigned{kPartialThreads}, 1u, 1u, 0u, stream, arguments, nullptr);
}

}  // namespace strata_pa::cuda
