#include "core/cuda_quantize.h"

#include <limits>

#include "core/cuda_device.h"
#include "core/errors.h"

namespace strata_pa::cuda {
namespace {

constexpr const char* kImage = "quantize_sm75";

}  // namespace

void quantize(Card& card, const QuantizeParams& params, Handle stream) {
  const int64_t grid = quantize_grid(params);
  if (grid == 0) return;
  if (grid > std::numeric_limits<int32_t>::max()) throw InvalidInput(text("too many values for one call: ", params.rows, " rows of ", params.dims));
  const Image* image = find_image(kImage);
  if (!image) throw UnsupportedDevice(text("this build has no image ", kImage));
  Function f = card.function(*image, "strata_quantize", 0);
  if (!f.reason.empty()) throw UnsupportedDevice(text("quantizing on cuda:", card.ordinal, " (", card.name, "): ", f.reason));
  Current current(card);
  void* arguments[] = {const_cast<QuantizeParams*>(&params)};
  card.driver(card.driver.launch, f.handle, static_cast<unsigned>(grid), 1u, 1u, unsigned{kQuantizeThreads}, 1u, 1u, 0u, stream, arguments, nullptr);
}

}  // namespace strata_pa::cuda
