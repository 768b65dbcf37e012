#include "probes/launch_streams.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "lib/launch.h"

namespace forkpoint {
namespace {

constexpr uint32_t kStreams = 1u << 14;
constexpr uint32_t kEvents = 1u << 20;

// The default streams have no handle of their own: one a context, and one a thread of each context.
uint64_t default_key(CUcontext context, bool per_thread) {
  const uint64_t thread = per_thread ? static_cast<uint64_t>(syscall(SYS_gettid)) : 0;
  return mix64(reinterpret_cast<uint64_t>(context) ^ thread << 48) | 1ull << 63;
}

}  // namespace

constinit StreamNumbers stream_numbers;

bool StreamNumbers::create() { return streams_.create(kStreams) && events_.create(kEvents); }

void StreamNumbers::reset_locks() {
  streams_.reset_lock();
  events_.reset_lock();
}

StreamFacts StreamNumbers::stream(const CudaDriver& driver, CUcontext context, CUstream stream, bool per_thread) {
  per_thread = stream == CU_STREAM_PER_THREAD || (stream == nullptr && per_thread);
  const bool legacy = !per_thread && (stream == nullptr || stream == CU_STREAM_LEGACY);
  const uint64_t key = per_thread || legacy ? default_key(context, per_thread) : reinterpret_cast<uint64_t>(stream);
  uint64_t known = streams_.find(key);
  if (known == 0) {
    uint8_t flags = legacy ? kLaunchLegacyStream : 0;
    unsigned int created_with = 0;
    // Not of a stream that is being captured: the question breaks the capture.
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const bool may_ask = !legacy && driver.cuStreamIsCapturing_(stream, &status) == CUDA_SUCCESS &&
                         status == CU_STREAM_CAPTURE_STATUS_NONE;
    if (may_ask && driver.cuStreamGetFlags_ && driver.cuStreamGetFlags_(stream, &created_with) == CUDA_SUCCESS &&
        (created_with & CU_STREAM_NON_BLOCKING)) {
      flags = kLaunchNonBlocking;
    }
    known = streams_.find_or_set(key, [&] {
      return uint64_t{last_stream_.fetch_add(1, std::memory_order_relaxed) + 1} << 8 | flags;
    });
  }
  return {static_cast<uint32_t>(known >> 8), static_cast<uint8_t>(known)};
}

uint64_t StreamNumbers::event(CUevent event) {
  return events_.find_or_set(reinterpret_cast<uint64_t>(event),
                             [&] { return last_event_.fetch_add(1, std::memory_order_relaxed) + 1; });
}

}  // namespace forkpoint
