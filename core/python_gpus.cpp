// The GPUs' side of strata_pa._core: cards, images, and device memory for self tests and measurements where no array library is at hand.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "core/border.h"
#include "core/errors.h"
#include "core/python_arrays.h"
#include "core/python_module.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

Gpu& gpu_of(const std::string& backend, int ordinal) {
  if (backend != "cuda" && backend != "hip") throw InvalidInput(text("backend must be 'cuda' or 'hip', got '", backend, "'"));
  return library().gpu({backend == "hip" ? DeviceKind::kHIP : DeviceKind::kCUDA, ordinal});
}

// Bytes on a card, freed with the object.
class DeviceMemory {
 public:
  DeviceMemory(int ordinal, int64_t bytes, const std::string& backend) : card_(gpu_of(backend, ordinal)), bytes_(bytes), address_(library().allocate(card_, bytes)) {}
  ~DeviceMemory() {
    try {
      free();
    } catch (const Error&) {  // the driver is gone, and the memory with it
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;

  void free() {
    if (!address_) return;
    library().free(card_, std::exchange(address_, 0));
  }
  uint64_t address() const { return address_; }

  void write(py::object array) const {
    void* host = same_size(array);
    py::gil_scoped_release release;
    library().copy_to_device(card_, address_, host, bytes_);
  }
  // Waits for the legacy default stream, as every copy to host memory does.
  void read(py::object array) const {
    void* host = same_size(array);
    py::gil_scoped_release release;
    library().copy_to_host(card_, host, address_, bytes_);
  }

 private:
  void* same_size(py::object array) const {
    ArrayView a = view_array(array, "array");
    need_host(a);
    int64_t room = 1;
    for (size_t i = a.shape.size(); i-- > 0; room *= a.shape[i])
      if (a.size() > 0 && a.shape[i] > 1 && a.strides[i] != room) throw InvalidInput("array must be C-contiguous");
    if (a.size() * a.itemsize != bytes_) throw InvalidInput(text("array has ", a.size() * a.itemsize, " bytes, the memory ", bytes_));
    return a.data;
  }

  Gpu& card_;
  int64_t bytes_;
  Address address_;
};

// A pair of events on a stream of a card: the time between them.
class DeviceTimer {
 public:
  DeviceTimer(int ordinal, int64_t stream, const std::string& backend) : card_(gpu_of(backend, ordinal)), stream_(reinterpret_cast<void*>(stream)) {
    for (Handle& event : events_) event = library().make_event(card_);
  }
  ~DeviceTimer() {
    try {
      for (Handle event : events_) library().destroy_event(card_, event);
    } catch (const Error&) {  // as above
    }
  }
  DeviceTimer(const DeviceTimer&) = delete;

  void record(int which) const { library().record_event(card_, events_[which], stream_); }
  double milliseconds() const {
    py::gil_scoped_release release;
    library().synchronize(card_, stream_);
    return library().milliseconds(card_, events_[0], events_[1]);
  }

 private:
  Gpu& card_;
  Handle stream_;
  Handle events_[2] = {};
};

py::list images() {
  py::list list;
  for (const cuda::Image& image : library().built_images().images) {
    py::dict d;
    d["name"] = image.name;
    d["cubins"] = image.cubins;
    d["ptx"] = image.ptx;
    d["bytes"] = image.end - image.begin;
    list.append(d);
  }
  return list;
}

// What a card of that vendor would run of each image, e.g. {"v2_sm80": "sm_90"}; {}: it is refused.
py::dict choose(const std::string& vendor, int major, int minor) {
  if (vendor != "nvidia" && vendor != "amd") throw InvalidInput(text("vendor must be 'nvidia' or 'amd', got '", vendor, "'"));
  py::dict d;
  for (const cuda::Image& image : library().built_images().images) {
    cuda::Choice c = library().choose(vendor == "amd" ? cuda::Vendor::kAMD : cuda::Vendor::kNvidia, 10 * major + minor, image);
    if (c.kind != cuda::Choice::kNone) d[image.name] = text(c.kind == cuda::Choice::kCubin ? "sm_" : "compute_", c.arch);
  }
  return d;
}

// The code objects: {"exact": {"gfx942": its bytes}}.
py::dict code_objects() {
  py::dict d;
  for (const hip::Image& image : library().built_code_objects().images) {
    py::dict objects;
    for (const hip::CodeObject& o : image.objects) objects[o.arch] = py::bytes(reinterpret_cast<const char*>(o.begin), static_cast<size_t>(o.end - o.begin));
    d[image.name] = objects;
  }
  return d;
}

py::dict driver(const Crossing<DriverFacts()>& facts_of, const char* version) {
  DriverFacts facts = facts_of();
  py::dict d;
  d["path"] = facts.path;
  d[version] = facts.version;
  return d;
}

}  // namespace

void add_gpus(py::module_& m) {
  m.def("cuda_images", &images);
  m.def("cuda_choose", &choose);
  m.def("cuda_driver", [] { return driver(library().cuda_driver, "cuda"); });
  m.def("hip_code_objects", &code_objects);
  m.def("hip_driver", [] { return driver(library().hip_driver, "hip"); });
  py::class_<DeviceMemory>(m, "DeviceMemory")
      .def(py::init<int, int64_t, const std::string&>(), py::arg("ordinal"), py::arg("bytes"), py::arg("backend") = "cuda")
      .def_property_readonly("address", &DeviceMemory::address)
      .def("write", &DeviceMemory::write)
      .def("read", &DeviceMemory::read)
      .def("free", &DeviceMemory::free);
  py::class_<DeviceTimer>(m, "DeviceTimer")
      .def(py::init<int, int64_t, const std::string&>(), py::arg("ordinal"), py::arg("stream"), py::arg("backend") = "cuda")
      .def("start", [](const DeviceTimer& timer) { timer.record(0); })
      .def("stop", [](const DeviceTimer& timer) { timer.record(1); })
      .def("milliseconds", &DeviceTimer::milliseconds);
}

}  // namespace strata_pa
