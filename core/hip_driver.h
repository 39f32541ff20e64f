// AMD's runtime library libamdhip64.so, opened at the first GPU call, as CUDA's driver is: importing the package touches no driver.
#pragma once
#include <cstddef>
#include <string>

#include "core/driver_library.h"
#include "core/gpu.h"

namespace strata_pa::hip {

// hipDeviceProp_tR0600, of which these fields are read.
struct Properties {
  char name[256];
  char skipped0[40];
  size_t shared_per_block;
  char skipped1[84];
  int processors;
  char skipped2[768];
  char arch[256];  // "gfx90a:sramecc+:xnack-"
  char skipped3[56];
};
static_assert(offsetof(Properties, shared_per_block) == 296 && offsetof(Properties, processors) == 388 && offsetof(Properties, arch) == 1160 &&
                  sizeof(Properties) == 1472,
              "as HIP 6 lays it out");

// hipPointerAttribute_t
struct PointerAttributes {
  int type, device;
  void *on_device, *on_host;
  int managed;
  unsigned flags;
};
enum MemoryType { kDeviceMemory = 2, kManagedMemory = 3 };

class Driver : public DriverLibrary {
 public:
  // The library that STRATA_PA_HIP_DRIVER names, else libamdhip64.so, loaded already or not; each is opened once and kept.
  // Throws UnsupportedDevice: no such library, no device, or one that is older than ROCm 6.
  static Driver& get();
  // The same, null in place of the exception. What cannot be opened is not tried again.
  static Driver* find_one();

  // HIP keeps a thread's last error until it is asked for: one that is dealt with here must not be found by others.
  std::string describe(const char* call, int status) const override;
  void forget_error() const { last_error.call(); }

  int version = 0;  // 10^7 * major + 10^5 * minor + patch

  Entry<unsigned> init{"hipInit"};
  Entry<int*> runtime_version{"hipRuntimeGetVersion"};
  Entry<> last_error{"hipGetLastError"};
  Entry<int*> device_count{"hipGetDeviceCount"};
  Entry<Properties*, int> properties{"hipGetDevicePropertiesR0600"};
  Entry<int*> get_device{"hipGetDevice"};
  Entry<int> set_device{"hipSetDevice"};
  Entry<Handle*, const void*> module_load{"hipModuleLoadData"};
  Entry<Handle*, Handle, const char*> module_function{"hipModuleGetFunction"};
  Entry<Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**> launch{"hipModuleLaunchKernel"};
  Entry<int*> exchange_capture_mode{"hipThreadExchangeStreamCaptureMode"};
  Entry<PointerAttributes*, const void*> pointer_attributes{"hipPointerGetAttributes"};
  Entry<void**, size_t> allocate{"hipMalloc"};
  Entry<void*> free{"hipFree"};
  Entry<void*, const void*, size_t> copy_to_device{"hipMemcpyHtoD"};
  Entry<void*, void*, size_t> copy_to_host{"hipMemcpyDtoH"};
  Entry<Handle> synchronize{"hipStreamSynchronize"};
  Entry<Handle, Handle, unsigned> stream_wait{"hipStreamWaitEvent"};
  Entry<Handle*, unsigned> event_create{"hipEventCreateWithFlags"};
  Entry<Handle> event_destroy{"hipEventDestroy"};
  Entry<Handle, Handle> event_record{"hipEventRecord"};
  Entry<float*, Handle, Handle> event_elapsed{"hipEventElapsedTime"};

 private:
  explicit Driver(const std::string& path);

  const char* (*error_name_)(int);
  const char* (*error_string_)(int);
};

std::string version_text(int version);  // 60241133 -> "6.2"

}  // namespace strata_pa::hip
