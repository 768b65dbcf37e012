// Tensors that are recorded at one moment: their digests share launches. recorder_batch.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "probes/cuda_digest.h"
#include "probes/session.h"

struct forkpoint_tensor_desc;

namespace forkpoint {

struct ScopeFrame;

struct TensorRequest {
  const ScopeFrame* frame = nullptr;
  const forkpoint_tensor_desc* desc = nullptr;
  uint8_t flags = 0;  // of RecordFlags, beside those of the frame
};

// One record on its way into the ring.
struct BatchPlace {
  const SiteEntry* site;
  const LayoutEntry* layout;
  uint8_t flags;
  bool on_device;
  DigestResult result;        // of a tensor on the host
  DeviceTensor tensor;        // of one on a device
  Session::Ring::Claim claim; // event: nullptr, if there was none to be had
};

// Room for records that were looked at and are not in the ring yet. Large: not for a stack.
class RecordBatch {
 public:
  // So many that an optimizer's state, of which every third tensor may lie on the host, fills a launch.
  static constexpr size_t kMost = 96;

 private:
  friend class Recorder;
  BatchPlace place_[kMost];
  const DeviceTensor* device_[kMost];
  DeviceOutcome outcome_[kMost];
  size_t count_ = 0;
  bool has_stream_ = false;  // a tensor on a device is among them
  void* stream_ = nullptr;
};

}  // namespace forkpoint
