#include "core/hip_device.h"

#include "core/errors.h"

namespace strata_pa::hip {
Card::Card(Driver& d, int ordinal) : DriverGpu(d, {DeviceKind::kHIP, ordinal}) {
  Properties p = {};
  driver(driver.properties, &p, ordinal);
  p.name[sizeof p.name - 1] = p.arch[sizeof p.arch - 1] = 0;
  name = p.name;
  architecture = p.arch;
  architecture = architecture.substr(0, architecture.find(':'));  // the features behind it do not choose among the code objects
  max_shared = static_cast<int>(p.shared_per_block);
  processors = p.processors;
}

Function Card::load_module(const Image& image) {
  auto found = modules_.find(image.name);
  if (found != modules_.end()) return found->second;
  Function m;
  const CodeObject* object = choose(architecture, image);
  if (!object) {
    m.reason = text("its image has ", hip::describe(image), ", nothing for ", architecture);
  } else if (int status = driver.module_load.call(&m.handle, object->begin)) {
    m = {nullptr, text("the driver refused its code object: ", driver.describe(driver.module_load.name, status))};
    if (!is_final(status)) throw DriverError(m.reason);
  }
  return modules_[image.name] = m;
}

Function Card::function(const Image& image, const std::string& symbol) {
  Current current(*this);
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto found = functions_.find(symbol); found != functions_.end()) return found->second;
  Relaxed relaxed(driver);
  Function module = load_module(image), f;
  f.reason = module.reason;
  if (f.reason.empty())
    if (int status = driver.module_function.call(&f.handle, module.handle, symbol.c_str())) {
      f.reason = text("the driver refused its function: ", driver.describe(driver.module_function.name, status));
      if (!is_final(status)) throw DriverError(f.reason);
    }
  return functions_[symbol] = f;
}

int count_cards() { return count_devices(Driver::get()); }

Card& card(int ordinal) { return card_of<Card>(Driver::get(), ordinal, "hip"); }

Current::Current(Card& card) : driver_(card.driver), now_(card.id.ordinal) {
  driver_(driver_.get_device, &before_);
  if (before_ != now_) driver_(driver_.set_device, now_);
}

Current::~Current() {
  if (before_ != now_ && driver_.set_device.call(before_)) driver_.forget_error();  // it was current before: fails with the whole driver only
}

std::optional<int> ordinal_of(const void* address) {
  Driver* driver = Driver::find_one();
  if (!driver) return {};
  PointerAttributes a = {};
  if (driver->pointer_attributes.call(&a, address)) {
    driver->forget_error();
    return {};
  }
  if (a.type != kDeviceMemory && a.type != kManagedMemory) return {};
  return a.device;
}

DriverFacts driver_facts() {
  Driver& driver = Driver::get();
  return {driver.path, version_text(driver.version)};
}

}  // namespace strata_pa::hip
