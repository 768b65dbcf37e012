#include "lib/launch_compare.h"

#include <algorithm>
#include <set>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

// A record that nobody trains with: it is in no verdict.
bool is_evaluation(const LaunchStep& step, uint32_t row) {
  const uint32_t record = step.record_of(row);
  return record != kNoRow && (step.records.flags[record] & kRecordEval) != 0;
}

// A number that happens to lie in some allocation of each run says nothing about which allocation is which.
bool is_counterpart(const BufferRow& a, const BufferRow& b) {
  if (a.allocation == 0 || b.allocation == 0) return false;
  return a.address != b.address || a.offset == b.offset;
}

uint64_t manner_of(uint32_t kernel, const LaunchRow& row) {
  uint64_t hash = mix64(kernel);
  for (const uint32_t size : row.grid) hash = mix64(hash ^ size);
  hash = mix64(hash ^ row.bytes);
  return mix64(hash ^ row.params.a);
}

bool worth_a_node(const DataNode& node) {
  if (node.sink) return true;
  return std::any_of(node.places.begin(), node.places.end(), [](const PlaceFact& place) {
    const bool entered =
        place.before_differs() && (place.unobserved() || !place.a.writer.known() || !place.b.writer.known());
    return place.differing_output() || place.opaque() || entered;
  });
}

const BufferStates::Part* same_part(const std::vector<BufferStates::Part>& parts, const BufferStates::Part& part) {
  for (const auto& other : parts) {
    if (other.start == part.start && other.bytes == part.bytes) return &other;
  }
  return nullptr;
}

}  // namespace

std::vector<PlaceFact> join_places(const std::vector<PlaceSide>& a, const std::vector<PlaceSide>& b) {
  std::vector<PlaceFact> out;
  std::vector<char> taken(b.size(), 0);
  for (const PlaceSide& side : a) {
    PlaceFact fact;
    fact.a = side;
    for (size_t k = 0; k < b.size(); ++k) {
      if (taken[k] != 0 || b[k].buffer.place != side.buffer.place) continue;
      taken[k] = 1;
      fact.b = b[k];
      break;
    }
    out.push_back(std::move(fact));
  }
  for (size_t k = 0; k < b.size(); ++k) {
    if (taken[k] == 0) out.emplace_back().b = b[k];
  }
  return out;
}

RankComparison::RankComparison(const LaunchJoin& join, const RankPair& pair)
    : join_(join), pair_(pair), a_(join, false), b_(join, true) {}

void RankComparison::trace(Side* side, size_t step_index, bool carries_on) {
  if (!carries_on) {
    side->states.forget();
    side->history.start(step_index);
  }
  side->accesses.clear();
  side->step_index = step_index;
  side->states.trace(
      side->step, step_index, [&](size_t row) { return is_collective_output(join_, side->in_b, side->step, row); },
      &side->accesses);
  side->first_access.assign(side->step.size() + 1, 0);
  for (const Access& access : side->accesses) ++side->first_access[access.row + 1];
  for (size_t i = 0; i < side->step.size(); ++i) side->first_access[i + 1] += side->first_access[i];
}

void RankComparison::compare(size_t s) {
  const StepPair& at = pair_.steps[s];
  bool carries_on = last_ != kNoStep;
  if (carries_on) {
    const StepPair& last = pair_.steps[last_];
    const bool adjacent = last.step + 1 == at.step || (last.step == kPrologueStep && at.step == 0);
    carries_on = adjacent && last.a + 1 == at.a && last.b + 1 == at.b && last.complete;
  }
  last_ = kNoStep;  // stays so where reading fails
  ++compared_;
  a_.step.read(*pair_.a, at.a);
  b_.step.read(*pair_.b, at.b);
  pairs_ = pair_launches(join_, a_.step, b_.step);
  trace(&a_, at.a, carries_on);
  trace(&b_, at.b, carries_on);
  gap_nodes_.assign(pairs_.gaps, kNoNode);
  const size_t first_node = nodes_.size();
  for (uint32_t i = 0; i < a_.step.size(); ++i) {
    if (a_.step.row(i).kind == LaunchKind::kernel) places_.add(join_.kernel(false, a_.step.row(i)), a_.step.buffers(i));
  }
  for (uint32_t i = 0; i < a_.step.size(); ++i) {
    if (pairs_.in_b[i] != kNoRow) vote(i, pairs_.in_b[i]);
  }
  for (uint32_t i = 0; i < a_.step.size(); ++i) {
    if (pairs_.in_b[i] != kNoRow)
      compare_pair(s, i, pairs_.in_b[i]);
    else if (is_work(a_.step.row(i).kind))
      add_to_gap(s, false, i);
  }
  for (uint32_t j = 0; j < b_.step.size(); ++j) {
    if (pairs_.in_a[j] == kNoRow && is_work(b_.step.row(j).kind)) add_to_gap(s, true, j);
  }
  join_collectives(first_node);
  join_gap_results();
  update_live();
  last_ = s;
}

PlaceSide RankComparison::side_of(const Side& side, const Access& access) const {
  PlaceSide out;
  out.there = true;
  out.buffer = side.step.launches.buffers[access.buffer];
  out.known = access.content_known() && !access.overwritten;
  out.held = access.held;
  out.hashed = access.before != kNoBuffer || access.reads_only;
  if (access.reads_only && has_digest(out.buffer)) out.known = true, out.held = out.buffer.digest;
  out.unwritten = access.unwritten;
  out.fresh = access.fresh, out.unobserved = access.unobserved, out.changed = access.changed;
  out.writer = access.writer, out.others = access.others;
  return out;
}

std::vector<PlaceFact> RankComparison::places_of(uint32_t i, uint32_t j) const {
  std::vector<PlaceSide> in_a, in_b;
  bool reads_only = true, overwritten = false;
  for (const Access* at = a_.begin(i); at != a_.end(i); ++at) in_a.push_back(side_of(a_, *at));
  for (const Access* at = b_.begin(j); at != b_.end(j); ++at) in_b.push_back(side_of(b_, *at));
  std::vector<PlaceFact> places = join_places(in_a, in_b);
  for (PlaceFact& place : places) {
    reads_only = true, overwritten = false;
    for (const auto& [side, row] : {std::pair(&a_, i), std::pair(&b_, j)}) {
      for (const Access* at = side->begin(row); at != side->end(row); ++at) {
        if (side->step.launches.buffers[at->buffer].place != place.place()) continue;
        reads_only &= at->reads_only, overwritten |= at->overwritten;
      }
    }
    place.reads_only = reads_only, place.overwritten = overwritten;
  }
  return places;
}

void RankComparison::learn(const DataNode& node) {
  const std::vector<PlaceFact>& places = node.places;
  const auto differing = std::count_if(places.begin(), places.end(), [](const PlaceFact& place) {
    return !place.overwritten && (place.before_differs() || place.opaque());
  });
  for (const PlaceFact& in : places) {
    if (in.overwritten || (!in.before_differs() && !(in.modified() && in.after_differs()))) continue;
    size_t equal = 0, other = 0;
    for (const PlaceFact& out : places) {
      const bool written =
          out.a.changed == Changed::yes || out.b.changed == Changed::yes || out.overwritten || out.fresh();
      if (!out.after_known() || out.reads_only || (&out != &in && !written)) continue;
      if (!out.after_differs() && in.before_differs())
        ++sensitivity_.equal[{node.manner, in.place(), in.a.buffer.offset, out.place()}];
      if (&out != &in) ++(out.after_differs() ? other : equal);
    }
    for (const bool in_b : {false, true}) {
      Sensitivity::Buffer& buffer = sensitivity_.buffers[{in_b, in.side(in_b).buffer.allocation}];
      if (in.modified() && equal > 0 && other == 0) ++buffer.scratch;
      if (in.untouched() && other > 0 && differing == 1) ++buffer.matters;
    }
  }
}

void RankComparison::note_noise(const DataNode& node) {
  const bool explained = std::any_of(node.places.begin(), node.places.end(), [](const PlaceFact& place) {
    return place.before_differs() && place.untouched() && !place.overwritten;
  });
  uint64_t results = 0;
  for (const PlaceFact& place : node.places) results += place.differing_output() ? 1 : 0;
  noise_.buffers += results;
  if (results > 0 && !explained && node.form == NodeForm::launch) ++noise_.kernels[join_.names.name(node.kernel)];
}

// Two buffers that hold something else in each run, though what launches of earlier steps left in each was equal in
// both runs: they are not one buffer.
bool RankComparison::apart(const LaunchRef& writer_a, const LaunchRef& writer_b) const {
  const bool earlier =
      writer_a.known() && writer_b.known() && writer_a.step != a_.step_index && writer_b.step != b_.step_index;
  return earlier && nodes_.find(false, writer_a) == kNoNode && nodes_.find(true, writer_b) == kNoNode;
}

// Which buffers stand in the same place in both runs. Sizes tell a number that looks like a pointer from most pointers.
void RankComparison::vote(uint32_t i, uint32_t j) {
  constexpr uint32_t kSure = 8, kPointer = 4, kDoubtful = 1;
  const bool kernel = a_.step.row(i).kind == LaunchKind::kernel;
  const Access *in_a = a_.begin(i), *in_b = b_.begin(j);
  for (; in_a != a_.end(i) && in_b != b_.end(j); ++in_a, ++in_b) {
    const BufferRow &a = a_.step.launches.buffers[in_a->buffer], &b = b_.step.launches.buffers[in_b->buffer];
    const bool alike = a.place == b.place && a.bytes == b.bytes && a.offset == b.offset;
    const bool differ = in_a->content_known() && in_b->content_known() && !(in_a->held == in_b->held);
    if (!alike || !is_counterpart(a, b) || (differ && apart(in_a->writer, in_b->writer))) continue;
    const bool pointer = places_.always(join_.kernel(false, a_.step.row(i)), a.place);
    counterparts_.vote(a.allocation, b.allocation, !kernel ? kSure : pointer ? kPointer : kDoubtful);
  }
}

// Buffers in one place that are not each other's counterpart: where the kernel is not always handed a buffer there,
// these are numbers.
void RankComparison::settle_mismatches(uint32_t kernel, std::vector<PlaceFact>* places) const {
  for (PlaceFact& place : *places) {
    if (!place.a.there || !place.b.there || place.a.buffer.allocation == 0 || place.b.buffer.allocation == 0) continue;
    place.mismatched = !counterparts_.may_be(place.a.buffer.allocation, place.b.buffer.allocation) ||
                       (place.before_differs() && !place.unobserved() && apart(place.a.writer, place.b.writer));
  }
  std::erase_if(*places,
                [&](const PlaceFact& place) { return place.mismatched && !places_.always(kernel, place.place()); });
}

// Nearly all launches: everything that was found and left is equal. Saves putting the places together.
bool RankComparison::is_plainly_equal(uint32_t i, uint32_t j) {
  const auto size = a_.end(i) - a_.begin(i);
  if (size != b_.end(j) - b_.begin(j)) return false;
  for (const Access *in_a = a_.begin(i), *in_b = b_.begin(j); in_a != a_.end(i); ++in_a, ++in_b) {
    const BufferRow &a = a_.step.launches.buffers[in_a->buffer], &b = b_.step.launches.buffers[in_b->buffer];
    const bool same = a.place == b.place && has_digest(a) && has_digest(b) && a.digest == b.digest;
    const bool found_same =
        in_a->content_known() == in_b->content_known() && (!in_a->content_known() || in_a->held == in_b->held);
    if (!same || !found_same) return false;
  }
  return true;
}

void RankComparison::compare_pair(size_t s, uint32_t i, uint32_t j) {
  const LaunchRow &row_a = a_.step.row(i), &row_b = b_.step.row(j);
  if (a_.begin(i) == a_.end(i) && b_.begin(j) == b_.end(j)) return;
  if (is_plainly_equal(i, j)) return;
  DataNode node;
  node.pair_step = s, node.row_a = i, node.row_b = j, node.order = order_of(false, i);
  node.kernel = join_.kernel(false, row_a);
  node.manner = manner_of(node.kernel, row_a);
  node.flags = row_a.flags | row_b.flags;
  node.resized = is_move(row_a.kind) && row_a.bytes != row_b.bytes;
  node.places = places_of(i, j);
  if (row_a.kind == LaunchKind::kernel) settle_mismatches(node.kernel, &node.places);
  bool differs = false;
  for (const PlaceFact& place : node.places) {
    differs |= place.after_differs();
  }
  if (row_a.kind == LaunchKind::record) {
    if (!differs || is_evaluation(a_.step, i)) return;
    node.form = is_collective_output(join_, false, a_.step, i) ? NodeForm::collective : NodeForm::record;
  } else {
    learn(node);
    node.sink = differs && (node.flags & (kLaunchToHost | kLaunchPeerMapped)) != 0;
    if (!worth_a_node(node)) return;
    note_noise(node);
  }
  const uint32_t record = a_.step.record_of(i);
  const bool sink = node.sink;
  const uint32_t id = nodes_.add(std::move(node));
  nodes_.name(false, {a_.step_index, i}, id);
  nodes_.name(true, {b_.step_index, j}, id);
  if (record != kNoRow) record_nodes_[{s, record}] = id;
  if (sink) sinks_.push_back(id);
}

// What only run B has comes after the launch of run A whose counterpart it follows.
uint64_t RankComparison::order_of(bool in_b, uint32_t row) const {
  uint64_t place = uint64_t{row} * 2;
  if (in_b) {
    uint32_t before = row;
    while (before > 0 && pairs_.in_a[before] == kNoRow) --before;
    place = pairs_.in_a[before] == kNoRow ? 0 : uint64_t{pairs_.in_a[before]} * 2 + 1;
  }
  return compared_ << 34 | place;
}

void RankComparison::add_to_gap(size_t s, bool in_b, uint32_t row) {
  Side& side = in_b ? b_ : a_;
  const uint32_t gap = pairs_.gap(in_b, row);
  if (gap == kNoRow) return;
  uint32_t& id = gap_nodes_[gap];
  if (id == kNoNode) {
    DataNode node;
    node.form = NodeForm::gap;
    node.pair_step = s, node.order = order_of(in_b, row);
    id = nodes_.add(std::move(node));
  }
  nodes_.name(in_b, {side.step_index, row}, id);
  DataNode& node = nodes_[id];
  uint32_t& first = in_b ? node.row_b : node.row_a;
  if (first == kNoRow) first = row, node.kernel = join_.kernel(in_b, side.step.row(row));
  (in_b ? node.rows_b : node.rows_a).push_back(row);
  node.flags |= side.step.row(row).flags;
  for (const Access* at = side.begin(row); at != side.end(row); ++at) {
    PlaceFact& place = node.places.emplace_back();
    (in_b ? place.b : place.a) = side_of(side, *at);
    place.reads_only = at->reads_only, place.overwritten = at->overwritten;
    node.place_rows.push_back({in_b, row});
  }
}

// A collective's output that differs is explained by its own inputs where those differ: same call, this rank.
void RankComparison::join_collectives(size_t first_node) {
  const auto record_of = [&](uint32_t node) { return a_.step.record_of(nodes_[node].row_a); };
  const StepColumns& records = a_.step.records;
  std::map<std::tuple<uint64_t, int32_t, uint32_t>, std::vector<uint32_t>> inputs;
  const auto call_of = [&](uint32_t record) {
    return std::tuple(join_.sites.op(records.site[record]), records.micro_step[record], records.call[record]);
  };
  for (uint32_t id = static_cast<uint32_t>(first_node); id < nodes_.size(); ++id) {
    if (nodes_[id].form != NodeForm::record || record_of(id) == kNoRow) continue;
    const Site& site = join_.sites.site(records.site[record_of(id)]);
    if (site.kind == Kind::collective && site.role == Role::input) inputs[call_of(record_of(id))].push_back(id);
  }
  for (uint32_t id = static_cast<uint32_t>(first_node); id < nodes_.size(); ++id) {
    if (nodes_[id].form != NodeForm::collective || record_of(id) == kNoRow) continue;
    const auto at = inputs.find(call_of(record_of(id)));
    if (at != inputs.end()) nodes_[id].inputs = at->second;
  }
}

// What a kernel of run A and the one that stands for it in run B have left, where no launch of both runs was handed it
// yet: buffers of one size are taken for the same, in their order.
void RankComparison::join_gap_results() {
  for (const uint32_t id : gap_nodes_) {
    if (id == kNoNode || nodes_[id].rows_a.empty() || nodes_[id].rows_b.empty()) continue;
    std::vector<const BufferRow*> in_a, in_b;
    for (const PlaceFact& place : nodes_[id].places) {
      const PlaceSide& side = place.a.there ? place.a : place.b;
      const bool known = counterparts_.of(!place.a.there, side.buffer.allocation) != 0;
      if (!known && !place.reads_only && side.changed != Changed::no)
        (place.a.there ? in_a : in_b).push_back(&side.buffer);
    }
    for (const BufferRow* a : in_a) {
      const auto b = std::find_if(in_b.begin(), in_b.end(), [&](const BufferRow* other) {
        return other->bytes == a->bytes && counterparts_.of(true, other->allocation) == 0;
      });
      if (b != in_b.end()) counterparts_.vote(a->allocation, (*b)->allocation, 1);
    }
  }
}

// Of the buffers that this step touched: those that are there in both runs and hold something else in each.
void RankComparison::update_live() {
  std::set<uint64_t> touched(a_.states.touched().begin(), a_.states.touched().end());
  for (const uint64_t allocation : b_.states.touched()) {
    if (const uint64_t there = counterparts_.of(true, allocation); there != 0) touched.insert(there);
  }
  for (const uint64_t allocation : touched) {
    live_.erase(allocation);
    const uint64_t there = counterparts_.of(false, allocation);
    if (there == 0) continue;
    const auto *parts_a = a_.states.parts(allocation), *parts_b = b_.states.parts(there);
    if (parts_a == nullptr || parts_b == nullptr) continue;
    for (const BufferStates::Part& part : *parts_a) {
      const BufferStates::Part* other = same_part(*parts_b, part);
      if (other == nullptr || !part.known || !other->known || part.digest == other->digest) continue;
      live_[allocation] = {allocation, there, part, *other};
    }
  }
  const std::set<uint64_t> gone_a(a_.states.released().begin(), a_.states.released().end());
  const std::set<uint64_t> gone_b(b_.states.released().begin(), b_.states.released().end());
  std::erase_if(live_, [&](const auto& entry) {
    const bool gone = gone_a.count(entry.first) != 0 || gone_b.count(entry.second.allocation_b) != 0;
    return gone || !counterparts_.may_be(entry.first, entry.second.allocation_b);
  });
}

uint32_t RankComparison::record_node(size_t pair_step, uint32_t record_a) const {
  const auto at = record_nodes_.find({pair_step, record_a});
  return at == record_nodes_.end() ? kNoNode : at->second;
}

}  // namespace forkpoint
