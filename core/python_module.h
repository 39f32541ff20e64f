// The parts of the extension module that have files of their own.
#pragma once
#include <pybind11/pybind11.h>

namespace strata_pa {

void add_gpus(pybind11::module_& m);      // core/python_gpus.cpp
void add_quantize(pybind11::module_& m);  // core/python_quantize.cpp
void add_partial(pybind11::module_& m);   // core/python_partial.cpp

}  // namespace strata_pa
