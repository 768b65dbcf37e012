// Many torch.Tensors recorded in one call of the bridge: described one after the other, then recorded together, so that their
// digests share launches (Recorder::tensors_in).
#pragma once

#include <cstdint>

#include "probes/python_api.h"

namespace forkpoint {

struct TorchTensors {
  PythonObject* names = nullptr;    // sequences of one length
  PythonObject* tensors = nullptr;
  PythonObject* frames = nullptr;   // likewise; nullptr: `frame` for all
  PythonObject* roles = nullptr;    // likewise; nullptr: `role` for all
  PythonObject* boxes = nullptr;    // likewise, of None or (global shape, global offset, ...); nullptr: none is a part
  uint32_t frame = 0;
  int32_t role = 0;
  uint8_t flags = 0;
};

// None where all were recorded, else the places of those that could not be read (a list of bools would cost one object a
// tensor). All digests are enqueued when this returns. nullptr: a Python error is set. REQUIRES: the GIL.
PythonObject* record_torch_tensors(const Python& python, const TorchTensors& many);

}  // namespace forkpoint
