// Device memory, streams and events of a card, for self tests and measurements where no array library is at hand.
#pragma once
#include <cstdint>
#include <string>

#include "core/cuda_device.h"

namespace strata_pa::cuda {

Address allocate(Card& card, int64_t bytes);  // throws InvalidInput for a negative number
void free(Card& card, Address address);
void copy_to_device(Card& card, Address to, const void* from, int64_t bytes);
void copy_to_host(Card& card, void* to, Address from, int64_t bytes);  // waits for the legacy default stream

void synchronize(Card& card, Handle stream);

Handle make_event(Card& card);
void destroy_event(Card& card, Handle event);
void record_event(Card& card, Handle event, Handle stream);
double milliseconds(Card& card, Handle first, Handle last);  // between two events that have happened

struct DriverFacts {
  std::string path, cuda;  // cuda: the version that it supports, "13.0"
};
DriverFacts driver_facts();

}  // namespace strata_pa::cuda
