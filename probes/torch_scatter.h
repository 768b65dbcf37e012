// The deterministic scatter kernels, as the bridge's Python code calls them.
#pragma once

#include "probes/python_api.h"
#include "probes/scatter.h"

namespace forkpoint {

// numbers: of tensors that the caller keeps alive, in this order: stream, type (enum ScatterType), flags, addresses of
// src, out, rows (or 0), weights (or 0), starts, partials and keys, then count, 1 where keys are 64 bits wide, rows of
// out, columns, and the strides of src and out. Returns the CUresult as a Python integer (-1: no driver). nullptr: an
// error is set.
PythonObject* scatter_for_torch(const Python& python, PythonObject* numbers, double alpha);

}  // namespace forkpoint
