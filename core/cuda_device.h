// A CUDA device and what was decided for it: compute capability, limits, which kernels the driver takes. Decided once per device.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/cuda_driver.h"
#include "core/cuda_images.h"
#include "core/driver_gpu.h"

namespace strata_pa::cuda {

// A function of an image, or why the driver does not take it.
struct Function {
  Handle handle = nullptr;
  std::string reason;
  uint32_t shared_bytes = 0;  // of dynamic shared memory that are allowed
};

class Current;

class Card : public DriverGpu<Card, Driver, Address> {
 public:
  using Scope = Current;
  Card(Driver& driver, int ordinal);

  const int ordinal;
  int sm = 0;  // 10 * major + minor

  // Loads the function and raises its limit of dynamic shared memory where that is needed. What the driver refuses for good (no code for
  // this card, no such function, too much shared memory) gives a reason and is not tried again; other failures throw DriverError.
  // May be called while a stream is being captured: the calls that capture forbids are made in the relaxed mode.
  Function function(const Image& image, const std::string& symbol, uint32_t shared_bytes);

  // "": a cubin of the image runs here. Else a sentence on what the driver compiles for this card.
  std::string note(const char* image) override;


 private:
  friend class Current;
  Handle context();  // the primary one, retained for the life of the process

  struct Module {
    Handle handle = nullptr;
    std::string reason;
    int binary_arch = 0;  // of a loaded function: a cubin's architecture, or the card's own where PTX was compiled
  };
  Module& module(const Image& image);

  int device_ = 0;
  std::mutex mutex_;
  Handle context_ = nullptr;
  std::map<std::string, Module> modules_;
  std::map<std::string, Function> functions_;
};

int count_cards();
Card& card(int ordinal);  // throws UnsupportedDevice for an ordinal that the driver does not have

// Makes the card's context current, and what was current before at the end.
class Current {
 public:
  explicit Current(Card& card);
  ~Current();
  Current(const Current&) = delete;

 private:
  Driver& driver_;
};

// The device that an address belongs to.
int ordinal_of(const void* address, const std::string& name);

DriverFacts driver_facts();

}  // namespace strata_pa::cuda
