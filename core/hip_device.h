// A HIP device and what was decided for it. Decided once per device.
#pragma once
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "core/driver_gpu.h"
#include "core/hip_driver.h"
#include "core/hip_images.h"

namespace strata_pa::hip {

// A function of an image, or why the driver does not take it.
struct Function {
  Handle handle = nullptr;
  std::string reason;
};

class Current;

class Card : public DriverGpu<Card, Driver, void*> {
 public:
  using Scope = Current;
  Card(Driver& driver, int ordinal);


  // Loads the function. What the driver refuses for good gives a reason and is not tried again; other failures throw DriverError.
  // May be called while a stream is being captured: the calls that capture forbids are made in the relaxed mode.
  Function function(const Image& image, const std::string& symbol);

  std::string note(const char*) override { return ""; }  // a code object is for exactly its architecture

 private:
  Function load_module(const Image& image);

  std::mutex mutex_;
  std::map<std::string, Function> modules_;  // the handle is the module's
  std::map<std::string, Function> functions_;
};

int count_cards();
Card& card(int ordinal);  // throws UnsupportedDevice for an ordinal that the driver does not have

// Makes the device current, and what was current before at the end.
class Current {
 public:
  explicit Current(Card& card);
  ~Current();
  Current(const Current&) = delete;

 private:
  Driver& driver_;
  int before_ = -1, now_;
};

// The device that an address belongs to; nothing where the driver does not know it as memory of a device, or where there is no driver.
std::optional<int> ordinal_of(const void* address);

DriverFacts driver_facts();

}  // namespace strata_pa::hip
