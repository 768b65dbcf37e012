// Checks what a caller says about a tensor before anything of it is read. Pure.
#pragma once

#include <cstdint>

#include "probes/losses.h"
#include "probes/names.h"

struct forkpoint_tensor_desc;

namespace forkpoint {

// In the place of FORKPOINT_CUDA in a descriptor that the probe makes itself, plus the device's number: a framework owns the memory
// and says that it lies on that device, so that nobody asks the driver which one it is. Not for what comes through forkpoint.h.
inline constexpr int32_t kOwnedOnDevice = 1 << 16;
inline constexpr int32_t kMostOwnedDevices = 64;
inline bool is_owned_on_device(int32_t device) { return device >= kOwnedOnDevice && device < kOwnedOnDevice + kMostOwnedDevices; }

struct CheckedTensor {
  LayoutKey layout;              // strides are nullptr where they say no more than row-major order
  Role role = Role::other;
  bool on_device = false;
  int owned_on = -1;             // number of the device, where a framework owns it
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
