// The CUDA driver library, opened at the first GPU call: importing the package touches no driver.
#pragma once
#include <cstddef>
#include <string>

#include "core/driver_library.h"
#include "core/gpu.h"

namespace strata_pa::cuda {

using Status = int;  // CUresult

enum DeviceAttribute { kMultiprocessorCount = 16, kSharedPerBlockOptin = 97, kComputeMajor = 75, kComputeMinor = 76 };
enum FunctionAttribute { kStaticShared = 1, kLocalBytes = 3, kBinaryVersion = 6, kMaxDynamicShared = 8 };
enum PointerAttribute { kPointerOrdinal = 9 };

class Driver : public DriverLibrary {
 public:
  // The driver that STRATA_PA_CUDA_DRIVER names, else libcuda.so.1; each library is opened once and kept.
  // Throws UnsupportedDevice: no such library, no device, or a driver that is too old.
  static Driver& get();

  std::string describe(const char* call, Status status) const override;

  int version = 0;  // of CUDA that the driver supports: 1000 * major + 10 * minor

  Entry<unsigned> init{"cuInit"};
  Entry<int*> driver_version{"cuDriverGetVersion"};
  Entry<Status, const char**> error_name{"cuGetErrorName"};
  Entry<Status, const char**> error_string{"cuGetErrorString"};
  Entry<int*> device_count{"cuDeviceGetCount"};
  Entry<int*, int> device_get{"cuDeviceGet"};
  Entry<char*, int, int> device_name{"cuDeviceGetName"};
  Entry<int*, int, int> device_attribute{"cuDeviceGetAttribute"};
  Entry<Handle*, int> primary_context{"cuDevicePrimaryCtxRetain"};
  Entry<Handle> push_context{"cuCtxPushCurrent_v2"};
  Entry<Handle*> pop_context{"cuCtxPopCurrent_v2"};
  Entry<Handle*, const void*> module_load{"cuModuleLoadData"};
  Entry<Handle*, Handle, const char*> module_function{"cuModuleGetFunction"};
  Entry<Handle> function_load{"cuFuncLoad"};
  Entry<int*, int, Handle> function_attribute{"cuFuncGetAttribute"};
  Entry<Handle, int, int> set_function_attribute{"cuFuncSetAttribute"};
  Entry<Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**> launch{"cuLaunchKernel"};
  Entry<int*> exchange_capture_mode{"cuThreadExchangeStreamCaptureMode"};
  Entry<void*, int, Address> pointer_attribute{"cuPointerGetAttribute"};
  Entry<Address*, size_t> allocate{"cuMemAlloc_v2"};
  Entry<Address> free{"cuMemFree_v2"};
  Entry<Address, const void*, size_t> copy_to_device{"cuMemcpyHtoD_v2"};
  Entry<void*, Address, size_t> copy_to_host{"cuMemcpyDtoH_v2"};
  Entry<Handle> synchronize{"cuStreamSynchronize"};
  Entry<Handle, Handle, unsigned> stream_wait{"cuStreamWaitEvent"};
  Entry<Handle*, unsigned> event_create{"cuEventCreate"};
  Entry<Handle> event_destroy{"cuEventDestroy_v2"};
  Entry<Handle, Handle> event_record{"cuEventRecord"};
  Entry<float*, Handle, Handle> event_elapsed{"cuEventElapsedTime"};

 private:
  explicit Driver(const std::string& path);
};

std::string version_text(int version);  // 13000 -> "13.0"

}  // namespace strata_pa::cuda
