#include "probes/graphs.h"

#include <new>
#include <utility>

#include "probes/cuda_context.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint32_t kCells = 1u << 16;

uint64_t key_of(const void* handle) { return reinterpret_cast<uint64_t>(handle); }
template <typename T>
T* as(uint64_t value) {
  return reinterpret_cast<T*>(value);
}

template <typename Visit>
void each_node(const CapturedRows& captured, Visit visit) {
  for (const GraphRow& row : captured.rows) {
    for (const PacketBuffer& buffer : row.buffers) {
      if (buffer.node != 0 && row.context) visit(row.context->graph_results(), buffer.node);
    }
  }
}

// A buffer whose digest had no number to go to: it is computed all the same, for the graph to keep its form.
bool mark_without_node(PacketBuffer& buffer) {
  const bool wanted = buffer.row.bytes > 0 && buffer.same_as < 0 && (buffer.row.flags & kBufferNoDigest) == 0;
  if (!wanted || buffer.node != 0) return false;
  buffer.row.flags |= kBufferNoDigest;
  return true;
}

}  // namespace

constinit Graphs graphs;

void CapturedRows::release() {
  if (references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // Shared ones keep their numbers for ever: what their scratch holds, and how often they will still run, nobody knows.
  const bool keeps = kept || shared.load();
  each_node(*this, [&](GraphResults& results, uint32_t node) {
    if (keeps) results.ignore(node);
    else results.give_node(node, runs);
  });
  delete this;
}

void GraphTemplate::release() {
  if (references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (const Part& part : parts) {
    part.captured->templates.fetch_sub(1, std::memory_order_relaxed);
    part.captured->release();
  }
  delete this;
}

size_t GraphTemplate::row_count() const {
  size_t count = 0;
  for (const Part& part : parts) count += part.captured->rows.size();
  return count;
}

// One replay of an executable ends before the next begins.
bool GraphTemplate::is_behind(uint32_t replay) const {
  bool behind = false;
  for (const Part& part : parts) {
    if (part.captured->shared.load()) continue;
    each_node(*part.captured, [&](const GraphResults& results, uint32_t node) {
      behind = behind || results.has_passed(node, part.first_run + replay);
    });
  }
  return behind;
}

bool Graphs::create() {
  return capturing_.create(kCells) && captures_.create(kCells) && conditional_.create(kCells) && flushed_.create(kCells) &&
         graphs_.create(kCells) && executables_.create(kCells) && executable_numbers_.create(kCells);
}

void Graphs::reset_locks() {
  lock_.reset();
  HandleTable* tables[] = {&capturing_, &captures_,    &conditional_,       &flushed_,
                           &graphs_,    &executables_, &executable_numbers_};
  for (HandleTable* table : tables) {
    table->reset_lock();
  }
  GraphResults::reset_lock();
}

// ---- Captures

void Graphs::capture_begun(uint64_t stream, uint64_t capture_id, CudaContext* flushed_in) {
  // The stream before it of the same handle was destroyed while it was captured.
  if (const uint64_t before = capturing_.erase(stream)) capture_ended(before - 1, nullptr);
  if (capturing_.set(stream, capture_id + 1) && flushed_in) flushed_.set(capture_id + 1, key_of(flushed_in));
}

bool Graphs::add_row(uint64_t capture_id, CudaContext* context, const LaunchPacket& packet) {
  GraphRow row{packet.row, packet.site, context, {packet.buffers, packet.buffers + packet.row.buffers}};
  std::vector<uint32_t> nodes;
  bool complete = true;
  for (PacketBuffer& buffer : row.buffers) {
    const bool without = mark_without_node(buffer);
    if (without || buffer.node != 0) nodes.push_back(buffer.node);
    complete = complete && !without;
  }
  if (!complete) recorder.lose_row(Loss::graph_dropped);
  const SpinGuard guard(lock_);
  auto* captured = as<CapturedRows>(captures_.find(capture_id + 1));
  if (!captured) {
    captured = new (std::nothrow) CapturedRows;
    if (!captured) return false;
    if (!captures_.set(capture_id + 1, key_of(captured))) {
      delete captured;
      return false;
    }
  }
  captured->rows.push_back(std::move(row));
  if (context && context == flushed_in(capture_id)) {
    captured->unflushed.insert(captured->unflushed.end(), nodes.begin(), nodes.end());
  }
  return true;
}

std::vector<uint32_t> Graphs::take_unflushed(uint64_t capture_id) {
  const SpinGuard guard(lock_);
  auto* captured = as<CapturedRows>(captures_.find(capture_id + 1));
  return captured ? std::exchange(captured->unflushed, {}) : std::vector<uint32_t>{};
}

void Graphs::cannot_flush(uint64_t capture_id) {
  const SpinGuard guard(lock_);
  if (auto* captured = as<CapturedRows>(captures_.find(capture_id + 1))) captured->shared.store(true);
}

void Graphs::capture_ended(uint64_t capture_id, CUgraph graph) {
  const SpinGuard guard(lock_);
  conditional_.erase(capture_id + 1);
  flushed_.erase(capture_id + 1);
  auto* captured = as<CapturedRows>(captures_.erase(capture_id + 1));
  if (!captured) return;
  if (graph) forget(graph);  // a handle that came round again unseen
  if (Graph* made = graph ? graph_of(graph, true) : nullptr) made->parts.push_back(captured);
  else captured->release();
}

// ---- Graphs

Graphs::Graph* Graphs::graph_of(CUgraph graph, bool make) {
  if (auto* known = as<Graph>(graphs_.find(key_of(graph)))) return known;
  auto* made = make ? new (std::nothrow) Graph : nullptr;
  if (!made || graphs_.set(key_of(graph), key_of(made))) return made;
  delete made;
  return nullptr;
}

void Graphs::forget(CUgraph graph) {
  if (auto* known = as<Graph>(graphs_.erase(key_of(graph)))) free_graph(known);
}

void Graphs::free_graph(Graph* graph) {
  for (CapturedRows* captured : graph->parts) captured->release();
  delete graph;
}

void Graphs::append(Graph& to, const Graph& from) {
  to.partial = to.partial || from.partial;
  const size_t count = from.parts.size();  // the two may be one
  for (size_t i = 0; i < count; ++i) {
    CapturedRows* captured = from.parts[i];
    captured->hold();
    to.parts.push_back(captured);
  }
}

void Graphs::node_added_by_hand(CUgraph graph) {
  const SpinGuard guard(lock_);
  if (Graph* known = graph_of(graph, true)) known->partial = true;
}

void Graphs::child_added(CUgraph parent, CUgraph child) {
  const SpinGuard guard(lock_);
  const Graph* from = graph_of(child, false);
  Graph* to = graph_of(parent, true);
  if (!to) return;
  if (from) append(*to, *from);
  else to->partial = true;
}

void Graphs::cloned(CUgraph clone, CUgraph original) {
  const SpinGuard guard(lock_);
  forget(clone);
  const Graph* from = graph_of(original, false);
  Graph* to = from ? graph_of(clone, true) : nullptr;
  if (to) append(*to, *from);
}

void Graphs::graph_destroyed(CUgraph graph) {
  const SpinGuard guard(lock_);
  forget(graph);
}

// ---- Executables

GraphTemplate* Graphs::template_of(CUgraphExec executable) {
  return as<GraphTemplate>(executables_.find(key_of(executable)));
}

void Graphs::forget(CUgraphExec executable) {
  if (auto* known = as<GraphTemplate>(executables_.erase(key_of(executable)))) free_template(known);
}

void Graphs::free_template(GraphTemplate* known) {
  for (const GraphTemplate::Part& part : known->parts) {
    if (part.captured->owner == known->executable) part.captured->owner = 0;
  }
  known->release();
}

bool Graphs::claim(GraphTemplate& made, CapturedRows& captured) {
  bool twice = captured.owner != 0 && captured.owner != made.executable;
  for (const GraphTemplate::Part& part : made.parts) twice = twice || part.captured == &captured;
  if (twice) captured.shared.store(true);
  captured.owner = made.executable;
  captured.hold();
  captured.templates.fetch_add(1, std::memory_order_relaxed);
  made.parts.push_back({&captured, captured.runs});
  return !captured.shared.load();
}

bool Graphs::instantiated(CUgraphExec executable, CUgraph graph) {
  executable_destroyed(executable);  // if the handle came round again unseen
  return updated(executable, graph);
}

bool Graphs::updated(CUgraphExec executable, CUgraph graph) {
  const SpinGuard guard(lock_);
  const GraphTemplate* before = template_of(executable);
  const uint64_t number = before ? before->executable : ++last_executable_;
  forget(executable);
  const Graph* from = graph_of(graph, false);
  auto* made = from ? new (std::nothrow) GraphTemplate : nullptr;
  if (!made) return true;
  made->executable = number;
  made->partial.store(from->partial);
  bool alone = true;
  for (CapturedRows* captured : from->parts) alone = claim(*made, *captured) && alone;
  if (!executables_.set(key_of(executable), key_of(made))) made->release();
  return alone;
}

// The digests that run in it from now on are those of the child's capture.
bool Graphs::child_replaced(CUgraphExec executable, CUgraph child) {
  const SpinGuard guard(lock_);
  if (GraphTemplate* known = template_of(executable)) {
    known->partial.store(true);
    for (const GraphTemplate::Part& part : known->parts) part.captured->shared.store(true);
  }
  if (const Graph* from = graph_of(child, false)) {
    for (CapturedRows* captured : from->parts) captured->shared.store(true);
  }
  return false;
}

// Replays of one executable wait for each other; those of an executable that is gone, on another stream, do not.
bool Graphs::about_to_launch(CUgraphExec executable, uint64_t stream) {
  const SpinGuard guard(lock_);
  const GraphTemplate* known = template_of(executable);
  if (!known) return true;
  bool alone = true;
  for (const GraphTemplate::Part& part : known->parts) {
    CapturedRows& captured = *part.captured;
    const bool other = captured.last_launcher != 0 && captured.last_launcher != known->executable;
    if (other && captured.last_stream != stream && captured.templates.load() > 1) captured.shared.store(true);
    captured.last_launcher = known->executable;
    captured.last_stream = stream;
    alone = alone && !captured.shared.load();
  }
  return alone;
}

void Graphs::changed_by_hand(CUgraphExec executable) {
  const SpinGuard guard(lock_);
  if (GraphTemplate* known = template_of(executable)) known->partial.store(true);
}

void Graphs::executable_destroyed(CUgraphExec executable) {
  const SpinGuard guard(lock_);
  executable_numbers_.erase(key_of(executable));
  forget(executable);
}

Graphs::Launch Graphs::launched(CUgraphExec executable) {
  const SpinGuard guard(lock_);
  Launch launch;
  launch.ordinal = executable_numbers_.find_or_set(
      key_of(executable), [&] { return last_number_.fetch_add(1, std::memory_order_relaxed) + 1; });
  launch.graph = template_of(executable);
  if (!launch.graph) return launch;
  launch.graph->hold();
  launch.replay = launch.graph->replays.fetch_add(1, std::memory_order_relaxed);
  launch.partial = launch.graph->partial.load();
  for (const GraphTemplate::Part& part : launch.graph->parts) ++part.captured->runs;
  return launch;
}

void Graphs::forget() {
  const SpinGuard guard(lock_);
  capturing_.clear();
  conditional_.clear();
  flushed_.clear();
  executable_numbers_.clear();
  captures_.clear([](uint64_t value) {
    as<CapturedRows>(value)->kept = true;
    as<CapturedRows>(value)->release();
  });
  graphs_.clear([](uint64_t value) {
    for (CapturedRows* captured : as<Graph>(value)->parts) captured->kept = true;
    free_graph(as<Graph>(value));
  });
  executables_.clear([](uint64_t value) {
    for (const GraphTemplate::Part& part : as<GraphTemplate>(value)->parts) part.captured->kept = true;
    free_template(as<GraphTemplate>(value));
  });
}

}  // namespace forkpoint
