#include "core/hip_device.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/errors.h"

namespace strata_pa::hip {
namespace {

// Capture forbids a thread to load modules, unless it says that it knows what it does. Nothing here touches the captured stream.
class Relaxed {
 public:
  explicit Relaxed(Driver& driver) : driver_(driver) { driver_(driver_.exchange_capture_mode, &mode_); }
  ~Relaxed() { driver_.exchange_capture_mode.call(&mode_); }
  Relaxed(const Relaxed&) = delete;

 private:
  Driver& driver_;
  int mode_ = kCaptureRelaxed;
};

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

Card::Card(Driver& d, int ordinal) : Gpu({DeviceKind::kHIP, ordinal}), driver(d) {
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

int count_cards() {
  Driver& driver = Driver::get();
  int n = 0;
  driver(driver.device_count, &n);
  return n;
}

Card& card(int ordinal) {
  static std::mutex& mutex = *new std::mutex;
  static auto& cards = *new std::map<std::pair<Driver*, int>, std::unique_ptr<Card>>;
  int n = count_cards();
  if (ordinal < 0 || ordinal >= n) throw UnsupportedDevice(text("there is no hip:", ordinal, "; the driver has ", n, n == 1 ? " device" : " devices"));
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Card>& c = cards[{&Driver::get(), ordinal}];
  if (!c) c = std::make_unique<Card>(Driver::get(), ordinal);
  return *c;
}

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

void Card::order(Handle earlier, Handle later) {
  if (earlier == later) return;
  Current current(*this);
  Handle event = nullptr;
  driver(driver.event_create, &event, unsigned{kEventNoTiming});
  int record = driver.event_record.call(event, earlier);
  int wait = record ? record : driver.stream_wait.call(later, event, 0);
  driver.event_destroy.call(event);
  if (wait) throw DriverError(driver.describe(record ? driver.event_record.name : driver.stream_wait.name, wait));
}

void Card::synchronize(Handle stream) {
  Current current(*this);
  driver(driver.synchronize, stream);
}

Address Card::allocate(int64_t bytes) {
  if (bytes < 0) throw InvalidInput(text("bytes must not be negative, got ", bytes));
  Current current(*this);
  void* address = nullptr;
  driver(driver.allocate, &address, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  return reinterpret_cast<Address>(address);
}

void Card::free(Address address) {
  Current current(*this);
  driver(driver.free, pointer(address));
}

void Card::copy_to_device(Address to, const void* from, int64_t bytes) {
  Current current(*this);
  if (bytes) driver(driver.copy_to_device, pointer(to), from, static_cast<size_t>(bytes));
}

void Card::copy_to_host(void* to, Address from, int64_t bytes) {
  Current current(*this);
  if (bytes) driver(driver.copy_to_host, to, pointer(from), static_cast<size_t>(bytes));
}

Handle Card::make_event() {
  Current current(*this);
  Handle event = nullptr;
  driver(driver.event_create, &event, unsigned{kEventDefault});
  return event;
}

void Card::destroy_event(Handle event) {
  Current current(*this);
  driver(driver.event_destroy, event);
}

void Card::record_event(Handle event, Handle stream) {
  Current current(*this);
  driver(driver.event_record, event, stream);
}

double Card::milliseconds(Handle first, Handle last) {
  Current current(*this);
  float ms = 0;
  driver(driver.event_elapsed, &ms, first, last);
  return ms;
}

DriverFacts driver_facts() {
  Driver& driver = Driver::get();
  return {driver.path, version_text(driver.version)};
}

}  // namespace strata_pa::hip
