// Numbers that the kernels share with the Python package.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxmoe {

// Codes of enums by name, the kernels' tiles, limits, and sizes of scratch, each under its name in
// jaxmoe/_tables.py.
nanobind::dict Tables();

}  // namespace jaxmoe
