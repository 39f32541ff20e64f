// A CUDA driver library without a GPU.
#include "fake_driver.h"

namespace {

enum : int { kInvalidValue = 1, kNoDevice = 100, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201, kNoBinary = 209, kNotFound = 500 };

struct Card {
  int sm, shared;
  std::string name;
};
struct Module {
  Card* card;
  int runs;  // the architecture of the chosen cubin, or the card's own for PTX
};
struct Function {
  Module* module;
  std::string name;
  int declared, shared;  // bytes of shared memory: what the kernel declares by itself; what a launch may add
};
// As ptxas counts them.
int declared_by(const std::string& name) {
  if (name.compare(0, 17, "strata_tile_union") == 0) return 17408;
  return name.compare(0, 13, "strata_exact_") == 0 ? 1024 : 0;
}
int version = 13000, processors = 132;
std::vector<Card> cards;
thread_local std::vector<Card*> current;

int ordinal_of(const Card* card) { return static_cast<int>(card - cards.data()); }

template <class T>
T at(const unsigned char* p, size_t offset) {
  T x;
  std::memcpy(&x, p + offset, sizeof x);
  return x;
}

// A fat binary, read as the driver does: the card's own cubin, else the best of its major version below it, else the best PTX. 0: nothing.
int choose(const unsigned char* image, int sm) {
  int cubin = 0, ptx = 0;
  const unsigned char* p = image + at<uint16_t>(image, 6);
  const unsigned char* end = p + at<uint64_t>(image, 8);
  while (p < end) {
    int kind = at<uint16_t>(p, 0), arch = static_cast<int>(at<uint32_t>(p, 28));
    if (kind == 2 && arch <= sm && arch / 10 == sm / 10) cubin = std::max(cubin, arch);
    if (kind == 1 && arch <= sm) ptx = std::max(ptx, arch);
    p += at<uint32_t>(p, 4) + at<uint64_t>(p, 8);
  }
  return cubin ? cubin : ptx ? sm : 0;
}

}  // namespace

// --- For the tests

EXPORT void fake_version(int v) { version = v; }
EXPORT void fake_processors(int n) { processors = n; }
EXPORT void fake_card(int sm, int shared, const char* name) { cards.push_back({sm, shared, name}); }
EXPORT int fake_depth() { return static_cast<int>(current.size()); }

// --- The driver

EXPORT int cuInit(unsigned) {
  ENTER();
  return cards.empty() ? kNoDevice : 0;
}
EXPORT int cuDriverGetVersion(int* v) {
  ENTER();
  *v = version;
  return 0;
}
EXPORT int cuGetErrorName(int status, const char** text) {
  static std::map<int, std::string> names;
  *text = (names[status] = "FAKE_ERROR_" + std::to_string(status)).c_str();
  return 0;
}
EXPORT int cuGetErrorString(int status, const char** text) {
  static std::map<int, std::string> words;
  *text = (words[status] = "the words for " + std::to_string(status)).c_str();
  return 0;
}
EXPORT int cuDeviceGetCount(int* n) {
  ENTER();
  *n = static_cast<int>(cards.size());
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  ENTER();
  *device = ordinal + 100;  // not the ordinal: a mix-up shows
  return ordinal < 0 || ordinal >= static_cast<int>(cards.size()) ? kInvalidDevice : 0;
}
EXPORT int cuDeviceGetName(char* name, int size, int device) {
  ENTER();
  std::strncpy(name, cards.at(device - 100).name.c_str(), size);
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER();
  const Card& card = cards.at(device - 100);
  *value = attribute == 75 ? card.sm / 10 : attribute == 76 ? card.sm % 10 : attribute == 97 ? card.shared : attribute == 16 ? processors : -1;
  return *value < 0 ? kInvalidValue : 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER();
  *context = &cards.at(device - 100);
  return 0;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  ENTER();
  current.push_back(static_cast<Card*>(context));
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  ENTER();
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  ENTER();
  if (current.empty()) return kInvalidContext;
  if (capture_mode != 2) return 900;  // a stream may be under capture
  if (at<uint32_t>(static_cast<const unsigned char*>(image), 0) != 0xBA55ED50u) return kInvalidImage;
  int runs = choose(static_cast<const unsigned char*>(image), current.back()->sm);
  if (!runs) return kNoBinary;
  *module = new Module{current.back(), runs};
  return 0;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER(name);
  auto* m = static_cast<Module*>(module);
  if (current.empty() || current.back() != m->card) return kInvalidContext;
  if (std::strncmp(name, "strata_", 7) != 0) return kNotFound;
  *function = new Function{m, name, declared_by(name), (48 << 10) - declared_by(name)};
  return 0;
}
EXPORT int cuFuncLoad(void* function) {
  ENTER(static_cast<Function*>(function)->name);
  return capture_mode == 2 ? 0 : 900;
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, void* function) {
  ENTER();
  auto* f = static_cast<Function*>(function);
  *value = attribute == 6 ? f->module->runs : attribute == 1 ? f->declared : attribute == 8 ? f->shared : 0;
  return 0;
}
EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  auto* f = static_cast<Function*>(function);
  ENTER(f->name);
  if (attribute != 8 || value + f->declared > f->module->card->shared) return kInvalidValue;
  f->shared = value;
  return 0;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER();
  std::swap(*mode, capture_mode);
  return 0;
}
EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream,
                          void** parameters, void**) {
  auto* f = static_cast<Function*>(function);
  {
    ENTER(f->name);
    if (current.empty() || current.back() != f->module->card) return kInvalidContext;
    if (gx < 1 || gx > 0x7fffffffu || gy != 1 || gz != 1 || bx < 32 || bx > 1024 || by != 1 || bz != 1 || shared > static_cast<unsigned>(f->shared))
      return kInvalidValue;
  }
  return record(ordinal_of(f->module->card), gx, bx, shared, stream, f->name, parameters);
}
EXPORT int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  ENTER();
  if (attribute != 9) return kInvalidValue;
  const int ordinal = card_of(address, cards.size());
  if (ordinal < 0) return kInvalidValue;
  *static_cast<int*>(value) = ordinal;
  return 0;
}
EXPORT int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  ENTER();
  if (current.empty()) return kInvalidContext;
  void* p = allocate(bytes, ordinal_of(current.back()));
  *address = reinterpret_cast<uint64_t>(p);
  return p ? 0 : 2;
}
EXPORT int cuMemFree_v2(uint64_t address) {
  ENTER();
  return release(reinterpret_cast<void*>(address)) ? 0 : kInvalidValue;
}
EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  ENTER();
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
EXPORT int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  ENTER();
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
EXPORT int cuStreamSynchronize(void*) {
  ENTER();
  return 0;
}
EXPORT int cuStreamWaitEvent(void*, void*, unsigned) {
  ENTER();
  return 0;
}
EXPORT int cuEventCreate(void** event, unsigned) {
  ENTER();
  *event = new int;
  return 0;
}
EXPORT int cuEventDestroy_v2(void* event) {
  ENTER();
  delete static_cast<int*>(event);
  return 0;
}
EXPORT int cuEventRecord(void*, void*) {
  ENTER();
  return 0;
}
EXPORT int cuEventElapsedTime(float* ms, void*, void*) {
  ENTER();
  *ms = 1.0f;
  return 0;
}
