// The C API's handles as C++ objects. An engine would have its own pools and streams in place of Memory.
#pragma once
#include <strata_pa.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

inline void check(strata_pa_status status) {
  if (status != STRATA_PA_OK) throw std::runtime_error(strata_pa_last_error());
}

class Device {
 public:
  // "cpu", "cuda" or "cuda:1", "hip" or "hip:1"
  explicit Device(const std::string& name) {
    strata_pa_context_options options = {};
    options.size = sizeof options;
    size_t colon = name.find(':');
    std::string kind = name.substr(0, colon);
    const std::vector<std::string> kinds = {"cpu", "cuda", "hip"};  // as STRATA_PA_CPU, ... count
    while (kind_ < 3 && kinds[static_cast<size_t>(kind_)] != kind) ++kind_;
    if (kind_ == 3) throw std::runtime_error("there is no device '" + name + "': cpu, cuda, cuda:N, hip, hip:N");
    options.device = kind_;
    if (colon != std::string::npos) options.ordinal = std::stoi(name.substr(colon + 1));
    strata_pa_context* context;
    check(strata_pa_context_create(&options, &context));
    context_.reset(context);
  }

  const strata_pa_context* get() const { return context_.get(); }
  int32_t kind() const { return kind_; }
  bool is_cpu() const { return kind_ == STRATA_PA_CPU; }
  std::string text() const { return strata_pa_context_text(get()); }
  void synchronize(void* stream = nullptr) const { check(strata_pa_synchronize(get(), stream)); }

 private:
  std::unique_ptr<strata_pa_context, decltype(&strata_pa_context_destroy)> context_{nullptr, strata_pa_context_destroy};
  int32_t kind_ = STRATA_PA_CPU;
};

// Elements in a device's memory.
template <class T>
class Memory {
 public:
  Memory(const Device& device, size_t size) : device_(device), size_(size) {
    void* memory;
    check(strata_pa_allocate(device.get(), size * sizeof(T), &memory));
    data_ = static_cast<T*>(memory);
  }
  Memory(const Device& device, const T* host, size_t size) : Memory(device, size) { write(host, size); }
  ~Memory() { strata_pa_release(device_.get(), data_); }
  Memory(const Memory&) = delete;

  T* data() const { return data_; }
  size_t size() const { return size_; }
  void write(const T* host, size_t size, size_t first = 0) { check(strata_pa_upload(device_.get(), data_ + first, host, size * sizeof(T))); }
  std::vector<T> read() const {
    std::vector<T> host(size_);
    check(strata_pa_download(device_.get(), host.data(), data_, size_ * sizeof(T)));
    return host;
  }

 private:
  const Device& device_;
  size_t size_;
  T* data_ = nullptr;
};

class Plan {
 public:
  // kernel: nullptr for the default.
  Plan(const Device& device, const strata_pa_problem& problem, const char* kernel) {
    strata_pa_plan* plan;
    check(strata_pa_plan_create(device.get(), &problem, kernel, &plan));
    plan_.reset(plan);
  }
  std::string kernel() const { return strata_pa_plan_kernel(plan_.get()); }
  std::string text() const { return strata_pa_plan_text(plan_.get()); }
  size_t workspace_bytes() const { return static_cast<size_t>(strata_pa_plan_workspace_bytes(plan_.get())); }
  void run(const strata_pa_problem& problem, void* stream = nullptr, void* workspace = nullptr, size_t bytes = 0) const {
    check(strata_pa_run(plan_.get(), &problem, stream, workspace, bytes));
  }

 private:
  std::unique_ptr<strata_pa_plan, decltype(&strata_pa_plan_destroy)> plan_{nullptr, strata_pa_plan_destroy};
};
