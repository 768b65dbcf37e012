// Numbers for the host's streams and events, in the order in which they were first used: they mean the same in two runs of
// one program, and a handle that comes round again gets another one. Any thread.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "probes/cuda_driver.h"
#include "probes/handle_table.h"

namespace forkpoint {

struct StreamFacts {
  uint32_t ordinal = 0;
  uint8_t flags = 0;  // kLaunchLegacyStream, kLaunchNonBlocking
};

class StreamNumbers {
 public:
  bool create();
  // per_thread: a null stream means the calling thread's own (the _ptsz entry points).
  StreamFacts stream(const CudaDriver& driver, CUcontext context, CUstream stream, bool per_thread);
  void stream_destroyed(CUstream stream) { streams_.erase(reinterpret_cast<uint64_t>(stream)); }
  uint64_t event(CUevent event);
  void event_destroyed(CUevent event) { events_.erase(reinterpret_cast<uint64_t>(event)); }
  void reset_locks();

 private:
  HandleTable streams_, events_;
  std::atomic<uint32_t> last_stream_{0};
  std::atomic<uint64_t> last_event_{0};
};
extern StreamNumbers stream_numbers;

}  // namespace forkpoint
