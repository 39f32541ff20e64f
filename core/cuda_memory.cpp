#include "core/cuda_memory.h"

#include <algorithm>

#include "core/errors.h"

namespace strata_pa::cuda {

Address allocate(Card& card, int64_t bytes) {
  if (bytes < 0) throw InvalidInput(text("bytes must not be negative, got ", bytes));
  Current current(card);
  Address address = 0;
  card.driver(card.driver.allocate, &address, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  return address;
}

void free(Card& card, Address address) {
  Current current(card);
  card.driver(card.driver.free, address);
}

void copy_to_device(Card& card, Address to, const void* from, int64_t bytes) {
  Current current(card);
  if (bytes) card.driver(card.driver.copy_to_device, to, from, static_cast<size_t>(bytes));
}

void copy_to_host(Card& card, void* to, Address from, int64_t bytes) {
  Current current(card);
  if (bytes) card.driver(card.driver.copy_to_host, to, from, static_cast<size_t>(bytes));
}

void synchronize(Card& card, Handle stream) {
  Current current(card);
  card.driver(card.driver.synchronize, stream);
}

Handle make_event(Card& card) {
  Current current(card);
  Handle event = nullptr;
  card.driver(card.driver.event_create, &event, unsigned{kEventDefault});
  return event;
}

void destroy_event(Card& card, Handle event) {
  Current current(card);
  card.driver(card.driver.event_destroy, event);
}

void record_event(Card& card, Handle event, Handle stream) {
  Current current(card);
  card.driver(card.driver.event_record, event, stream);
}

double milliseconds(Card& card, Handle first, Handle last) {
  Current current(card);
  float ms = 0;
  card.driver(card.driver.event_elapsed, &ms, first, last);
  return ms;
}

DriverFacts driver_facts() {
  Driver& driver = Driver::get();
  return {driver.path, version_text(driver.version)};
}

}  // namespace strata_pa::cuda
