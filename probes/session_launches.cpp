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
// How long a replay may take to bring a digest when the ring has moved on, or has been full.
constexpr int64_t kReplayPatience = 60'000 * kMillisecond;
constexpr int64_t kDroppedPatience = 500 * kMillisecond;

void no_digest(BufferRow& row) { row.flags |= kBufferNoDigest; }

}  // namespace

void return_launch_packet(LaunchPacket* packet) { return_packet(packet); }
void drain_graph_digests() { CudaContext::drain_graph_results(); }

void Session::handle_launch(LaunchPacket& packet) {
  if (packet.site && !packet.discard) {
    BufferRow rows[kMostBuffers];
    bool lost = false;
    for (uint32_t i = 0; i < packet.row.buffers; ++i) {
      PacketBuffer& buffer = packet.buffers[i];
      if (buffer.slot) {
        DigestResult result;
        const bool ready = await_slot(*buffer.slot, &result) == DevicePoll::ready;
        if (ready) buffer.row.digest = result.digest;
        else no_digest(buffer.row);
        lost = lost || !ready;
      } else if (buffer.same_as >= 0) {
        const BufferRow& same = packet.buffers[buffer.same_as].row;
        buffer.row.digest = same.digest;
        if (same.flags & kBufferNoDigest) no_digest(buffer.row);
      }
      rows[i] = buffer.row;
    }
    if (lost) start_.losses->add(Loss::launch_arrival, appender_->step());
    appender_->add_launch(packet.row, *packet.site, rows);
  } else if (!packet.site) {
    start_.losses->add(Loss::names_full, appender_->step());
  }
  if (packet.graph) {
    handle_graph_rows(packet);
    packet.graph->release();
  }
  return_packet(&packet);
}

// The rows of a replayed graph's nodes, in the order in which they were captured.
void Session::handle_graph_rows(const LaunchPacket& launched) {
  GraphTemplate& graph = *launched.graph;
  std::vector<BufferRow> rows;
  bool lost = false;
  for (const GraphRow& node : graph.rows) {
    rows.clear();
    for (const PacketBuffer& buffer : node.buffers) {
      BufferRow row = buffer.row;
      RawDigest raw;
      if (buffer.same_as >= 0) {
        row.digest = rows[static_cast<size_t>(buffer.same_as)].digest;
        row.flags |= rows[static_cast<size_t>(buffer.same_as)].flags & kBufferNoDigest;
      } else if (buffer.node != 0 && !lost && await_graph_digest(graph, buffer.node, launched.replay, &raw)) {
        row.digest = raw.digest;
      } else if (buffer.node != 0) {
        lost = true;  // and not waited for any more in this replay
        no_digest(row);
      }
      row.flags = static_cast<uint8_t>(row.flags & ~kBufferFresh);  // of the capture, not of a replay
      rows.push_back(row);
    }
    if (launched.discard || !node.site) continue;
    LaunchRow row = node.row;
    row.stream = launched.row.stream;
    row.micro_step = launched.row.micro_step;
    row.flags = static_cast<uint8_t>(row.flags | kLaunchInGraph | (launched.row.flags & (kLaunchLegacyStream | kLaunchNonBlocking)));
    appender_->add_launch(row, *node.site, rows.data());
  }
  if (lost) start_.losses->add(Loss::graph_dropped, appender_->step());
}

bool Session::await_graph_digest(GraphTemplate& graph, uint32_t node, uint32_t replay, RawDigest* digest) {
  if (!graph.context) return false;
  GraphResults& results = graph.context->graph_results();
  int64_t pause_ns = 5'000;
  const int64_t begun = now_ns();
  for (;;) {
    if (results.take(node, replay, digest)) return true;
    results.drain();
    if (results.take(node, replay, digest)) return true;
    const int64_t waited = now_ns() - begun;
    if (waited > kReplayPatience || (results.dropped() > 0 && waited > kDroppedPatience)) return false;
    if (graph.context->gone() || (stopping() && now_ns() > stop_deadline_ns_.load())) return false;
    wait_a_little(&pause_ns);
  }
}

}  // namespace forkpoint
