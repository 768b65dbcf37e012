// CUDA graphs of the host's: which of its launches were captured into which, so that each replay gives the rows of its
// nodes. Any thread.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "probes/handle_table.h"
#include "probes/launch_packet.h"

namespace forkpoint {

struct GraphRow {
  LaunchRow row;
  const SiteEntry* site = nullptr;
  std::vector<PacketBuffer> buffers;
};

// What was captured. Counted references: of the graph, of each executable made from it, of each replay on its way.
struct GraphTemplate {
  std::atomic<uint32_t> references{1};
  std::atomic<uint32_t> replays{0};
  std::atomic<bool> partial{false};  // nodes that were not captured under our eyes are in it
  CudaContext* context = nullptr;    // whose ring its digests go to
  SpinLock lock;                     // of rows while it is being captured
  std::vector<GraphRow> rows;

  void hold() { references.fetch_add(1, std::memory_order_relaxed); }
  void release();
};

class Graphs {
 public:
  bool create();
  // A launch, copy or set on a stream that is being captured. false: no memory.
  bool add_row(uint64_t capture_id, CudaContext* context, const LaunchPacket& packet);
  void capture_ended(uint64_t capture_id, CUgraph graph);
  // The capture goes into the body of a conditional node: how often that runs is for the device to decide.
  void capture_is_conditional(uint64_t capture_id) { conditional_.set(capture_id + 1, 1); }
  bool is_conditional(uint64_t capture_id) { return conditional_.find(capture_id + 1) != 0; }
  void node_added_by_hand(CUgraph graph);
  void child_added(CUgraph parent, CUgraph child);
  void cloned(CUgraph clone, CUgraph original);
  void graph_destroyed(CUgraph graph);
  void instantiated(CUgraphExec executable, CUgraph graph);  // and updated
  void changed_by_hand(CUgraphExec executable);
  void executable_destroyed(CUgraphExec executable);

  struct Launch {
    GraphTemplate* graph = nullptr;  // held for the caller; nullptr: captured before we came, or built by hand
    uint32_t replay = 0;
    uint64_t ordinal = 0;            // of the executable, from 1 in order of first sight
    bool partial = false;
  };
  Launch launched(CUgraphExec executable);
  void reset_locks();

 private:
  GraphTemplate* template_of(HandleTable& table, uint64_t key, bool make);

  HandleTable captures_, conditional_, graphs_, executables_, executable_numbers_;
  std::atomic<uint64_t> last_number_{0};
};
extern Graphs graphs;

}  // namespace forkpoint
