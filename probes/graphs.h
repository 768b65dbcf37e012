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
  CudaContext* context = nullptr;  // whose ring its digests go to; nullptr: it has none
  std::vector<PacketBuffer> buffers;
};

// What one capture gave. Counted references: of the graphs that hold it, of each executable's template. The last one
// gives the numbers of its digests back. Guarded by the lock of Graphs, but for atomics; once the capture has ended, rows
// stay as they are.
struct CapturedRows {
  std::atomic<uint32_t> references{1};
  std::atomic<uint32_t> templates{0};  // that hold it: of executables, or of replays on their way
  // Its nodes are, or were, in more than one executable, or more than once in one: their scratch and their ordinals are
  // mixed up, so no digest of theirs is believed any more. Also where nobody fetches them (cannot_flush).
  std::atomic<bool> shared{false};
  bool kept = false;                   // it may run without our knowledge: its numbers are never given back
  uint64_t owner = 0;                  // the executable that can run it now; 0: none
  uint64_t last_launcher = 0;          // the executable that ran it last, and where
  uint64_t last_stream = 0;
  uint32_t runs = 0;                   // launches so far
  std::vector<GraphRow> rows;
  std::vector<uint32_t> unflushed;     // numbers of digests that the end of the capture is to fetch; 0: of one without

  void hold() { references.fetch_add(1, std::memory_order_relaxed); }
  void release();
};

// What an executable runs, as it was when it was instantiated (or updated). Never changed, so the writer reads it
// without a lock. Counted references: of the executable, of each replay on its way.
struct GraphTemplate {
  struct Part {
    CapturedRows* captured = nullptr;
    uint32_t first_run = 0;            // of the captured rows: how often they ran before our first replay
  };
  std::atomic<uint32_t> references{1};
  std::atomic<uint32_t> replays{0};
  std::atomic<bool> partial{false};    // nodes that were not captured under our eyes are in it
  uint64_t executable = 0;             // a number that never comes again
  std::vector<Part> parts;

  void hold() { references.fetch_add(1, std::memory_order_relaxed); }
  void release();
  // Digests of the nodes of the n-th replay that lie behind it have arrived: it is over. Writer thread.
  bool is_behind(uint32_t replay) const;
  size_t row_count() const;
};

class Graphs {
 public:
  bool create();
  // stream: of the capture, any number but 0 that it alone has. flushed_in: whose digests the end of the capture
  // fetches; nullptr: nobody's, they send their results themselves.
  void capture_begun(uint64_t stream, uint64_t capture_id, CudaContext* flushed_in);
  CudaContext* flushed_in(uint64_t capture_id) { return as_context(flushed_.find(capture_id + 1)); }
  // The digests that were captured since the last call, to be fetched by what is captured next.
  std::vector<uint32_t> take_unflushed(uint64_t capture_id);
  // That could not be captured: nobody fetches these digests, nor those to come.
  void cannot_flush(uint64_t capture_id);
  // A launch, copy or set on a stream that is being captured. false: no memory.
  bool add_row(uint64_t capture_id, CudaContext* context, const LaunchPacket& packet);
  // One more than the number of the capture that was begun on the stream, or 0; then it is forgotten.
  uint64_t take_capture_of(uint64_t stream) { return capturing_.erase(stream); }
  uint64_t capture_of(uint64_t stream) { return capturing_.find(stream); }  // the same, and it stays
  void capture_ended(uint64_t capture_id, CUgraph graph);  // nullptr: it failed
  // The capture goes into the body of a conditional node: how often that runs is for the device to decide.
  void capture_is_conditional(uint64_t capture_id) { conditional_.set(capture_id + 1, 1); }
  bool is_conditional(uint64_t capture_id) { return conditional_.find(capture_id + 1) != 0; }
  void node_added_by_hand(CUgraph graph);
  void child_added(CUgraph parent, CUgraph child);
  void cloned(CUgraph clone, CUgraph original);
  void graph_destroyed(CUgraph graph);
  // false, of these four: digests inside it are not to be had (any more), because nodes are shared.
  bool instantiated(CUgraphExec executable, CUgraph graph);
  bool updated(CUgraphExec executable, CUgraph graph);
  bool child_replaced(CUgraphExec executable, CUgraph child);
  bool about_to_launch(CUgraphExec executable, uint64_t stream);
  void changed_by_hand(CUgraphExec executable);
  void executable_destroyed(CUgraphExec executable);

  struct Launch {
    GraphTemplate* graph = nullptr;  // held for the caller; nullptr: captured before we came, or built by hand
    uint32_t replay = 0;
    uint64_t ordinal = 0;            // of the executable, from 1 in order of first sight
    bool partial = false;
  };
  Launch launched(CUgraphExec executable);
  // Nobody watched for a while: what the handles stand for now is not known.
  void forget();
  void reset_locks();

 private:
  // What a CUgraph holds now. Owned by graphs_.
  struct Graph {
    bool partial = false;
    std::vector<CapturedRows*> parts;
  };
  static CudaContext* as_context(uint64_t value) { return reinterpret_cast<CudaContext*>(value); }
  // All with lock_ held.
  Graph* graph_of(CUgraph graph, bool make);
  void forget(CUgraph graph);
  static void free_graph(Graph* graph);
  static void free_template(GraphTemplate* known);
  static void append(Graph& to, const Graph& from);
  GraphTemplate* template_of(CUgraphExec executable);
  void forget(CUgraphExec executable);
  static bool claim(GraphTemplate& made, CapturedRows& captured);

  SpinLock lock_;  // of everything but rows on their way to the writer
  HandleTable capturing_, captures_, conditional_, flushed_, graphs_, executables_, executable_numbers_;
  std::atomic<uint64_t> last_number_{0};
  uint64_t last_executable_ = 0;
};
extern Graphs graphs;

}  // namespace forkpoint
