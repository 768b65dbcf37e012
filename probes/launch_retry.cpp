#include "probes/launch_retry.h"

#include <cstdio>
#include <cstring>

#include "probes/cuda_digest.h"
#include "probes/launch_digests.h"
#include "probes/launch_streams.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint32_t kMostSaved = 256;

struct Saved {
  CUdeviceptr start = 0;    // in the host's memory
  uint64_t bytes = 0;
  CUdeviceptr before = 0;   // copies of ours
  CUdeviceptr after = 0;
  uint32_t buffer = 0;      // of the packet
};

// One launch a process.
struct Suspect {
  std::atomic<bool> taken{false};
  bool saved = false;
  uint64_t index = 0;
  uint32_t count = 0;
  Saved buffers[kMostSaved];
  BufferRow rows[kMostSaved];
};
constinit Suspect suspect;

bool is_the_one(const Settings& settings) {
  return recorder.current_step() == settings.retry_step && recorder.next_row() == settings.retry_index;
}

void give_up(const char* why, int error) {
  char cause[40] = "";
  if (error != 0) snprintf(cause, sizeof(cause), " (CUDA error %d)", error);
  say("the launch %lld:%llu was not repeated: %s%s", static_cast<long long>(launch_recorder.settings().retry_step),
      static_cast<unsigned long long>(launch_recorder.settings().retry_index), why, cause);
  recorder.limit(Limit::retry_failed);
}

// Why the launch may write more than its buffers, so that what it left could not be undone; nullptr: it does not seem to.
const char* reach_beyond(const LaunchPacket& packet) {
  for (uint32_t i = 0; i < packet.row.buffers; ++i) {
    const uint8_t flags = packet.buffers[i].row.flags;
    if (flags & kBufferAddresses) {
      return "it was handed a table of device addresses, and what lies behind them cannot be saved";
    }
    if (flags & kBufferWindow) {
      return "it was handed a buffer whose extent is not known, so that it cannot be saved whole";
    }
  }
  return nullptr;
}

void free_copies(const CudaDriver& driver) {
  for (uint32_t i = 0; i < suspect.count; ++i) {
    for (const CUdeviceptr copy : {suspect.buffers[i].before, suspect.buffers[i].after}) {
      if (copy) driver.cuMemFree_(copy);
    }
  }
  suspect.count = 0;
  suspect.saved = false;
}

CUresult copy_all(const CudaDriver& driver, CUstream stream, CUdeviceptr Saved::*copy, bool restore) {
  CUresult result = CUDA_SUCCESS;
  for (uint32_t i = 0; i < suspect.count && result == CUDA_SUCCESS; ++i) {
    const Saved& saved = suspect.buffers[i];
    result = restore ? driver.cuMemcpyDtoDAsync_(saved.start, saved.*copy, saved.bytes, stream)
                     : driver.cuMemcpyDtoDAsync_(saved.*copy, saved.start, saved.bytes, stream);
  }
  return result;
}

CUresult launch_again(const CudaDriver& driver, const CallPlace& place, const KernelCall& call) {
  if (call.config) return driver.cuLaunchKernelEx_(call.config, call.function, call.params, call.extra);
  if (call.cooperative) {
    return driver.cuLaunchCooperativeKernel_(call.function, call.grid[0], call.grid[1], call.grid[2], call.block[0], call.block[1],
                                             call.block[2], call.shared_bytes, place.stream, call.params);
  }
  return driver.cuLaunchKernel_(call.function, call.grid[0], call.grid[1], call.grid[2], call.block[0], call.block[1],
                                call.block[2], call.shared_bytes, place.stream, call.params, call.extra);
}

// The row of one repetition: the saved buffers' digests after it.
bool note_repetition(const Token& token, const CudaDriver& driver, const CallPlace& place, CudaContext& context,
                     const KernelCall& call, const Name* kernel) {
  LaunchPacket* packet = take_packet(token, suspect.count);
  if (!packet) return false;
  Recorder::RowPlace row_place;
  if (!recorder.claim_row(token, &row_place)) return return_packet(packet), false;
  packet->row.kind = LaunchKind::retry;
  packet->row.retry_of = static_cast<uint32_t>(suspect.index);
  packet->row.stream = stream_numbers.stream(driver, place.context, place.stream, place.per_thread).ordinal;
  memcpy(packet->row.grid, call.grid, sizeof(call.grid));
  memcpy(packet->row.block, call.block, sizeof(call.block));
  packet->site = recorder.launch_site(token, kernel);
  for (uint32_t i = 0; i < suspect.count; ++i) packet->add()->row = suspect.rows[i];
  int error = 0;
  const Loss loss = enqueue_launch_digests(token, {driver, context, place.stream, false}, *packet, 0, &error);
  recorder.publish_row(token, row_place, packet);
  if (loss != Loss::count_) recorder.lose_row(loss, error);
  return loss == Loss::count_;
}

}  // namespace

void retry_save(const Token&, const CudaDriver& driver, const CallPlace& place, const LaunchPacket& packet) {
  if (launch_recorder.settings().retry == 0 || !is_the_one(launch_recorder.settings()) || suspect.taken.exchange(true)) return;
  if (!driver.cuMemcpyDtoDAsync_ || !driver.cuStreamSynchronize_ || !driver.cuMemFree_) return give_up("an old driver", 0);
  if (const char* beyond = reach_beyond(packet)) return give_up(beyond, 0);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  driver.cuStreamIsCapturing_(place.stream, &status);
  if (status != CU_STREAM_CAPTURE_STATUS_NONE) return give_up("it is part of a CUDA graph", 0);
  const RelaxedCapture relaxed(driver);
  CUresult result = CUDA_SUCCESS;
  for (uint32_t i = 0; i < packet.row.buffers && result == CUDA_SUCCESS; ++i) {
    const PacketBuffer& buffer = packet.buffers[i];
    if (buffer.same_as >= 0) continue;
    if (suspect.count == kMostSaved) return free_copies(driver), give_up("it has more buffers than can be saved", 0);
    Saved& saved = suspect.buffers[suspect.count];
    saved = {buffer.row.address - buffer.row.offset + buffer.row.start, buffer.row.bytes, 0, 0, i};
    BufferRow& row = suspect.rows[suspect.count++];
    row = buffer.row;
    row.flags = static_cast<uint8_t>(row.flags & ~(kBufferBefore | kBufferNoDigest));
    result = driver.cuMemAlloc_(&saved.before, saved.bytes);
    if (result == CUDA_SUCCESS) result = driver.cuMemAlloc_(&saved.after, saved.bytes);
  }
  if (result == CUDA_SUCCESS) result = copy_all(driver, place.stream, &Saved::before, false);
  if (result != CUDA_SUCCESS) {
    free_copies(driver);
    return give_up("its buffers could not be saved", static_cast<int>(result));
  }
  suspect.index = launch_recorder.settings().retry_index;
  suspect.saved = true;
}

void retry_run(const Token& token, const CudaDriver& driver, const CallPlace& place, const KernelCall& call,
               const Name* kernel) {
  if (!suspect.saved) return;
  int error = 0;
  CudaContext* context = recorder.digest_context(token, place.context, &error);
  CUresult result = context ? copy_all(driver, place.stream, &Saved::after, false) : CUDA_ERROR_UNKNOWN;
  const uint32_t times = launch_recorder.settings().retry;
  uint32_t done = 0;
  for (; done < times && result == CUDA_SUCCESS; ++done) {
    result = copy_all(driver, place.stream, &Saved::before, true);
    if (result == CUDA_SUCCESS) result = launch_again(driver, place, call);
    if (result == CUDA_SUCCESS && !note_repetition(token, driver, place, *context, call, kernel)) break;
  }
  // Whatever happened: the program goes on with what its own launch gave.
  const CUresult restored = context ? copy_all(driver, place.stream, &Saved::after, true) : CUDA_SUCCESS;
  const CUresult waited = driver.cuStreamSynchronize_(place.stream);
  {
    const RelaxedCapture relaxed(driver);
    free_copies(driver);
  }
  if (result != CUDA_SUCCESS || restored != CUDA_SUCCESS || waited != CUDA_SUCCESS) {
    give_up("a repetition failed", static_cast<int>(result != CUDA_SUCCESS ? result : restored != CUDA_SUCCESS ? restored : waited));
  } else {
    say("launch %lld:%llu was run %u more times from the same inputs", static_cast<long long>(launch_recorder.settings().retry_step),
        static_cast<unsigned long long>(suspect.index), done);
  }
}

}  // namespace forkpoint
