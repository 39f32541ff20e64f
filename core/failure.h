// What a call threw, as a code and a text: for the borders that no exception may cross (include/strata_pa.h, core/border.h).
#pragma once
#include <new>
#include <string>

#include "core/errors.h"

namespace strata_pa {

enum class Failure : int {
  kNone = 0,
  kInvalidInput = 1,
  kInvalidType = 2,
  kUnsupportedProblem = 3,
  kUnsupportedDevice = 4,
  kDriver = 5,
  kOutOfMemory = 6,
  kInternal = 7,
};

struct Thrown {
  Failure failure = Failure::kNone;
  std::string what;
};

// Of the exception that is being handled; to be called in a catch (...).
Thrown current_exception() noexcept;

// The exception of that name.
[[noreturn]] inline void rethrow(const Thrown& thrown) {
  switch (thrown.failure) {
    case Failure::kInvalidInput:
      throw InvalidInput(thrown.what);
    case Failure::kInvalidType:
      throw InvalidType(thrown.what);
    case Failure::kUnsupportedProblem:
      throw UnsupportedProblem(thrown.what);
    case Failure::kUnsupportedDevice:
      throw UnsupportedDevice(thrown.what);
    case Failure::kDriver:
      throw DriverError(thrown.what);
    case Failure::kOutOfMemory:
      throw std::bad_alloc();
    default:
      throw std::runtime_error(thrown.what);
  }
}

}  // namespace strata_pa
