// What the threads of the host hand to the writer thread, in order.
#pragma once

#include <cstdint>

#include "probes/names.h"

namespace forkpoint {

class DeviceSlot;  // cuda_digest.h
struct LaunchPacket;  // launch_packet.h

enum class EventKind : uint8_t {
  none,           // a place that was claimed in vain
  step_begin,     // step, step_serial, wanted
  step_end,
  record,
  device_record,  // digest and stats are still to come, in device_slot
  launch,         // packet; its digests are still to come
};

// Beside RecordFlags, and never written: training or an evaluation, as the step that begins next will tell.
inline constexpr uint8_t kRecordCandidate = 4;
// In the flags of a step_begin.
inline constexpr uint8_t kStepComputed = 1;  // candidates that came before it are training
inline constexpr uint8_t kStepFinal = 2;     // see Recorder::begin_final

struct Event {
  EventKind kind = EventKind::none;
  bool wanted = false;
  uint8_t flags = 0;  // RecordFlags; of a step_begin: kStepComputed, kStepFinal
  int32_t micro_step = 0;
  const SiteEntry* site = nullptr;
  const LayoutEntry* layout = nullptr;
  union {
    int64_t step = 0;
    DeviceSlot* device_slot;
  };
  union {
    Digest digest = {};
    uint64_t step_serial;  // of a step_begin: the n-th step of the process, from 1
  };
  TensorStats stats;
  LaunchPacket* packet = nullptr;  // of a launch; of a device_record at launch level: where its bytes lie
};

}  // namespace forkpoint
