// Copies and sets of the host's, as rows of the launch level.
#include "probes/launch_params.h"
#include "probes/launch_row.h"
#include "probes/nccl_hooks.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint64_t kAlwaysWhole = 1u << 20;  // an allocation that is hashed whole after a copy into part of it
constexpr uint64_t kWholeFactor = 4;         // or one that is at most this many times as large as the copy

bool hashed_whole(const Allocation& allocation, uint64_t bytes) {
  if (allocation.flags & kAllocationArena) return false;
  return allocation.size_bytes <= kAlwaysWhole || allocation.size_bytes / kWholeFactor <= bytes;
}

// A table of device addresses in host memory, on its way to the device: it differs between two processes.
bool holds_addresses(const CudaDriver& driver, uint64_t source, uint64_t bytes) {
  constexpr uint64_t kMost = 64u << 10;
  if (bytes < 8 || bytes % 8 != 0 || bytes > kMost || source % 8 != 0) return false;
  const auto* words = reinterpret_cast<const uint64_t*>(source);
  uint64_t addresses = 0, others = 0;
  for (uint64_t i = 0; i < bytes / 8; ++i) {
    Allocation allocation;
    if (words[i] == 0) continue;
    if (find_allocation(driver, words[i], &allocation)) ++addresses;
    else ++others;
  }
  return addresses > 0 && addresses >= others;
}

uint64_t span_of(uint64_t bytes, uint64_t pitch, uint64_t rows) { return rows <= 1 ? bytes : (rows - 1) * pitch + bytes; }

void mark_seen(const Allocation& allocation) {
  if ((allocation.flags & kAllocationSeen) == 0) memory.table_of(allocation).mark(allocation.start, kAllocationSeen | kAllocationUsed);
}

bool on_device(const CudaDriver& driver, uint64_t address, Allocation* allocation) {
  return find_allocation(driver, address, allocation) && allocation->kind != MemoryKind::host;
}

}  // namespace

void LaunchRecorder::before_copy(const Token& token, const CallPlace& place, const CopyCall& call) {
  drop_begun_packet(token);
  const CudaDriver* driver = find_cuda_driver(token);
  Allocation source, target;
  if (!driver || call.bytes == 0 || call.rows == 0 || nccl_is_at_work() || !on_device(*driver, call.source, &source)) return;
  const bool to_device = on_device(*driver, call.target, &target);
  RowBuilder row(token, *driver, place);
  if (!row.take(2)) return;
  const uint64_t bytes = source.within(call.source, span_of(call.bytes, call.source_pitch, call.rows));
  // What goes to the host is hashed to the byte.
  const bool whole = to_device && hashed_whole(source, bytes);
  if (PacketBuffer* buffer = row.add_buffer(kPlaceSource, call.source, source, whole, bytes)) {
    buffer->row.flags |= kBufferRead;
    if (settings_->sequence && to_device) buffer->row.flags |= kBufferNoDigest;
    if (!whole && call.rows > 1 && call.source_pitch > call.bytes && bytes == span_of(call.bytes, call.source_pitch, call.rows)) {
      buffer->row_bytes = call.bytes;  // what lies between the rows is not copied
      buffer->pitch = call.source_pitch;
    }
  }
  mark_seen(source);
  row.take_digests(0, capture_of(*driver, place.stream));
  begin_packet(row.give(), place);
}

void LaunchRecorder::after_copy(const Token& token, const CallPlace& place, const CopyCall& call, bool succeeded) {
  LaunchPacket* begun = take_begun_packet(token, place);
  const CudaDriver* driver = find_cuda_driver(token);
  Allocation source, target;
  const bool to_device = driver && on_device(*driver, call.target, &target);
  const bool from_device = driver && on_device(*driver, call.source, &source);
  const bool nothing = (!from_device && !to_device) || call.bytes == 0 || call.rows == 0;
  if (!succeeded || nothing || nccl_is_at_work()) return drop_packet(token, begun);
  RowBuilder row(token, *driver, place);
  if (begun) row.adopt(begun);
  else if (!row.take(1)) return;
  const uint32_t first = row.packet().row.buffers;
  LaunchRow& described = row.packet().row;
  row.describe(LaunchKind::copy, recorder.names().name(call.name));
  described.bytes = call.bytes * call.rows;
  if (!from_device) described.flags |= kLaunchFromHost;
  if (!to_device) described.flags |= kLaunchToHost;
  if (to_device) {
    const uint64_t bytes = target.within(call.target, span_of(call.bytes, call.target_pitch, call.rows));
    if (!from_device && call.rows == 1 && holds_addresses(*driver, call.source, bytes)) {
      memory.table_of(target).mark(target.start, kAllocationAddresses);
      target.flags |= kAllocationAddresses;
    }
    if (PacketBuffer* buffer = row.add_buffer(kPlaceTarget, call.target, target, hashed_whole(target, bytes), bytes)) {
      buffer->row.flags |= kBufferWritten;
      if (settings_->sequence) buffer->row.flags |= kBufferNoDigest;
    }
    mark_seen(target);
  }
  row.finish(first, call.returns_done);
  if (call.returns_done) note(token, place, LaunchKind::synchronize, 0);
}

void LaunchRecorder::after_set(const Token& token, const CallPlace& place, const SetCall& call) {
  const CudaDriver* driver = find_cuda_driver(token);
  Allocation target;
  if (!driver || call.bytes == 0 || call.rows == 0 || nccl_is_at_work()) return;
  if (!find_allocation(*driver, call.target, &target)) return;
  RowBuilder row(token, *driver, place);
  if (!recorder.names().create() || !row.take(1)) return;
  LaunchRow& described = row.packet().row;
  row.describe(LaunchKind::set, recorder.names().name(call.name));
  described.bytes = call.bytes * call.rows;
  const uint64_t asked[] = {call.pattern, call.pattern_bytes, call.bytes, call.rows};
  described.param_bytes = sizeof(asked);
  described.params = digest_only(asked, sizeof(asked));
  const uint64_t bytes = target.within(call.target, span_of(call.bytes, call.pitch, call.rows));
  if (PacketBuffer* buffer = row.add_buffer(kPlaceTarget, call.target, target, hashed_whole(target, bytes), bytes)) {
    buffer->row.flags |= kBufferWritten;
    if (settings_->sequence) buffer->row.flags |= kBufferNoDigest;
  }
  mark_seen(target);
  row.finish(0);
}

}  // namespace forkpoint
