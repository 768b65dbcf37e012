#include "probes/launch_row.h"

#include <sched.h>

#include <algorithm>

#include "probes/graphs.h"
#include "probes/launch_digests.h"
#include "probes/launch_streams.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint64_t kWindowBytes = 256u << 10;    // hashed of a buffer whose extent is not known
constexpr int64_t kDigestPatienceNs = 50'000'000;

thread_local LaunchPacket* begun_packet __attribute__((tls_model("initial-exec"))) = nullptr;
thread_local uint32_t begun_correlation __attribute__((tls_model("initial-exec"))) = 0;

bool extent_is_known(const Allocation& allocation) {
  return allocation.kind == MemoryKind::block || (allocation.flags & kAllocationArena) == 0;
}

}  // namespace

Capture capture_of(const CudaDriver& driver, CUstream stream) {
  Capture capture;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (driver.cuStreamIsCapturing_(stream, &status) != CUDA_SUCCESS) capture.unusable = true;
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return capture;
  capture.capturing = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  capture.unusable = !capture.capturing;
  if (capture.capturing && (!driver.cuStreamGetCaptureInfo_ ||
                            driver.cuStreamGetCaptureInfo_(stream, &status, &capture.id, nullptr, nullptr, nullptr, nullptr) !=
                                CUDA_SUCCESS)) {
    capture.unusable = true;
  }
  return capture;
}

void drop_packet(const Token& token, LaunchPacket* packet) {
  if (!packet) return;
  bool awaited = false;
  for (uint32_t i = 0; i < packet->row.buffers; ++i) awaited |= packet->buffers[i].slot != nullptr;
  Recorder::RowPlace place;
  if (!awaited || !recorder.claim_row(token, &place)) return return_packet(packet);
  packet->discard = true;
  recorder.publish_row(token, place, packet);
}

void begin_packet(LaunchPacket* packet, const CallPlace& place) {
  begun_packet = packet;
  begun_correlation = place.correlation;
}

LaunchPacket* take_begun_packet(const Token& token, const CallPlace& place) {
  LaunchPacket* packet = begun_packet;
  begun_packet = nullptr;
  if (!packet || begun_correlation == place.correlation) return packet;
  drop_packet(token, packet);
  return nullptr;
}

void drop_begun_packet(const Token& token) {
  LaunchPacket* packet = begun_packet;
  begun_packet = nullptr;
  drop_packet(token, packet);
}

void forget_begun_packet_in_child() { begun_packet = nullptr; }

bool RowBuilder::take(uint32_t buffers, bool may_wait) {
  packet_ = take_packet(token_, buffers, may_wait);
  if (!packet_) recorder.lose_row(Loss::launch_row);
  return packet_ != nullptr;
}

LaunchPacket* RowBuilder::give() {
  LaunchPacket* packet = packet_;
  packet_ = nullptr;
  return packet;
}

void RowBuilder::describe(LaunchKind kind, const Name* name) {
  LaunchRow& row = packet_->row;
  const StreamFacts stream = stream_numbers.stream(driver_, place_.context, place_.stream, place_.per_thread);
  row.kind = kind;
  row.stream = stream.ordinal;
  row.flags = static_cast<uint8_t>(row.flags | stream.flags);
  bool recompute = false;
  packet_->site = recorder.launch_site(token_, name, &recompute);
  if (recompute) row.flags |= kLaunchRecompute;
}

PacketBuffer* RowBuilder::add_buffer(uint32_t where, uint64_t address, const Allocation& allocation, bool whole, uint64_t bytes) {
  PacketBuffer* buffer = packet_->add();
  if (!buffer) return recorder.lose_row(Loss::launch_row), nullptr;
  BufferRow& row = buffer->row;
  row.place = where;
  row.allocation = allocation.ordinal;
  row.address = address;
  row.offset = address - allocation.start;
  row.start = whole ? 0 : row.offset;
  row.bytes = whole ? allocation.size_bytes : bytes;
  if (whole && allocation.kind == MemoryKind::block) recorder.limit(Limit::rounded_extents);
  if (whole && !extent_is_known(allocation)) {
    row.start = row.offset;
    row.bytes = std::min(kWindowBytes, allocation.size_bytes - row.offset);
    row.flags |= kBufferWindow;
    recorder.limit(Limit::extents);
  }
  if (allocation.flags & kAllocationAddresses) row.flags |= kBufferAddresses;
  if ((allocation.flags & kAllocationSeen) == 0) row.flags |= kBufferFresh;
  if (is_out_of_reach(allocation)) {
    // A kernel of ours that reads what its context cannot reach would end the host's context.
    row.flags |= kBufferNoDigest;
    recorder.limit(Limit::peers);
  }
  share_digest(packet_->row.buffers - 1);
  return buffer;
}

void RowBuilder::finish(uint32_t first, bool await_digests) {
  const Capture capture = capture_of(driver_, place_.stream);
  if (capture.capturing && graphs.is_conditional(capture.id)) return;
  if (capture.capturing && !capture.unusable) {
    take_digests(first, capture);
    CudaContext* context = CudaContext::find(driver_, place_.context);
    if (!graphs.add_row(capture.id, context, *packet_)) recorder.lose_row(Loss::no_memory);
    return;
  }
  // The place first: digests that were enqueued without one would have results that nobody fetches.
  Recorder::RowPlace row_place;
  if (!recorder.claim_row(token_, &row_place)) return;
  take_digests(first, capture);
  if (await_digests) await(first);
  recorder.publish_row(token_, row_place, give());
}

void RowBuilder::take_digests(uint32_t first, const Capture& capture) {
  if (first == packet_->row.buffers) return;
  if (capture.capturing && graphs.is_conditional(capture.id)) return no_digests(first);
  int error = 0;
  CudaContext* context = capture.unusable ? nullptr : recorder.digest_context(token_, place_.context, &error);
  Loss loss = capture.unusable ? Loss::cuda_capturing : Loss::cuda_setup;
  if (context) {
    const bool flushed = capture.capturing && graphs.flushed_in(capture.id) == context;
    const DigestPlace place{driver_, *context, place_.stream, capture.capturing, flushed};
    loss = enqueue_launch_digests(token_, place, *packet_, first, &error);
  } else {
    no_digests(first);
  }
  if (loss != Loss::count_) recorder.lose_row(loss, error);
}

void RowBuilder::no_digests(uint32_t first) {
  for (uint32_t i = first; i < packet_->row.buffers; ++i) packet_->buffers[i].row.flags |= kBufferNoDigest;
}

// Looks at the slots first: on the stream itself others may have put work meanwhile.
void RowBuilder::await(uint32_t first) {
  const int64_t give_up_ns = now_ns() + kDigestPatienceNs;
  DevicePoll poll = DevicePoll::ready;
  for (uint32_t i = first; i < packet_->row.buffers && poll != DevicePoll::pending; ++i) {
    PacketBuffer& buffer = packet_->buffers[i];
    DigestResult result;
    while (buffer.slot && (poll = poll_device_slot(*buffer.slot, &result)) == DevicePoll::pending && now_ns() < give_up_ns) {
      sched_yield();
    }
  }
  if (poll == DevicePoll::pending && driver_.cuStreamSynchronize_) driver_.cuStreamSynchronize_(place_.stream);
}

bool RowBuilder::is_out_of_reach(const Allocation& allocation) {
  if (allocation.device == Allocation::kAnyDevice) return false;
  CUdevice current = Allocation::kAnyDevice;
  if (device_ == Allocation::kAnyDevice && driver_.cuCtxGetDevice_(&current) == CUDA_SUCCESS) device_ = current;
  return allocation.device != device_;
}

// One digest for all pointers into the same bytes.
void RowBuilder::share_digest(uint32_t index) {
  PacketBuffer& buffer = packet_->buffers[index];
  for (uint32_t i = first_sharing_; i < index; ++i) {
    const BufferRow& other = packet_->buffers[i].row;
    if (packet_->buffers[i].same_as < 0 && other.allocation == buffer.row.allocation && other.start == buffer.row.start &&
        other.bytes == buffer.row.bytes && ((other.flags ^ buffer.row.flags) & kBufferBefore) == 0) {
      buffer.same_as = static_cast<int32_t>(i);
      return;
    }
  }
}

}  // namespace forkpoint
