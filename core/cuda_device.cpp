#include "core/cuda_device.h"

#include "core/errors.h"

namespace strata_pa::cuda {
namespace {

// Above this a function's limit must be raised first.
constexpr uint32_t kSharedByDefault = 48 << 10;  // of a block, what a kernel declares by itself included

}  // namespace

Card::Card(Driver& d, int n) : DriverGpu(d, {DeviceKind::kCUDA, n}), ordinal(n) {
  driver(driver.device_get, &device_, ordinal);
  char words[256] = "";
  driver(driver.device_name, words, int{sizeof words}, device_);
  words[sizeof words - 1] = 0;
  name = words;
  int major = 0, minor = 0;
  driver(driver.device_attribute, &major, int{kComputeMajor}, device_);
  driver(driver.device_attribute, &minor, int{kComputeMinor}, device_);
  driver(driver.device_attribute, &max_shared, int{kSharedPerBlockOptin}, device_);
  driver(driver.device_attribute, &processors, int{kMultiprocessorCount}, device_);
  sm = 10 * major + minor;
  architecture = text("sm_", sm);
}

Handle Card::context() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!context_) driver(driver.primary_context, &context_, device_);
  return context_;
}

Card::Module& Card::module(const Image& image) {
  auto found = modules_.find(image.name);
  if (found != modules_.end()) return found->second;
  Module m;
  if (choose(Vendor::kNvidia, sm, image).kind == Choice::kNone)
    m.reason = text("its image has ", cuda::describe(image), ", nothing for sm_", sm);
  else if (Status status = driver.module_load.call(&m.handle, image.begin)) {
    m = {nullptr, text("the driver refused its image: ", driver.describe(driver.module_load.name, status))};
    if (!is_final(status)) throw DriverError(m.reason);
  }
  return modules_[image.name] = m;
}

Function Card::function(const Image& image, const std::string& symbol, uint32_t shared_bytes) {
  Current current(*this);
  std::lock_guard<std::mutex> lock(mutex_);
  Function& f = functions_[symbol];
  if (!f.reason.empty() || (f.handle && shared_bytes <= f.shared_bytes)) return f;
  Relaxed relaxed(driver);
  // `what` failed: for good, or this time.
  auto refuse = [&](const char* what, const char* name, Status status) {
    std::string reason = text("the driver refused its ", what, ": ", driver.describe(name, status));
    if (!is_final(status)) throw DriverError(reason);
    return reason;
  };
  if (!f.handle) {
    Module& m = module(image);
    Function made;
    made.reason = m.reason;
    if (made.reason.empty()) {
      if (Status status = driver.module_function.call(&made.handle, m.handle, symbol.c_str()))
        made.reason = refuse("function", driver.module_function.name, status);
      else if (Status status2 = driver.function_load.call(made.handle))
        made.reason = refuse("function", driver.function_load.name, status2);
      else {
        int declared = 0;
        driver(driver.function_attribute, &m.binary_arch, int{kBinaryVersion}, made.handle);
        driver(driver.function_attribute, &declared, int{kStaticShared}, made.handle);
        made.shared_bytes = kSharedByDefault - static_cast<uint32_t>(declared);
      }
    }
    f = made;
    if (!f.reason.empty()) return f;
  }
  if (shared_bytes <= f.shared_bytes) return f;
  if (Status status = driver.set_function_attribute.call(f.handle, kMaxDynamicShared, static_cast<int>(shared_bytes))) {
    Function refused = f;  // smaller problems still run
    refused.reason = refuse("shared memory", driver.set_function_attribute.name, status);
    refused.reason += text(", ", shared_bytes, " bytes");
    return refused;
  }
  f.shared_bytes = shared_bytes;
  return f;
}

std::string Card::note(const char* name) {
  const Image& image = *find_image(name);
  std::lock_guard<std::mutex> lock(mutex_);
  auto module = modules_.find(image.name);
  int loaded = module == modules_.end() ? 0 : module->second.binary_arch;
  Choice expected = choose(Vendor::kNvidia, sm, image);
  bool has_own = expected.kind == Choice::kCubin && expected.arch == sm;
  bool compiled = loaded ? loaded == sm && !has_own : expected.kind == Choice::kPtx;
  if (!compiled) return "";
  return text(image.name, " has ", cuda::describe(image), ", no cubin for sm_", sm, ": the driver compiles its PTX");
}

int count_cards() { return count_devices(Driver::get()); }

Card& card(int ordinal) { return card_of<Card>(Driver::get(), ordinal, "cuda"); }

Current::Current(Card& card) : driver_(card.driver) { driver_(driver_.push_context, card.context()); }

Current::~Current() {
  Handle popped = nullptr;
  driver_.pop_context.call(&popped);  // what was pushed above; it cannot fail otherwise than with the whole driver
}

int ordinal_of(const void* address, const std::string& name) {
  Driver& driver = Driver::get();
  int ordinal = -1;
  Status status = driver.pointer_attribute.call(&ordinal, kPointerOrdinal, reinterpret_cast<Address>(address));
  if (status) throw InvalidInput(text(name, " is not memory of a CUDA device: ", driver.describe(driver.pointer_attribute.name, status)));
  return ordinal;
}

DriverFacts driver_facts() {
  Driver& driver = Driver::get();
  return {driver.path, version_text(driver.version)};
}

}  // namespace strata_pa::cuda
