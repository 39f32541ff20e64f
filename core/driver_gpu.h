// What a card's object does alike for both vendors: the drivers name these calls alike, and number flags alike.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/errors.h"
#include "core/gpu.h"

namespace strata_pa {

constexpr unsigned kEventDefault = 0, kEventNoTiming = 2;
constexpr int kCaptureRelaxed = 2;

// Capture forbids a thread to load modules, unless it says that it knows what it does. Nothing here touches the captured stream.
template <class Driver>
class Relaxed {
 public:
  explicit Relaxed(Driver& driver) : driver_(driver) { driver_(driver_.exchange_capture_mode, &mode_); }
  ~Relaxed() { driver_.exchange_capture_mode.call(&mode_); }
  Relaxed(const Relaxed&) = delete;

 private:
  Driver& driver_;
  int mode_ = kCaptureRelaxed;
};

// Card is the class that derives from this; its Scope makes a card current while it lives. Pointer: how the driver has addresses.
template <class Card, class Driver, class Pointer>
class DriverGpu : public Gpu {
 public:
  DriverGpu(Driver& d, DeviceId at) : Gpu(at), driver(d) {}

  Driver& driver;

  void order(Handle earlier, Handle later) override {
    if (earlier == later) return;
    typename Card::Scope current(self());
    Handle event = nullptr;
    driver(driver.event_create, &event, kEventNoTiming);
    int record = driver.event_record.call(event, earlier);
    int wait = record ? record : driver.stream_wait.call(later, event, 0);
    driver.event_destroy.call(event);
    if (wait) throw DriverError(driver.describe(record ? driver.event_record.name : driver.stream_wait.name, wait));
  }

  void synchronize(Handle stream) override {
    typename Card::Scope current(self());
    driver(driver.synchronize, stream);
  }

  Address allocate(int64_t bytes) override {
    if (bytes < 0) throw InvalidInput(text("bytes must not be negative, got ", bytes));
    typename Card::Scope current(self());
    Pointer address = {};
    driver(driver.allocate, &address, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
    return reinterpret_cast<Address>(address);
  }

  void free(Address address) override {
    typename Card::Scope current(self());
    driver(driver.free, pointer(address));
  }

  void copy_to_device(Address to, const void* from, int64_t bytes) override {
    typename Card::Scope current(self());
    if (bytes) driver(driver.copy_to_device, pointer(to), from, static_cast<size_t>(bytes));
  }

  void copy_to_host(void* to, Address from, int64_t bytes) override {
    typename Card::Scope current(self());
    if (bytes) driver(driver.copy_to_host, to, pointer(from), static_cast<size_t>(bytes));
  }

  Handle make_event() override {
    typename Card::Scope current(self());
    Handle event = nullptr;
    driver(driver.event_create, &event, kEventDefault);
    return event;
  }

  void destroy_event(Handle event) override {
    typename Card::Scope current(self());
    driver(driver.event_destroy, event);
  }

  void record_event(Handle event, Handle stream) override {
    typename Card::Scope current(self());
    driver(driver.event_record, event, stream);
  }

  double milliseconds(Handle first, Handle last) override {
    typename Card::Scope current(self());
    float ms = 0;
    driver(driver.event_elapsed, &ms, first, last);
    return ms;
  }

 private:
  Card& self() { return static_cast<Card&>(*this); }
  static Pointer pointer(Address address) { return reinterpret_cast<Pointer>(address); }
};

template <class Driver>
int count_devices(Driver& driver) {
  int n = 0;
  driver(driver.device_count, &n);
  return n;
}

// The one object of a device. Throws UnsupportedDevice for an ordinal that the driver does not have. backend: "cuda".
template <class Card, class Driver>
Card& card_of(Driver& driver, int ordinal, const char* backend) {
  static std::mutex& mutex = *new std::mutex;
  static auto& cards = *new std::map<std::pair<Driver*, int>, std::unique_ptr<Card>>;
  int n = count_devices(driver);
  if (ordinal < 0 || ordinal >= n)
    throw UnsupportedDevice(text("there is no ", backend, ":", ordinal, "; the driver has ", n, n == 1 ? " device" : " devices"));
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Card>& c = cards[{&driver, ordinal}];
  if (!c) c = std::make_unique<Card>(driver, ordinal);
  return *c;
}

}  // namespace strata_pa
