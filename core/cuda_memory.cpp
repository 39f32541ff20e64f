// Device memory, streams and events of a card.
#include "core/cuda_device.h"

#include <algorithm>

#include "core/errors.h"

namespace strata_pa::cuda {

Address Card::allocate(int64_t bytes) {
  if (bytes < 0) throw InvalidInput(text("bytes must not be negative, got ", bytes));
  Current current(*this);
  Address address = 0;
  driver(driver.allocate, &address, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  return address;
}

void Card::free(Address address) {
  Current current(*this);
  driver(driver.free, address);
}

void Card::copy_to_device(Address to, const void* from, int64_t bytes) {
  Current current(*this);
  if (bytes) driver(driver.copy_to_device, to, from, static_cast<size_t>(bytes));
}

void Card::copy_to_host(void* to, Address from, int64_t bytes) {
  Current current(*this);
  if (bytes) driver(driver.copy_to_host, to, from, static_cast<size_t>(bytes));
}

void Card::synchronize(Handle stream) {
  Current current(*this);
  driver(driver.synchronize, stream);
}

Handle Card::make_event() {
  Current current(*this);
  Handle event = nullptr;
  driver(driver.event_create, &event, unsigned{kEventDefault});
  return event;
}

void Card::destroy_event(Handle event) {
  Current current(*this);
  driver(driver.event_destroy, event);
}

void Card::record_event(Handle event, Handle stream) {
  Current current(*this);
  driver(driver.event_record, event, stream);
}

double Card::milliseconds(Handle first, Handle last) {
  Current current(*this);
  float ms = 0;
  driver(driver.event_elapsed, &ms, first, last);
  return ms;
}

DriverFacts driver_facts() {
  Driver& driver = Driver::get();
  return {driver.path, version_text(driver.version)};
}

}  // namespace strata_pa::cuda
