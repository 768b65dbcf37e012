// The writer thread's part of the launch level: rows whose digests are still to come from the device.
#include "probes/session_launches.h"

#include <algorithm>

#include "lib/digest_raw.h"
#include "probes/cuda_context.h"
#include "probes/graphs.h"
#include "probes/launch_packet.h"
#include "probes/os.h"
#include "probes/session.h"

namespace forkpoint {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
// How long a replay may take to bring a digest when nothing says that it is lost, and when results have been.
constexpr int64_t kReplayPatience = 60'000 * kMillisecond;
constexpr int64_t kDroppedPatience = 500 * kMillisecond;
constexpr int64_t kLookAgain = 1 * kMillisecond;

void no_digest(BufferRow& row) { row.flags |= kBufferNoDigest; }

}  // namespace

// One digest of one replay.
struct GraphNode {
  const GraphTemplate& graph;
  CapturedRows& captured;
  CudaContext* context;
  uint32_t node;
  uint32_t run;     // of what was captured, from 0
  uint32_t replay;  // of the executable
};

void return_launch_packet(LaunchPacket* packet) { return_packet(packet); }
void drain_graph_digests() { CudaContext::drain_graph_results(); }

// Also where no row comes of it: what the device has been told to write must be taken before its place is used again.
bool Session::await_launch(LaunchPacket& packet, BufferRow* rows) {
  bool whole = true;
  for (uint32_t i = 0; i < packet.row.buffers; ++i) {
    PacketBuffer& buffer = packet.buffers[i];
    if (buffer.slot) {
      DigestResult result;
      const bool ready = await_slot(*buffer.slot, &result) == DevicePoll::ready;
      if (ready) buffer.row.digest = result.digest;
      else no_digest(buffer.row);
      whole = whole && ready;
    } else if (buffer.same_as >= 0) {
      const BufferRow& same = packet.buffers[buffer.same_as].row;
      buffer.row.digest = same.digest;
      if (same.flags & kBufferNoDigest) no_digest(buffer.row);
    }
    rows[i] = buffer.row;
  }
  return whole;
}

void Session::handle_launch(LaunchPacket& packet) {
  // Uninitialised: to clear all of it would be most of the writer's work.
  union Rows {
    Rows() {}
    BufferRow row[kMostBuffers];
  } memory;
  BufferRow* const rows = memory.row;
  const bool whole = await_launch(packet, rows);
  if (!packet.discard) {
    if (!whole) start_.losses->add(Loss::launch_arrival, appender_->step());
    if (packet.site) appender_->add_launch(packet.row, *packet.site, rows);
    else start_.losses->add(Loss::names_full, appender_->step());
  }
  if (packet.graph) {
    handle_graph_rows(packet);
    packet.graph->release();
  }
  return_packet(&packet);
}

// The rows of a replayed graph's nodes, in the order in which they were captured.
void Session::handle_graph_rows(const LaunchPacket& launched) {
  Loss lost = Loss::count_;
  for (size_t part = 0; part < launched.graph->parts.size(); ++part) {
    for (const GraphRow& node : launched.graph->parts[part].captured->rows) handle_graph_row(launched, part, node, &lost);
  }
  if (lost != Loss::count_) start_.losses->add(lost, appender_->step());
}

void Session::handle_graph_row(const LaunchPacket& launched, size_t part, const GraphRow& captured, Loss* lost) {
  const GraphTemplate::Part& of = launched.graph->parts[part];
  std::vector<BufferRow> rows;
  rows.reserve(captured.buffers.size());
  for (const PacketBuffer& buffer : captured.buffers) {
    BufferRow row = buffer.row;
    if (buffer.same_as >= 0) {
      row.digest = rows[static_cast<size_t>(buffer.same_as)].digest;
      row.flags |= rows[static_cast<size_t>(buffer.same_as)].flags & kBufferNoDigest;
    } else if (buffer.node != 0) {
      const GraphNode node{*launched.graph, *of.captured, captured.context, buffer.node, of.first_run + launched.replay,
                           launched.replay};
      if (!captured.context || !take_graph_digest(node, &row, lost)) no_digest(row);
    }
    row.flags = static_cast<uint8_t>(row.flags & ~kBufferFresh);  // of the capture, not of a replay
    rows.push_back(row);
  }
  if (launched.discard || !captured.site) return;
  LaunchRow row = captured.row;
  row.stream = launched.row.stream;
  row.micro_step = launched.row.micro_step;
  const int stream_flags = launched.row.flags & (kLaunchLegacyStream | kLaunchNonBlocking);
  row.flags = static_cast<uint8_t>(row.flags | kLaunchInGraph | stream_flags);
  appender_->add_launch(row, *captured.site, rows.data());
}

// lost: the reason, once one was; then no more are waited for in this replay.
bool Session::take_graph_digest(const GraphNode& node, BufferRow* row, Loss* lost) {
  if (node.captured.shared.load()) {
    node.context->graph_results().ignore(node.node);
    return false;
  }
  RawDigest raw;
  const bool waits = *lost == Loss::count_;
  const bool taken = waits ? await_graph_digest(node, &raw, lost)
                           : node.context->graph_results().take(node.node, node.run, &raw);
  if (!taken) return false;
  // Asked last: while nobody shared the node, what had arrived was its own.
  if (node.captured.shared.load()) return false;
  row->digest = raw.digest;
  return true;
}

bool Session::await_graph_digest(const GraphNode& node, RawDigest* digest, Loss* lost) {
  GraphResults& results = node.context->graph_results();
  int64_t pause_ns = 5'000;
  int64_t look_ns = kLookAgain;
  const int64_t begun = now_ns();
  while (!node.captured.shared.load()) {
    if (results.take(node.node, node.run, digest)) return true;
    results.drain();
    if (results.take(node.node, node.run, digest)) return true;
    const int64_t waited = now_ns() - begun;
    *lost = why_graph_digest_is_lost(node, waited, waited >= look_ns);
    if (*lost != Loss::count_) return false;
    if (waited >= look_ns) look_ns = waited + kLookAgain;
    wait_a_little(&pause_ns);
  }
  return false;
}

// Loss::count_: it may still come. look: for replays behind it; what had arrived before them was drained before them.
Loss Session::why_graph_digest_is_lost(const GraphNode& node, int64_t waited_ns, bool look) {
  const bool dropped = node.context->graph_results().dropped() > 0;
  if (dropped && waited_ns > kDroppedPatience) return Loss::graph_dropped;
  if (look && node.graph.is_behind(node.replay)) return dropped ? Loss::graph_dropped : Loss::internal;
  if (node.context->gone()) return Loss::device_gone;
  if (stopping() && now_ns() > stop_deadline_ns_.load()) return Loss::launch_arrival;
  if (waited_ns <= kReplayPatience) return Loss::count_;
  node.captured.shared.store(true);  // whatever it is, it is not waited for again
  start_.limits->add(Limit::graph_partial);
  return Loss::internal;
}

}  // namespace forkpoint
