// The one family of exceptions that the library throws (besides std::bad_alloc). Python sees the same names (core/python_module.cpp).
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace strata_pa {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct InvalidInput : Error {  // an argument, an array's content or an environment variable has a value that it cannot have
  using Error::Error;
};
struct InvalidType : InvalidInput {  // ... or a type, such as an array's dtype
  using InvalidInput::InvalidInput;
};
struct UnsupportedProblem : Error {  // well formed, but no kernel (or not the one asked for) serves it here
  using Error::Error;
};
struct DriverError : Error {  // a call of a GPU's driver failed: the call's name and the driver's text
  using Error::Error;
};
struct UnsupportedDevice : Error {  // a device, or an instruction set, that this build or this machine does not have
  using Error::Error;
};

// text("head_dim ", 96, " is odd"): messages are put together in one expression.
template <class... T>
std::string text(const T&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  return s.str();
}

template <class List>
std::string join(const List& list, const char* separator = ", ") {
  std::ostringstream s;
  const char* before = "";
  for (const auto& item : list) {
    s << before << item;
    before = separator;
  }
  return s.str();
}

}  // namespace strata_pa
