// A GPU vendor's driver library, opened at run time, and the calls of it that are used.
#pragma once
#include <initializer_list>
#include <string>

namespace strata_pa {

// An entry point: its exported name and its address. Both vendors' functions return a status, 0 for success.
template <class... A>
struct Entry {
  const char* name;
  int (*call)(A...) = nullptr;
};

class DriverLibrary {
 public:
  // `what` names it in messages: "the CUDA driver". Throws UnsupportedDevice where there is no such library.
  DriverLibrary(const std::string& path, const char* what);
  DriverLibrary(const DriverLibrary&) = delete;
  virtual ~DriverLibrary() = default;  // stays open: it must not be unloaded under streams that others still use

  const std::string path;

  // Calls an entry point; a status other than 0 becomes a DriverError with the call's name and the driver's text.
  template <class... A, class... B>
  void operator()(const Entry<A...>& entry, B... arguments) const {
    if (int status = entry.call(arguments...)) fail(entry.name, status);
  }
  virtual std::string describe(const char* call, int status) const = 0;

 protected:
  // Throws UnsupportedDevice where the library does not have it.
  template <class... A>
  void find(Entry<A...>& entry) const {
    entry.call = reinterpret_cast<int (*)(A...)>(address_of(entry.name));
  }
  void* address_of(const char* name) const;

 private:
  [[noreturn]] void fail(const char* call, int status) const;

  const char* what_;
  void* library_ = nullptr;
};

// Of these names that which the process has loaded already, else the first that can be opened, else the first. Two copies of a driver would not know
// each other's streams and memory.
std::string find_library(std::initializer_list<const char*> names);

// "call: ErrorName (the driver's words)", as far as it has them.
std::string describe_status(const char* call, int status, const char* code, const char* words);

// Refusals that will be the same next time: invalid value, image, source or PTX, no binary or no compiler for the device, not found. Others (out of
// memory, an error of earlier work) say nothing about the kernel. HIP numbers its errors as CUDA's driver does.
bool is_final(int status);

}  // namespace strata_pa
