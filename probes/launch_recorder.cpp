#include "probes/launch_recorder.h"

#include <cstring>

#include "probes/allocations.h"
#include "probes/cuda_context.h"
#include "probes/graphs.h"
#include "probes/launch_digests.h"
#include "probes/launch_functions.h"
#include "probes/launch_packet.h"
#include "probes/launch_params.h"
#include "probes/launch_retry.h"
#include "probes/launch_row.h"
#include "probes/launch_streams.h"
#include "probes/nccl_hooks.h"
#include "probes/operands.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

void add_pointers(RowBuilder& row, ParamBlock& block, uint32_t count, uint8_t flags, bool only_used) {
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

// Asked before the capture begins: of a stream that is being captured the question may break the capture.
bool is_stream_of(const CudaDriver& driver, CUstream stream, CUcontext context) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (driver.cuStreamIsCapturing_(stream, &status) != CUDA_SUCCESS) return false;
  if (status != CU_STREAM_CAPTURE_STATUS_NONE) return false;
  CUcontext owner = nullptr;
  return driver.cuStreamGetCtx_(stream, &owner) == CUDA_SUCCESS && owner == context;
}

bool is_nccls(const KernelFacts& facts) { return facts.is_nccl || nccl_is_at_work(); }

}  // namespace

constinit LaunchRecorder launch_recorder;

// ---- Kernels

void LaunchRecorder::before_kernel(const Token& token, const CallPlace& place, const KernelCall& call) {
  drop_begun_packet(token);
  const CudaDriver* driver = find_cuda_driver(token);
  const KernelFacts* facts = driver ? kernel_facts(token, *driver, recorder.names(), call.function) : nullptr;
  if (!facts || is_nccls(*facts)) return;
  ParamBlock block(*driver, *facts, call);
  if (!block.is_readable()) return;
  const uint32_t count = block.find_pointers();
  RowBuilder row(token, *driver, place);
  if (!row.take(2 * count)) return;
  add_pointers(row, block, count, kBufferBefore | (settings_->inputs ? 0 : kBufferNoDigest), false);
  if (settings_->inputs) row.take_digests(0, capture_of(*driver, place.stream));
  if (settings_->save.is_launch && is_launch_to_save()) {
    row.describe(LaunchKind::kernel, facts->name);  // whose operands they are
    save_launch_operands(token, row.packet(), 0, facts->name, place.stream, true);
  }
  retry_save(token, *driver, place, row.packet());
  begin_packet(row.give(), place);
}

void LaunchRecorder::after_kernel(const Token& token, const CallPlace& place, const KernelCall& call, bool succeeded) {
  LaunchPacket* begun = take_begun_packet(token, place);
  const CudaDriver* driver = find_cuda_driver(token);
  const KernelFacts* facts = driver && succeeded ? kernel_facts(token, *driver, recorder.names(), call.function) : nullptr;
  if (!facts && succeeded) recorder.lose_row(Loss::names_full);
  if (!facts) return drop_packet(token, begun);
  const bool nccls = is_nccls(*facts);
  const bool skip_params = nccls && nccl_seen_by_symbol();
  if (nccls && !skip_params) recorder.limit(Limit::nccl_unseen);
  ParamBlock block(*driver, *facts, call);
  if (!block.is_readable() && !nccls) recorder.limit(Limit::params);
  const uint32_t count = block.is_readable() && !skip_params ? block.find_pointers() : 0;
  RowBuilder row(token, *driver, place);
  if (begun) {
    if (!settings_->inputs) begun->row.buffers = 0;  // they were only needed to be saved
    row.adopt(begun);
  } else if (!row.take(count)) {
    return;
  }
  const uint32_t first = row.packet().row.buffers;
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
  if (begun && settings_->save.is_launch && is_launch_to_save()) {
    save_launch_operands(token, row.packet(), first, facts->name, place.stream, false);
  }
  row.finish(first);
  if (settings_->retry > 0) retry_run(token, *driver, place, call, facts->name);
}

// ---- Graphs

CudaContext* LaunchRecorder::before_capture(const Token& token, const CallPlace& place) {
  const CudaDriver* driver = find_cuda_driver(token);
  int error = 0;
  CudaContext* context = driver ? recorder.digest_context(token, place.context, &error) : nullptr;
  if (!context) return recorder.lose_row(Loss::cuda_setup, error), nullptr;
  stream_numbers.stream(*driver, place.context, place.stream, place.per_thread);  // once it is captured it is too late to ask
  const RelaxedCapture relaxed(*driver);
  // A replay's results come all at once, so there is room for two bursts of a whole ring of rows.
  const CUresult result = context->graph_results().prepare(*driver, 2 * settings_->ring_slots);
  if (result != CUDA_SUCCESS) recorder.lose_row(Loss::graph_setup, static_cast<int>(result));
  return result == CUDA_SUCCESS && is_stream_of(*driver, place.stream, place.context) ? context : nullptr;
}

void LaunchRecorder::before_capture_ends(const Token& token, const CallPlace& place, uint64_t capture_id) {
  const CudaDriver* driver = find_cuda_driver(token);
  CudaContext* context = driver ? graphs.flushed_in(capture_id) : nullptr;
  const Capture capture = context ? capture_of(*driver, place.stream) : Capture{};
  if (!capture.capturing || capture.unusable || capture.id != capture_id) return;
  const std::vector<uint32_t> nodes = graphs.take_unflushed(capture_id);
  if (nodes.empty()) return;
  CUresult result = CUDA_ERROR_INVALID_CONTEXT;
  if (CudaContext::find(*driver, place.context) == context) {
    result = flush_captured_digests({*driver, *context, place.stream, true, true}, nodes.data(), nodes.size());
  }
  if (result == CUDA_SUCCESS) return;
  graphs.cannot_flush(capture_id);
  recorder.lose_row(Loss::cuda_launch, static_cast<int>(result));
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
  RowBuilder row(token, *driver, place);
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
  RowBuilder row(token, *driver, place);
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
  RowBuilder row(token, *driver, place);
  if (!row.take(1, false)) return nullptr;  // the record holds its place in the ring
  row.describe(LaunchKind::record, recorder.names().name(""));
  PacketBuffer* buffer = row.add_buffer(kPlaceSource, address, allocation, false, allocation.within(address, bytes));
  if (buffer) buffer->row.flags |= kBufferNoDigest;  // the record's own digest takes its place
  return row.give();
}

void LaunchRecorder::after_fork_in_child() {
  forget_begun_packet_in_child();
  forget_packets_in_child();
  memory.allocations.reset_lock();
  memory.blocks.reset_lock();
  stream_numbers.reset_locks();
  graphs.reset_locks();
}

}  // namespace forkpoint
