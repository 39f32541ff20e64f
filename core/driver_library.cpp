#include "core/driver_library.h"

#include <dlfcn.h>

#include "core/errors.h"

namespace strata_pa {

DriverLibrary::DriverLibrary(const std::string& where, const char* what) : path(where), what_(what) {
  library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library_) {
    const char* why = dlerror();
    throw UnsupportedDevice(text(what_, " cannot be opened: ", why ? why : path.c_str()));
  }
}

void* DriverLibrary::address_of(const char* name) const {
  void* address = dlsym(library_, name);
  if (!address) throw UnsupportedDevice(text(what_, " ", path, " has no ", name));
  return address;
}

void DriverLibrary::fail(const char* call, int status) const { throw DriverError(describe(call, status)); }

std::string find_library(std::initializer_list<const char*> names) {
  for (int only_loaded : {RTLD_NOLOAD, 0})
    for (const char* name : names)
      if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL | only_loaded)) {
        if (only_loaded) dlclose(library);  // it stays with who loaded it
        return name;
      }
  return *names.begin();
}

std::string describe_status(const char* call, int status, const char* code, const char* words) {
  return text(call, ": ", code ? code : "status", code ? "" : text(" ", status), words ? text(" (", words, ")") : "");
}

bool is_final(int status) {
  for (int s : {1, 200, 209, 218, 221, 222, 223, 300, 500, 801})
    if (s == status) return true;
  return false;
}

}  // namespace strata_pa
