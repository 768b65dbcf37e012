// What a torch.Tensor says of itself, as the recorder wants it. Nothing is copied, synchronised or computed, no operator is
// dispatched, and no __torch_function__ (of a subclass or a mode) is asked.
#pragma once

#include <cstdint>

#include "lib/digest.h"
#include "probes/python_api.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {

struct TorchTensor {
  forkpoint_tensor_desc desc;  // points into the arrays below; name and role are the caller's
  int64_t shape[kMaxDims];
  int64_t strides[kMaxDims];
  int64_t global_shape[kMaxDims];
  int64_t global_offset[kMaxDims];
  bool pairs;  // a complex type without a DType: one dimension more, of its parts
};

// false: not a tensor with memory of its own that can be read (meta, fake, of another device, sparse, quantised, a wrapper,
// conjugated lazily, more than 16 dimensions, storage that was freed). No Python error is left behind. REQUIRES: the GIL,
// and no error set.
bool describe_torch_tensor(const Python& python, PythonObject* object, TorchTensor* tensor);

// It is this part of a larger tensor; both are sequences of numbers, as many as it has dimensions. false: they are not (no
// Python error is left behind). REQUIRES: described.
bool describe_shard(const Python& python, PythonObject* global_shape, PythonObject* global_offset, TorchTensor* tensor);

}  // namespace forkpoint
