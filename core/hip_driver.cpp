#include "core/hip_driver.h"

#include <map>
#include <memory>
#include <mutex>

#include "core/errors.h"
#include "core/switches.h"

namespace strata_pa::hip {

std::string version_text(int version) { return text(version / 10000000, ".", version / 100000 % 100); }

// PyTorch's wheels bring the library under its plain name, ROCm's installations by its versions.
Driver::Driver(const std::string& where)
    : DriverLibrary(where.empty() ? find_library({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"}) : where, "the HIP driver") {
  error_name_ = reinterpret_cast<const char* (*)(int)>(address_of("hipGetErrorName"));
  error_string_ = reinterpret_cast<const char* (*)(int)>(address_of("hipGetErrorString"));
  find(runtime_version), find(init), find(last_error);
  (*this)(runtime_version, &version);
  if (version < 60000000)
    throw UnsupportedDevice(text("the HIP driver ", path, " is of ROCm ", version_text(version), "; this build needs >= 6.0"));
  find(device_count), find(properties), find(get_device), find(set_device), find(module_load), find(module_function), find(launch);
  find(exchange_capture_mode), find(pointer_attributes), find(allocate), find(free), find(copy_to_device), find(copy_to_host), find(synchronize);
  find(stream_wait), find(event_create), find(event_destroy), find(event_record), find(event_elapsed);
  int status = init.call(0), n = 0;
  const char* failed = init.name;
  if (!status) status = device_count.call(&n), failed = device_count.name;
  if (status) throw UnsupportedDevice(text("no HIP device can be used: ", describe(failed, status)));
}

static std::mutex& mutex = *new std::mutex;

Driver& Driver::get() {
  static auto& drivers = *new std::map<std::string, std::unique_ptr<Driver>>;  // never destroyed, as the libraries are never closed
  std::string path = hip_driver_path();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Driver>& driver = drivers[path];
  if (!driver) driver.reset(new Driver(path));
  return *driver;
}

Driver* Driver::find_one() {
  static auto& known = *new std::map<std::string, Driver*>;
  std::string path = hip_driver_path();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = known.find(path); found != known.end()) return found->second;
  }
  Driver* driver = nullptr;
  try {
    driver = &get();
  } catch (const Error&) {
  }
  std::lock_guard<std::mutex> lock(mutex);
  return known[path] = driver;
}

std::string Driver::describe(const char* call, int status) const {
  forget_error();
  return describe_status(call, status, error_name_(status), error_string_(status));
}

}  // namespace strata_pa::hip
