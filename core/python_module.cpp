// The extension module strata_pa._core: a thin layer over the host core. The package's Python files are its only callers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/border.h"
#include "core/errors.h"
#include "core/plan.h"
#include "core/python_arrays.h"
#include "core/python_call.h"
#include "core/python_module.h"
#include "core/switches.h"
#include "core/table.h"
#include "cpu/cpu.h"

namespace py = pybind11;

namespace strata_pa {
namespace {

// --- Exceptions -------------------------------------------------------------------------------------------------------------

struct PythonErrors {
  PyObject *error, *invalid_input, *invalid_type, *unsupported_problem, *unsupported_device, *driver_error;
} python_errors;  // live as long as the process

PyObject* add_error(py::module_& m, const char* name, const char* doc, std::initializer_list<PyObject*> bases) {
  py::tuple tuple(bases.size());
  size_t i = 0;
  for (PyObject* base : bases) tuple[i++] = py::handle(base);
  PyObject* type = PyErr_NewExceptionWithDoc(text("strata_pa.", name).c_str(), doc, tuple.ptr(), nullptr);
  if (!type) throw py::error_already_set();
  m.add_object(name, py::handle(type));
  return type;
}

void add_errors(py::module_& m) {
  PythonErrors& e = python_errors;
  e.error = add_error(m, "Error", "Base of every error that strata_pa raises.", {PyExc_Exception});
  e.invalid_input = add_error(m, "InvalidInput", "An argument, an array's content or an environment variable has a value that it cannot have.",
                              {e.error, PyExc_ValueError});
  e.invalid_type = add_error(m, "InvalidType", "An argument has a type, or an array a dtype, that it cannot have.", {e.invalid_input, PyExc_TypeError});
  e.unsupported_problem = add_error(m, "UnsupportedProblem", "A well-formed problem that no kernel, or not the one asked for, can run here.",
                                    {e.error, PyExc_ValueError});
  e.unsupported_device = add_error(m, "UnsupportedDevice", "A device or an instruction set that this build or this machine does not have.",
                                   {e.error, PyExc_RuntimeError});
  e.driver_error = add_error(m, "DriverError", "A call of a GPU's driver failed: the call's name and the driver's text.",
                             {e.error, PyExc_RuntimeError});
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const InvalidType& x) {
      PyErr_SetString(python_errors.invalid_type, x.what());
    } catch (const InvalidInput& x) {
      PyErr_SetString(python_errors.invalid_input, x.what());
    } catch (const UnsupportedProblem& x) {
      PyErr_SetString(python_errors.unsupported_problem, x.what());
    } catch (const UnsupportedDevice& x) {
      PyErr_SetString(python_errors.unsupported_device, x.what());
    } catch (const DriverError& x) {
      PyErr_SetString(python_errors.driver_error, x.what());
    } catch (const Error& x) {
      PyErr_SetString(python_errors.error, x.what());
    }
  });
}

// --- Facts ------------------------------------------------------------------------------------------------------------------

py::tuple refusals(const std::vector<Refusal>& list) {
  py::list result;
  for (const Refusal& r : list) result.append(py::make_tuple(r.kernel, py::tuple(py::cast(r.reasons))));
  return py::tuple(result);
}

py::dict plan_dict(const Plan& plan) {
  py::dict d;
  d["kernel"] = plan.kernel->name;
  d["backend"] = backend_name(plan.kernel->backend);
  d["device"] = library().name_of(plan.device);
  d["workspace_bytes"] = plan.workspace_bytes;
  d["refused"] = refusals(plan.refused);
  d["architecture"] = library().architecture_of(plan.device);
  d["num_threads"] = plan.device.num_threads;
  d["chosen_by"] = plan.chosen_by;
  d["notes"] = py::tuple(py::cast(plan.notes));
  return d;
}

py::list kernels() {
  py::list list;
  for (const Kernel& k : library().kernel_table()) {
    std::vector<std::string> dtypes;
    for (DType dtype : k.serves.dtypes) dtypes.push_back(dtype_name(dtype));
    py::dict d;
    d["name"] = k.name;
    d["backend"] = backend_name(k.backend);
    d["built"] = library().built(k);
    d["opt_in"] = k.opt_in;
    d["portable"] = k.portable;
    d["needs"] = library().needs(k);
    d["what"] = k.what;
    d["head_dims"] = k.serves.head_dims;
    d["groups"] = k.serves.groups;
    d["heads_per_kv"] = py::make_tuple(k.serves.heads_per_kv_min, k.serves.heads_per_kv_max);
    d["granularities"] = k.serves.granularities;
    d["dtypes"] = dtypes;
    d["max_entries"] = k.serves.max_entries;
    list.append(d);
  }
  return list;
}

py::dict device_dict(const Device& device) {
  DeviceKernels has = library().kernels_of(device);
  py::list names, isas;
  for (const Kernel* k : has.kernels) names.append(k->name);
  if (device.id.kind == DeviceKind::kCPU)
    for (const cpu::Isa& isa : library().isas()) {
      py::dict d;
      d["name"] = isa.name;
      d["requires"] = isa.requires_;
      d["supported"] = isa.supported;
      isas.append(d);
    }
  py::dict d;
  d["device"] = library().name_of(device);
  d["backend"] = backend_name(device.id.kind);
  d["name"] = device.gpu ? device.gpu->name : "";
  d["architecture"] = library().architecture_of(device);
  d["num_threads"] = device.num_threads;
  d["default"] = has.kernels.empty() ? py::object(py::none()) : py::str(has.kernels[0]->name);
  d["kernels"] = names;
  d["refused"] = refusals(has.refused);
  d["isas"] = isas;
  return d;
}

// The CPU, then the GPUs: none of a vendor without a usable driver, which cuda_driver() and hip_driver() tell.
py::list devices() {
  py::list list;
  list.append(device_dict(library().cpu_device(library().read_environment(), {}, "")));
  for (DeviceKind kind : {DeviceKind::kCUDA, DeviceKind::kHIP}) {
    std::vector<Device> cards;
    try {
      if (library().has_images(kind)) cards = library().gpu_devices(kind);
    } catch (const UnsupportedDevice&) {
    }
    for (const Device& device : cards) list.append(device_dict(device));
  }
  return list;
}

py::dict build_info() {
  BuildFacts facts = library().build_facts();
  py::dict d;
  d["version"] = facts.version;
  d["compiler"] = facts.compiler;
  d["build_type"] = facts.build_type;
  d["sanitize"] = facts.sanitize;
  d["pybind11"] = text(PYBIND11_VERSION_MAJOR, ".", PYBIND11_VERSION_MINOR);
  d["python"] = text(PY_MAJOR_VERSION, ".", PY_MINOR_VERSION);
  d["cpu_paths"] = facts.cpu_paths;
  d["nvcc"] = facts.nvcc;
  d["cuda_archs"] = facts.cuda_archs;
  d["hip_compiler"] = facts.hip_compiler;
  d["hip_archs"] = facts.hip_archs;
  return d;
}

py::list variables() {
  py::list list;
  for (const Variable& v : library().environment_variables()) {
    py::dict d;
    d["name"] = v.name;
    d["values"] = v.values;
    d["meaning"] = v.meaning;
    list.append(d);
  }
  return list;
}

// See cpu::dot_peak; `name` of an instruction-set path.
int64_t dot_peak(const std::string& name, int64_t rounds) {
  for (const cpu::Isa& isa : library().isas())
    if (isa.supported && name == isa.name) {
      py::gil_scoped_release release;
      return library().dot_peak(isa, rounds);
    }
  throw UnsupportedDevice(text("this machine has no instruction-set path '", name, "'"));
}

// --- Work on arrays ---------------------------------------------------------------------------------------------------------

py::dict check_cache(py::object k, py::object v, py::object k_scale, py::object v_scale, py::object page_table, py::object layout) {
  PagedView c = view_paged(k, v, k_scale, v_scale, page_table, layout);
  py::dict d;
  d["pages"] = c.pages;
  d["page_size"] = c.page_size;
  d["n_kv"] = c.n_kv;
  d["head_dim"] = c.head_dim;
  d["group"] = c.group;
  return d;
}

}  // namespace
}  // namespace strata_pa

const strata_pa::Border& strata_pa::library() {
  static const Border* const border = strata_pa_private_border(STRATA_PA_VERSION);
  if (!border) throw std::runtime_error("strata_pa._core is of version " STRATA_PA_VERSION ", the libstrata_pa that was loaded is not: reinstall strata_pa");
  return *border;
}

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  using namespace strata_pa;
  m.doc() = "The compiled part of strata_pa.";
  m.attr("__version__") = STRATA_PA_VERSION;
  library();
  add_errors(m);

  add_gpus(m);
  add_quantize(m);
  add_partial(m);
  m.def("kernels", &kernels);
  m.def("devices", &devices);
  m.def("build_info", &build_info);
  m.def("environment_variables", &variables);
  m.def("set_imma", [](py::object value) { library().set_imma(value.is_none() ? std::nullopt : std::optional<bool>(to_bool(value, "value"))); });
  m.def("get_imma", [] { return library().get_imma(); });
  m.def("dot_peak", &dot_peak);
  m.def("check_cache", &check_cache);

  py::class_<Call>(m, "Call")
      .def(py::init([](py::object q, py::object k, py::object v, py::object k_scale, py::object v_scale, py::object page_table, py::object layout,
                       py::object ids, py::object widths, py::object granularity, py::object kv_len, py::object cu_seqlens_q, py::object causal,
                       py::object window_left, py::object sm_scale, py::object kernel, py::object stream, py::object num_threads, py::object isa) {
             return std::make_unique<Call>(CallArguments{q, k, v, k_scale, v_scale, page_table, layout, ids, widths, granularity, kv_len, cu_seqlens_q,
                                                         causal, window_left, sm_scale, kernel, stream, num_threads, isa});
           }),
           py::arg("q"), py::arg("k"), py::arg("v"), py::arg("k_scale"), py::arg("v_scale"), py::arg("page_table"), py::arg("layout"), py::arg("ids"),
           py::arg("widths"), py::arg("granularity"), py::arg("kv_len"), py::arg("cu_seqlens_q"), py::arg("causal"), py::arg("window_left"),
           py::arg("sm_scale"), py::arg("kernel"), py::arg("stream"), py::arg("num_threads"), py::arg("isa") = py::none())
      .def("plan", [](Call& call, py::object out) { return plan_dict(call.plan(out)); }, py::arg("out") = py::none())
      .def("run", [](Call& call, py::object out, py::object lse, bool fresh, py::object workspace) { return plan_dict(call.run(out, lse, fresh, workspace)); },
           py::arg("out"), py::arg("lse"), py::arg("fresh") = false, py::arg("workspace") = py::none())
      .def("synchronize", &Call::synchronize)
      .def("exact_anchors", &Call::exact_anchors)
      .def("exact_sums", &Call::exact_sums)
      .def_property_readonly("device", &Call::device)
      .def_property_readonly("dtype", [](const Call& call) { return dtype_name(call.problem().dtype); })
      .def_property_readonly("shape", [](const Call& call) {
        const Problem& p = call.problem();
        return py::make_tuple(p.n_q, p.n_head, p.head_dim);
      });
}
