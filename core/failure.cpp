#include "core/failure.h"

namespace strata_pa {
namespace {

Thrown thrown(Failure failure, const char* what) noexcept {
  try {
    return {failure, what};
  } catch (...) {  // no memory for the text
    return {Failure::kOutOfMemory, {}};
  }
}

}  // namespace

Thrown current_exception() noexcept {
  try {
    throw;
  } catch (const InvalidType& x) {
    return thrown(Failure::kInvalidType, x.what());
  } catch (const InvalidInput& x) {
    return thrown(Failure::kInvalidInput, x.what());
  } catch (const UnsupportedProblem& x) {
    return thrown(Failure::kUnsupportedProblem, x.what());
  } catch (const UnsupportedDevice& x) {
    return thrown(Failure::kUnsupportedDevice, x.what());
  } catch (const DriverError& x) {
    return thrown(Failure::kDriver, x.what());
  } catch (const std::bad_alloc&) {
    return thrown(Failure::kOutOfMemory, "not enough memory");
  } catch (const std::exception& x) {
    return thrown(Failure::kInternal, x.what());
  } catch (...) {
    return thrown(Failure::kInternal, "an exception of an unknown type");
  }
}

}  // namespace strata_pa
