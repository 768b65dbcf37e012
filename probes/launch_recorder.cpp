#include "probes/launch_recorder.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "probes/allocations.h"
#include "probes/graphs.h"
#include "probes/launch_digests.h"
#include "probes/launch_functions.h"
#include "probes/launch_packet.h"
#include "probes/launch_params.h"
#include "probes/launch_retry.h"
#include "probes/launch_streams.h"
#include "probes/nccl_hooks.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint64_t kWindowBytes = 256u << 10;    // hashed of a buffer whose extent is not known
constexpr uint64_t kAlwaysWhole = 1u << 20;      // an allocation that is hashed whole after a copy into part of it
constexpr uint64_t kWholeFactor = 4;             // or one that is at most this many times as large as the copy

// Between the two callbacks of one call of this thread.
thread_local LaunchPacket* begun_packet __attribute__((tls_model("initial-exec"))) = nullptr;
thread_local uint32_t begun_correlation __attribute__((tls_model("initial-exec"))) = 0;

// A packet of which there will be no row. Digests that are on their way to it still need somebody to take them.
void drop(const Token& token, LaunchPacket* packet) {
  if (!packet) return;
  bool awaited = false;
  for (uint32_t i = 0; i < packet->row.buffers; ++i) awaited |= packet->buffers[i].slot != nullptr;
  Recorder::RowPlace place;
  if (!awaited || !recorder.claim_row(token, &place)) return return_packet(packet);
  packet->discard = true;
  recorder.publish_row(token, place, packet);
}

void begin(LaunchPacket* packet, const CallPlace& place) {
  begun_packet = packet;
  begun_correlation = place.correlation;
}
// What was begun before this very call; anything else never came to its end. nullptr: nothing.
LaunchPacket* take_begun(const Token& token, const CallPlace& place) {
  LaunchPacket* packet = begun_packet;
  begun_packet = nullptr;
  if (!packet || begun_correlation == place.correlation) return packet;
  drop(token, packet);
  return nullptr;
}
void drop_begun(const Token& token) {
  LaunchPacket* packet = begun_packet;
  begun_packet = nullptr;
  drop(token, packet);
}

struct Capture {
  bool capturing = false;
  bool unusable = false;  // the stream cannot be asked or used now
  cuuint64_t id = 0;
};

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

// One row in the making.
class Row {
 public:
  Row(const Token& token, const CudaDriver& driver, const CallPlace& place, const Settings& settings)
      : token_(token), driver_(driver), place_(place), settings_(settings) {}
  ~Row() { drop(token_, packet_); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  bool take(uint32_t buffers, bool may_wait = true) {
    packet_ = take_packet(token_, buffers, may_wait);
    if (!packet_) recorder.lose_row(Loss::launch_row);
    return packet_ != nullptr;
  }
  void adopt(LaunchPacket* packet) { packet_ = packet; }
  LaunchPacket* give() {
    LaunchPacket* packet = packet_;
    packet_ = nullptr;
    return packet;
  }
  LaunchPacket& packet() { return *packet_; }

  void describe(LaunchKind kind, const Name* name) {
    LaunchRow& row = packet_->row;
    const StreamFacts stream = stream_numbers.stream(driver_, place_.context, place_.stream, place_.per_thread);
    row.kind = kind;
    row.stream = stream.ordinal;
    row.flags = static_cast<uint8_t>(row.flags | stream.flags);
    packet_->site = recorder.launch_site(token_, name);
  }

  // A buffer of the row; its extent is decided here. whole: all of its allocation, else [address, address + bytes).
  PacketBuffer* add_buffer(uint32_t where, uint64_t address, const Allocation& allocation, bool whole, uint64_t bytes) {
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
      packet_->row.flags |= kLaunchPeerMapped;
      recorder.limit(Limit::peers);
    }
    share_digest(packet_->row.buffers - 1);
    return buffer;
  }

  // Digests of the buffers from `first` on, then the row goes to the writer (or into the graph that is being captured).
  // await_digests: the host has waited for what was done, and may have it changed as soon as we return.
  void finish(uint32_t first, bool await_digests = false) {
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

  void take_digests(uint32_t first, const Capture& capture) {
    if (first == packet_->row.buffers) return;
    if (capture.capturing && graphs.is_conditional(capture.id)) return no_digests(first);
    int error = 0;
    CudaContext* context = capture.unusable ? nullptr : recorder.digest_context(token_, place_.context, &error);
    Loss loss = capture.unusable ? Loss::cuda_capturing : Loss::cuda_setup;
    if (context) {
      loss = enqueue_launch_digests(token_, {driver_, *context, place_.stream, capture.capturing}, *packet_, first, &error);
    } else {
      no_digests(first);
    }
    if (loss != Loss::count_) recorder.lose_row(loss, error);
  }

 private:
  static constexpr int64_t kPatienceNs = 50'000'000;

  void no_digests(uint32_t first) {
    for (uint32_t i = first; i < packet_->row.buffers; ++i) packet_->buffers[i].row.flags |= kBufferNoDigest;
  }

  // Looks at the slots first: on the stream itself others may have put work meanwhile.
  void await(uint32_t first) {
    const int64_t give_up_ns = now_ns() + kPatienceNs;
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

  bool is_out_of_reach(const Allocation& allocation) {
    if (allocation.device == Allocation::kAnyDevice) return false;
    CUdevice current = Allocation::kAnyDevice;
    if (device_ == Allocation::kAnyDevice && driver_.cuCtxGetDevice_(&current) == CUDA_SUCCESS) device_ = current;
    return allocation.device != device_;
  }

  bool extent_is_known(const Allocation& allocation) const {
    if (allocation.kind == MemoryKind::block) return true;
    return (allocation.flags & kAllocationArena) == 0;
  }

  // One digest for all pointers into the same bytes.
  void share_digest(uint32_t index) {
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

  const Token& token_;
  const CudaDriver& driver_;
  const CallPlace& place_;
  const Settings& settings_;
  LaunchPacket* packet_ = nullptr;
  int device_ = Allocation::kAnyDevice;  // of the current context, once asked

 public:
  uint32_t first_sharing_ = 0;  // buffers before this one were digested at another time
};

void add_pointers(Row& row, ParamBlock& block, uint32_t count, uint8_t flags, bool only_used) {
  for (uint32_t i = 0; i < count; ++i) {
    const FoundPointer& pointer = block.pointer(i);
    if (only_used && (pointer.allocation.flags & kAllocationUsed) == 0) continue;
    PacketBuffer* buffer = row.add_buffer(pointer.place, pointer.address, pointer.allocation, true, 0);
    if (!buffer) return;
    buffer->row.flags |= flags;
  }
}

void mark_used(const ParamBlock& block, uint32_t count, bool by_nccl) {
  const uint8_t flags = by_nccl ? kAllocationSeen : kAllocationSeen | kAllocationUsed;
  for (uint32_t i = 0; i < count; ++i) {
    const Allocation& allocation = block.pointer(i).allocation;
    if ((allocation.flags & flags) != flags) memory.table_of(allocation).mark(allocation.start, flags);
  }
}

void describe_launch(LaunchRow& row, const KernelCall& call) {
  memcpy(row.grid, call.grid, sizeof(row.grid));
  memcpy(row.block, call.block, sizeof(row.block));
  row.shared_bytes = call.shared_bytes;
}

bool is_nccls(const KernelFacts& facts) { return facts.is_nccl || inside_nccl(); }

}  // namespace

constinit LaunchRecorder launch_recorder;

// ---- Kernels

void LaunchRecorder::before_kernel(const Token& token, const CallPlace& place, const KernelCall& call) {
  drop_begun(token);
  const CudaDriver* driver = find_cuda_driver(token);
  const KernelFacts* facts = driver ? kernel_facts(token, *driver, recorder.names(), call.function) : nullptr;
  if (!facts || is_nccls(*facts)) return;
  ParamBlock block(*driver, *facts, call);
  if (!block.is_readable()) return;
  const uint32_t count = block.find_pointers();
  Row row(token, *driver, place, *settings_);
  if (!row.take(2 * count)) return;
  add_pointers(row, block, count, kBufferBefore | (settings_->inputs ? 0 : kBufferNoDigest), false);
  if (settings_->inputs) row.take_digests(0, capture_of(*driver, place.stream));
  retry_save(token, *driver, place, row.packet());
  begin(row.give(), place);
}

void LaunchRecorder::after_kernel(const Token& token, const CallPlace& place, const KernelCall& call, bool succeeded) {
  LaunchPacket* begun = take_begun(token, place);
  const CudaDriver* driver = find_cuda_driver(token);
  const KernelFacts* facts = driver && succeeded ? kernel_facts(token, *driver, recorder.names(), call.function) : nullptr;
  if (!facts && succeeded) recorder.lose_row(Loss::names_full);
  if (!facts) return drop(token, begun);
  const bool nccls = is_nccls(*facts);
  const bool skip_params = nccls && nccl_seen_by_symbol();
  if (nccls && !skip_params) recorder.limit(Limit::nccl_unseen);
  ParamBlock block(*driver, *facts, call);
  if (!block.is_readable() && !nccls) recorder.limit(Limit::params);
  const uint32_t count = block.is_readable() && !skip_params ? block.find_pointers() : 0;
  Row row(token, *driver, place, *settings_);
  uint32_t first = 0;
  if (begun) {
    row.adopt(begun);
    first = begun->row.buffers;
    // Without --inputs the buffers before were only needed to be saved.
    if (!settings_->inputs) first = begun->row.buffers = 0;
  } else if (!row.take(count)) {
    return;
  }
  row.first_sharing_ = first;
  LaunchRow& described = row.packet().row;
  row.describe(LaunchKind::kernel, facts->name);
  describe_launch(described, call);
  if (!block.is_readable()) described.flags |= kLaunchParamsUnread;
  if (block.is_readable() && !nccls) {
    described.param_bytes = block.size_bytes();
    described.params = block.digest();
  }
  add_pointers(row, block, count, settings_->sequence ? kBufferNoDigest : 0, nccls);
  mark_used(block, count, nccls);
  row.finish(first);
  if (settings_->retry > 0) retry_run(token, *driver, place, call, facts->name);
}

// ---- Copies and sets

namespace {

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

uint64_t within(const Allocation& allocation, uint64_t address, uint64_t bytes) {
  return std::min(bytes, allocation.end() - address);
}

}  // namespace

void LaunchRecorder::before_copy(const Token& token, const CallPlace& place, const CopyCall& call) {
  drop_begun(token);
  const CudaDriver* driver = find_cuda_driver(token);
  Allocation source, target;
  if (!driver || call.bytes == 0 || call.rows == 0 || inside_nccl() || !on_device(*driver, call.source, &source)) return;
  const bool to_device = on_device(*driver, call.target, &target);
  Row row(token, *driver, place, *settings_);
  if (!row.take(2)) return;
  const uint64_t bytes = within(source, call.source, span_of(call.bytes, call.source_pitch, call.rows));
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
  begin(row.give(), place);
}

void LaunchRecorder::after_copy(const Token& token, const CallPlace& place, const CopyCall& call, bool succeeded) {
  LaunchPacket* begun = take_begun(token, place);
  const CudaDriver* driver = find_cuda_driver(token);
  Allocation source, target;
  const bool to_device = driver && on_device(*driver, call.target, &target);
  const bool from_device = driver && on_device(*driver, call.source, &source);
  const bool nothing = (!from_device && !to_device) || call.bytes == 0 || call.rows == 0;
  if (!succeeded || nothing || inside_nccl()) return drop(token, begun);
  Row row(token, *driver, place, *settings_);
  if (begun) row.adopt(begun);
  else if (!row.take(1)) return;
  const uint32_t first = row.first_sharing_ = row.packet().row.buffers;
  LaunchRow& described = row.packet().row;
  row.describe(LaunchKind::copy, recorder.names().name(call.name));
  described.bytes = call.bytes * call.rows;
  if (!from_device) described.flags |= kLaunchFromHost;
  if (!to_device) described.flags |= kLaunchToHost;
  if (to_device) {
    const uint64_t bytes = within(target, call.target, span_of(call.bytes, call.target_pitch, call.rows));
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
  if (!driver || call.bytes == 0 || call.rows == 0 || inside_nccl()) return;
  if (!find_allocation(*driver, call.target, &target)) return;
  Row row(token, *driver, place, *settings_);
  if (!recorder.names().create() || !row.take(1)) return;
  LaunchRow& described = row.packet().row;
  row.describe(LaunchKind::set, recorder.names().name(call.name));
  described.bytes = call.bytes * call.rows;
  const uint64_t asked[] = {call.pattern, call.pattern_bytes, call.bytes, call.rows};
  described.param_bytes = sizeof(asked);
  described.params = digest_only(asked, sizeof(asked));
  const uint64_t bytes = within(target, call.target, span_of(call.bytes, call.pitch, call.rows));
  if (PacketBuffer* buffer = row.add_buffer(kPlaceTarget, call.target, target, hashed_whole(target, bytes), bytes)) {
    buffer->row.flags |= kBufferWritten;
    if (settings_->sequence) buffer->row.flags |= kBufferNoDigest;
  }
  mark_seen(target);
  row.finish(0);
}

// ---- Graphs

void LaunchRecorder::before_capture(const Token& token, const CallPlace& place) {
  const CudaDriver* driver = find_cuda_driver(token);
  int error = 0;
  CudaContext* context = driver ? recorder.digest_context(token, place.context, &error) : nullptr;
  if (!context) return recorder.lose_row(Loss::cuda_setup, error);
  stream_numbers.stream(*driver, place.context, place.stream, place.per_thread);  // once it is captured it is too late to ask
  const RelaxedCapture relaxed(*driver);
  const CUresult result = context->graph_results().prepare(*driver, settings_->ring_slots);
  if (result != CUDA_SUCCESS) recorder.lose_row(Loss::graph_setup, static_cast<int>(result));
}

void LaunchRecorder::before_graph_launch(const Token& token, const CallPlace& place) {
  const CudaDriver* driver = find_cuda_driver(token);
  CudaContext* context = driver ? CudaContext::find(*driver, place.context) : nullptr;
  if (context && context->graph_results().ready()) context->graph_results().order_after_setup(*driver, place.stream);
}

void LaunchRecorder::after_graph_launch(const Token& token, const CallPlace& place, CUgraphExec executable, bool wanted) {
  const CudaDriver* driver = find_cuda_driver(token);
  if (!driver || !recorder.names().create()) return;
  const Graphs::Launch launch = graphs.launched(executable);
  if (!launch.graph && !wanted) return;
  if (!launch.graph) recorder.limit(Limit::graph_unseen);
  if (launch.partial) recorder.limit(Limit::graph_partial);
  Row row(token, *driver, place, *settings_);
  Recorder::RowPlace row_place;
  if (!row.take(0) || !recorder.claim_row(token, &row_place)) {
    if (launch.graph) launch.graph->release();
    return;
  }
  row.describe(LaunchKind::graph, recorder.names().name("cuGraphLaunch"));
  LaunchPacket& packet = row.packet();
  packet.row.object = launch.ordinal;
  if (!launch.graph || launch.partial) packet.row.flags |= kLaunchParamsUnread;
  packet.graph = launch.graph;
  if (launch.graph) packet.rows = 1 + static_cast<uint32_t>(launch.graph->row_count());
  packet.replay = launch.replay;
  packet.discard = !wanted;
  recorder.publish_row(token, row_place, row.give());
}

// ---- Rows without buffers

void LaunchRecorder::note(const Token& token, const CallPlace& place, LaunchKind kind, uint64_t object, uint64_t bytes) {
  const CudaDriver* driver = find_cuda_driver(token);
  if (!driver) return;
  Row row(token, *driver, place, *settings_);
  Recorder::RowPlace row_place;
  if (!row.take(0) || !recorder.claim_row(token, &row_place)) return;
  row.describe(kind, recorder.names().name(""));
  row.packet().row.object = object;
  row.packet().row.bytes = bytes;
  recorder.publish_row(token, row_place, row.give());
}

void LaunchRecorder::note_everywhere(const Token& token, LaunchKind kind, uint64_t object, uint64_t bytes) {
  LaunchPacket* packet = take_packet(token, 0);
  Recorder::RowPlace row_place;
  if (!packet) return recorder.lose_row(Loss::launch_row);
  if (!recorder.names().create() || !recorder.claim_row(token, &row_place)) return return_packet(packet);
  packet->row.kind = kind;
  packet->row.stream = kEveryStream;
  packet->row.object = object;
  packet->row.bytes = bytes;
  packet->site = recorder.launch_site(token, recorder.names().name(""));
  recorder.publish_row(token, row_place, packet);
}

LaunchPacket* LaunchRecorder::record_row(const Token& token, const CallPlace& place, const void* data, uint64_t bytes) {
  const CudaDriver* driver = find_cuda_driver(token);
  Allocation allocation;
  const auto address = reinterpret_cast<uint64_t>(data);
  if (!driver || !find_allocation(*driver, address, &allocation)) return nullptr;
  Row row(token, *driver, place, *settings_);
  if (!row.take(1, false)) return nullptr;  // the record holds its place in the ring
  row.describe(LaunchKind::record, recorder.names().name(""));
  PacketBuffer* buffer = row.add_buffer(kPlaceSource, address, allocation, false, within(allocation, address, bytes));
  if (buffer) buffer->row.flags |= kBufferNoDigest;  // the record's own digest takes its place
  return row.give();
}

void LaunchRecorder::after_fork_in_child() {
  begun_packet = nullptr;
  forget_packets_in_child();
  memory.allocations.reset_lock();
  memory.blocks.reset_lock();
  stream_numbers.reset_locks();
  graphs.reset_locks();
}

}  // namespace forkpoint
