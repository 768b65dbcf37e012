// What the program tells forkpoint, in its own terms. Without a probe in the process each call is a branch.
#pragma once

#include <string>

#include "probes/forkpoint.h"
#include "samples/minigpt/tensor.h"

namespace minigpt {

using Scope = forkpoint::Scope;

// strides: in elements; nullptr: contiguous.
template <typename T>
void record_view(const char* name, forkpoint_role role, const Array<T>& owner, const T* data,
                 const std::vector<int64_t>& shape, const int64_t* strides) {
  if (!forkpoint_active()) return;
  forkpoint_tensor_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.name = name;
  desc.data = data;
  desc.dtype = forkpoint::DtypeOf<T>::value;
  desc.role = role;
  desc.device = owner.backend().forkpoint_device();
  desc.ndim = static_cast<int32_t>(shape.size());
  desc.shape = shape.data();
  desc.strides = strides;
  desc.stream = owner.backend().stream();
  forkpoint_tensor(&desc);
}

template <typename T>
void record(const char* name, forkpoint_role role, const Array<T>& tensor) {
  record_view(name, role, tensor, tensor.data(), tensor.shape(), nullptr);
}

}  // namespace minigpt
