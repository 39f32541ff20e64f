// An AMD driver library (libamdhip64.so of ROCm 6) without a GPU.
#include "fake_driver.h"

namespace {

enum : int { kInvalidValue = 1, kNoDevice = 100, kInvalidDevice = 101, kInvalidImage = 200, kNoBinary = 209, kNotFound = 500, kCaptured = 900 };

struct Card {
  std::string arch, name;
};
struct Module {
  int device;
};
struct Function {
  int device;
  std::string name;
};
int version = 60241133;
std::vector<Card> cards;
bool unregistered_is_an_error = true;  // hipPointerGetAttributes of what the driver does not know
thread_local int current = 0, last_error = 0;

int failed(int status) { return last_error = status; }

// Whether a code object is for the architecture: its notes name the target.
bool is_for(const unsigned char* image, const std::string& arch) {
  uint64_t sections;
  uint16_t size, count;
  std::memcpy(&sections, image + 0x28, 8), std::memcpy(&size, image + 0x3a, 2), std::memcpy(&count, image + 0x3c, 2);
  const std::string whole(reinterpret_cast<const char*>(image), sections + size * count), target = "amdgcn-amd-amdhsa--" + arch;
  const size_t at = whole.find(target);
  return at != std::string::npos && !std::isxdigit(static_cast<unsigned char>(whole[at + target.size()]));
}

}  // namespace

#undef ENTER
#define ENTER(...)                                       \
  std::lock_guard<std::recursive_mutex> lock(mutex);     \
  if (int status = enter(__func__, std::string{__VA_ARGS__})) return failed(status)

// --- For the tests

EXPORT void fake_version(int v) { version = v; }
EXPORT void fake_card(const char* arch, const char* name) { cards.push_back({arch, name}); }
EXPORT void fake_current(int device) { current = device; }
EXPORT int fake_current_now() { return current; }
EXPORT int fake_last_error() { return last_error; }
EXPORT void fake_unregistered(int is_an_error) { unregistered_is_an_error = is_an_error; }

// --- The driver

EXPORT int hipInit(unsigned) {
  ENTER();
  return 0;
}
EXPORT int hipRuntimeGetVersion(int* v) {
  ENTER();
  *v = version;
  return 0;
}
EXPORT int hipGetLastError() { return std::exchange(last_error, 0); }
EXPORT const char* hipGetErrorName(int status) {
  static std::map<int, std::string> names;
  return (names[status] = "hipFake" + std::to_string(status)).c_str();
}
EXPORT const char* hipGetErrorString(int status) {
  static std::map<int, std::string> words;
  return (words[status] = "the words for " + std::to_string(status)).c_str();
}
EXPORT int hipGetDeviceCount(int* n) {
  ENTER();
  *n = static_cast<int>(cards.size());
  return cards.empty() ? failed(kNoDevice) : 0;
}
// hipDeviceProp_tR0600 as ROCm 6's header lays it out.
EXPORT int hipGetDevicePropertiesR0600(void* properties, int device) {
  ENTER();
  if (device < 0 || device >= static_cast<int>(cards.size())) return failed(kInvalidDevice);
  auto* p = static_cast<unsigned char*>(properties);
  std::memset(p, 0xee, 1472);
  const uint64_t shared = 64 << 10;
  const int processors = 104;
  std::strcpy(reinterpret_cast<char*>(p), cards[device].name.c_str());
  std::memcpy(p + 296, &shared, 8);
  std::memcpy(p + 388, &processors, 4);
  std::strcpy(reinterpret_cast<char*>(p) + 1160, cards[device].arch.c_str());
  return 0;
}
EXPORT int hipGetDevice(int* device) {
  ENTER();
  *device = current;
  return 0;
}
EXPORT int hipSetDevice(int device) {
  ENTER();
  if (device < 0 || device >= static_cast<int>(cards.size())) return failed(kInvalidDevice);
  current = device;
  return 0;
}
EXPORT int hipModuleLoadData(void** module, const void* image) {
  ENTER();
  if (capture_mode != 2) return failed(kCaptured);  // a stream may be under capture
  if (std::memcmp(image, "\177ELF", 4) != 0) return failed(kInvalidImage);
  const std::string& arch = cards[current].arch;
  if (!is_for(static_cast<const unsigned char*>(image), arch.substr(0, arch.find(':')))) return failed(kNoBinary);
  *module = new Module{current};
  return 0;
}
EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
  ENTER(name);
  if (std::strncmp(name, "strata_", 7) != 0) return failed(kNotFound);
  *function = new Function{static_cast<Module*>(module)->device, name};
  return 0;
}
EXPORT int hipThreadExchangeStreamCaptureMode(int* mode) {
  ENTER();
  std::swap(*mode, capture_mode);
  return 0;
}
EXPORT int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                 void* stream, void** parameters, void**) {
  auto* f = static_cast<Function*>(function);
  {
    ENTER(f->name);
    if (f->device != current) return failed(kInvalidDevice);
    // A grid has fewer than 2^32 threads.
    if (gx < 1 || uint64_t{gx} * bx >> 32 || gy != 1 || gz != 1 || bx < 64 || bx > 1024 || by != 1 || bz != 1 || shared > 64 << 10)
      return failed(kInvalidValue);
  }
  return record(current, gx, bx, shared, stream, f->name, parameters);
}
EXPORT int hipPointerGetAttributes(void* attributes, const void* address) {
  ENTER();
  struct {
    int type, device;
    const void *on_device, *on_host;
    int managed;
    unsigned flags;
  } a = {};
  const int card = card_of(reinterpret_cast<uint64_t>(address), cards.size());
  if (card < 0 && unregistered_is_an_error) return failed(kInvalidValue);
  a.type = card < 0 ? 0 : 2;
  a.device = card < 0 ? 0 : card;
  a.on_device = address;
  std::memcpy(attributes, &a, sizeof a);
  return 0;
}
EXPORT int hipMalloc(void** address, size_t bytes) {
  ENTER();
  *address = allocate(bytes, current);
  return *address ? 0 : failed(2);
}
EXPORT int hipFree(void* address) {
  ENTER();
  return release(address) ? 0 : failed(kInvalidValue);
}
EXPORT int hipMemcpyHtoD(void* to, const void* from, size_t bytes) {
  ENTER();
  std::memcpy(to, from, bytes);
  return 0;
}
EXPORT int hipMemcpyDtoH(void* to, void* from, size_t bytes) {
  ENTER();
  std::memcpy(to, from, bytes);
  return 0;
}
EXPORT int hipStreamSynchronize(void*) {
  ENTER();
  return 0;
}
EXPORT int hipStreamWaitEvent(void*, void*, unsigned) {
  ENTER();
  return 0;
}
EXPORT int hipEventCreateWithFlags(void** event, unsigned) {
  ENTER();
  *event = new int;
  return 0;
}
EXPORT int hipEventDestroy(void* event) {
  ENTER();
  delete static_cast<int*>(event);
  return 0;
}
EXPORT int hipEventRecord(void*, void*) {
  ENTER();
  return 0;
}
EXPORT int hipEventElapsedTime(float* ms, void*, void*) {
  ENTER();
  *ms = 1.0f;
  return 0;
}
