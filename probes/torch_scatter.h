// The deterministic scatter kernels, as the bridge's Python code calls them.
//
// numbers: integers in a sequence, of tensors that the caller keeps alive. Calls return the CUresult as a Python
// integer (-1: no driver; as probes/scatter.h). nullptr: an error is set.
#pragma once

#include "probes/python_api.h"
#include "probes/scatter.h"

namespace forkpoint {

// Of sorted keys. numbers: stream, type (enum ScatterType), flags, addresses of src, out, rows (or 0), weights (or 0),
// starts, partials and keys, then count, 1 where keys are 64 bits wide, rows of out, columns, and the strides of src
// and out.
PythonObject* scatter_for_torch(const Python& python, PythonObject* numbers, double alpha);

// Of an index. numbers: stream, type, flags, addresses of src, out and scratch, columns, the strides of src and out,
// and the index: its address, flags (enum IndexFlags), three strides, blocks, length, columns, rows, padding (all as
// scatter::IndexView).
PythonObject* scatter_by_index_for_torch(const Python& python, PythonObject* numbers, double alpha);

// The sort alone. numbers: stream, addresses of keys, places (64 bits wide) and scratch, and the index as above.
PythonObject* sort_by_index_for_torch(const Python& python, PythonObject* numbers);

// Bytes that scatter_by_index_for_torch wants as scratch, which are enough for sort_by_index_for_torch too.
PythonObject* scatter_scratch_for_torch(const Python& python, int64_t type, int64_t count, int64_t columns);

}  // namespace forkpoint
