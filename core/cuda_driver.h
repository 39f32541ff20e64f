// The CUDA driver library, opened at the first GPU call: importing the package touches no driver.
#pragma once
#include <cstddef>
#include <string>

namespace strata_pa::cuda {

using Status = int;  // CUresult
using Handle = void*;  // CUcontext, CUmodule, CUfunction, CUstream, CUevent
using Address = unsigned long long;  // CUdeviceptr

enum DeviceAttribute { kMultiprocessorCount = 16, kSharedPerBlockOptin = 97, kComputeMajor = 75, kComputeMinor = 76 };
enum FunctionAttribute { kLocalBytes = 3, kBinaryVersion = 6, kMaxDynamicShared = 8 };
enum PointerAttribute { kPointerOrdinal = 9 };
enum CaptureMode { kCaptureRelaxed = 2 };
enum EventFlags { kEventDefault = 0, kEventNoTiming = 2 };

// An entry point: its exported name and its address.
template <class... A>
struct Entry {
  const char* name;
  Status (*call)(A...) = nullptr;
};

class Driver {
 public:
  // The driver that STRATA_PA_CUDA_DRIVER names, else libcuda.so.1; each library is opened once and kept.
  // Throws UnsupportedDevice: no such library, no device, or a driver that is too old.
  static Driver& get();

  // Calls an entry point; a status other than 0 becomes a DriverError with the call's name and the driver's text.
  template <class... A, class... B>
  void operator()(const Entry<A...>& entry, B... arguments) const {
    if (Status status = entry.call(arguments...)) fail(entry.name, status);
  }
  std::string describe(const char* name, Status status) const;

  int version = 0;  // of CUDA that the driver supports: 1000 * major + 10 * minor
  std::string path;

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
  [[noreturn]] void fail(const char* name, Status status) const;
  template <class... A>
  void find(Entry<A...>& entry);

  void* library_ = nullptr;
};

std::string version_text(int version);  // 13000 -> "13.0"

}  // namespace strata_pa::cuda
