#include "core/cuda_driver.h"

#include <map>
#include <memory>
#include <mutex>

#include "core/cuda_images.h"
#include "core/errors.h"
#include "core/switches.h"

namespace strata_pa::cuda {

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

Driver::Driver(const std::string& where) : DriverLibrary(where, "the CUDA driver") {
  // The version first: an old driver lacks some of the rest, and should be told what it is.
  find(driver_version), find(error_name), find(error_string), find(init);
  (*this)(driver_version, &version);
  if (int least = 1000 * built_images().driver_major; version < least)
    throw UnsupportedDevice(text("the CUDA driver ", path, " supports CUDA ", version_text(version), "; this build, by nvcc ", built_images().compiler,
                                 ", needs >= ", version_text(least)));
  find(device_count), find(device_get), find(device_name), find(device_attribute), find(primary_context), find(push_context), find(pop_context);
  find(module_load), find(module_function), find(function_load), find(function_attribute), find(set_function_attribute), find(launch);
  find(exchange_capture_mode), find(pointer_attribute), find(allocate), find(free), find(copy_to_device), find(copy_to_host), find(synchronize);
  find(stream_wait), find(event_create), find(event_destroy), find(event_record), find(event_elapsed);
  if (Status status = init.call(0)) throw UnsupportedDevice(text("no CUDA device can be used: ", describe(init.name, status)));
}

Driver& Driver::get() {
  // Never destroyed: a library must not be unloaded under streams that others still use.
  static std::mutex& mutex = *new std::mutex;
  static auto& drivers = *new std::map<std::string, std::unique_ptr<Driver>>;
  std::string path = cuda_driver_path();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Driver>& driver = drivers[path];
  if (!driver) driver.reset(new Driver(path));
  return *driver;
}

std::string Driver::describe(const char* call, Status status) const {
  const char *code = nullptr, *words = nullptr;
  error_name.call(status, &code);
  error_string.call(status, &words);
  return describe_status(call, status, code, words);
}

}  // namespace strata_pa::cuda
