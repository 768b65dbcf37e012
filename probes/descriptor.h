// Checks what a caller says about a tensor before anything of it is read. Pure.
#pragma once

#include <cstdint>

#include "probes/losses.h"
#include "probes/names.h"

struct forkpoint_tensor_desc;

namespace forkpoint {

struct CheckedTensor {
  LayoutKey layout;              // strides are nullptr where they say no more than row-major order
  Role role = Role::other;
  bool on_device = false;
  const void* data = nullptr;
  void* stream = nullptr;        // of a tensor on a device
  int64_t elements = 0;
  int64_t size_bytes = 0;
  int64_t lowest_offset = 0;     // bytes from data to the lowest byte, and behind the highest
  int64_t end_offset = 0;

  bool is_shard() const { return layout.global_shape != nullptr; }
  TensorView view() const;       // REQUIRES: elements > 0
  DigestResult digest() const;   // of a tensor on the host
};

// Loss::count_: the descriptor is good. The result points into the descriptor's arrays.
Loss check_tensor(const forkpoint_tensor_desc* desc, CheckedTensor* tensor);
bool is_role(int32_t role);

}  // namespace forkpoint
