#include "probes/graphs.h"

#include <new>

namespace forkpoint {
namespace {

constexpr uint32_t kCells = 1u << 16;

uint64_t key_of(const void* handle) { return reinterpret_cast<uint64_t>(handle); }
GraphTemplate* as_template(uint64_t value) { return reinterpret_cast<GraphTemplate*>(value); }

}  // namespace

constinit Graphs graphs;

void GraphTemplate::release() {
  if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

bool Graphs::create() {
  return captures_.create(kCells) && conditional_.create(kCells) && graphs_.create(kCells) && executables_.create(kCells) &&
         executable_numbers_.create(kCells);
}

void Graphs::reset_locks() {
  for (HandleTable* table : {&captures_, &conditional_, &graphs_, &executables_, &executable_numbers_}) table->reset_lock();
}

GraphTemplate* Graphs::template_of(HandleTable& table, uint64_t key, bool make) {
  if (GraphTemplate* known = as_template(table.find(key))) return known;
  if (!make) return nullptr;
  auto* made = new (std::nothrow) GraphTemplate;
  if (!made) return nullptr;
  auto* kept = as_template(table.find_or_set(key, [&] { return key_of(made); }));
  if (kept != made) delete made;
  return kept;
}

bool Graphs::add_row(uint64_t capture_id, CudaContext* context, const LaunchPacket& packet) {
  GraphTemplate* graph = template_of(captures_, capture_id + 1, true);
  if (!graph) return false;
  GraphRow row{packet.row, packet.site, {packet.buffers, packet.buffers + packet.row.buffers}};
  const SpinGuard guard(graph->lock);
  graph->context = context;
  graph->rows.push_back(std::move(row));
  return true;
}

void Graphs::capture_ended(uint64_t capture_id, CUgraph graph) {
  conditional_.erase(capture_id + 1);
  GraphTemplate* captured = as_template(captures_.erase(capture_id + 1));
  if (!captured) return;
  if (!graph || !graphs_.set(key_of(graph), key_of(captured))) captured->release();
}

void Graphs::node_added_by_hand(CUgraph graph) {
  if (GraphTemplate* known = template_of(graphs_, key_of(graph), true)) known->partial.store(true);
}

void Graphs::child_added(CUgraph parent, CUgraph child) {
  GraphTemplate* from = template_of(graphs_, key_of(child), false);
  GraphTemplate* to = template_of(graphs_, key_of(parent), true);
  if (!to) return;
  if (!from) return to->partial.store(true);
  const std::vector<GraphRow> rows = from->rows;
  const SpinGuard guard(to->lock);
  to->rows.insert(to->rows.end(), rows.begin(), rows.end());
  to->context = from->context;
  if (from->partial.load()) to->partial.store(true);
}

void Graphs::cloned(CUgraph clone, CUgraph original) {
  GraphTemplate* from = template_of(graphs_, key_of(original), false);
  if (!from) return;
  from->hold();
  if (!graphs_.set(key_of(clone), key_of(from))) from->release();
}

void Graphs::graph_destroyed(CUgraph graph) {
  if (GraphTemplate* known = as_template(graphs_.erase(key_of(graph)))) known->release();
}

void Graphs::instantiated(CUgraphExec executable, CUgraph graph) {
  executable_destroyed(executable);  // updated, or the handle came round again unseen
  GraphTemplate* from = template_of(graphs_, key_of(graph), false);
  if (!from) return;
  from->hold();
  if (!executables_.set(key_of(executable), key_of(from))) from->release();
}

void Graphs::changed_by_hand(CUgraphExec executable) {
  if (GraphTemplate* known = template_of(executables_, key_of(executable), false)) known->partial.store(true);
}

void Graphs::executable_destroyed(CUgraphExec executable) {
  if (GraphTemplate* known = as_template(executables_.erase(key_of(executable)))) known->release();
}

Graphs::Launch Graphs::launched(CUgraphExec executable) {
  Launch launch;
  launch.ordinal = executable_numbers_.find_or_set(
      key_of(executable), [&] { return last_number_.fetch_add(1, std::memory_order_relaxed) + 1; });
  launch.graph = template_of(executables_, key_of(executable), false);
  if (!launch.graph) return launch;
  launch.graph->hold();
  launch.replay = launch.graph->replays.fetch_add(1, std::memory_order_relaxed);
  launch.partial = launch.graph->partial.load();
  return launch;
}

}  // namespace forkpoint
