#include "lib/launch_slice.h"

#include <algorithm>
#include <set>

#include "lib/launch.h"

namespace forkpoint {
namespace {

struct Edge {
  uint32_t node = kNoNode, place = kNoPlace;
  friend auto operator<=>(const Edge&, const Edge&) = default;
};

struct Inputs {
  std::vector<Edge> edges, weak;  // weak: followed only where there are no others
  std::vector<uint32_t> not_followed, opaque;
  uint32_t entered = kNoPlace;
  Edge entry;
};

bool overlap(const BufferRow& left, const BufferRow& right) {
  return left.allocation == right.allocation && left.start < right.start + right.bytes &&
         right.start < left.start + left.bytes;
}

class Walk {
 public:
  explicit Walk(const RankComparison& comparison)
      : nodes_(comparison.nodes()), sensitivity_(comparison.sensitivity()), places_(comparison.places()) {}

  Slice run(uint32_t start) {
    std::set<Edge> seen;
    std::vector<Edge> stack = {{start, kNoPlace}};
    while (!stack.empty()) {
      const Edge at = stack.back();
      stack.pop_back();
      if (!seen.insert(at).second) continue;
      const Inputs inputs = inputs_of(at);
      if (inputs.edges.empty()) add_end(at, inputs);
      stack.insert(stack.end(), inputs.edges.begin(), inputs.edges.end());
    }
    out_.nodes = seen.size();
    if (out_.ends.empty()) {  // the two runs did things in orders that contradict each other: the earliest of them all
      const auto first = std::min_element(seen.begin(), seen.end(), [&](const Edge& left, const Edge& right) {
        return nodes_[left.node].order < nodes_[right.node].order;
      });
      add_end(*first, {});
    }
    std::sort(out_.ends.begin(), out_.ends.end(), [&](const SliceEnd& left, const SliceEnd& right) {
      return std::tuple(nodes_[left.node].order, left.node, left.place) <
             std::tuple(nodes_[right.node].order, right.node, right.place);
    });
    std::set<Edge> entries;
    std::erase_if(out_.ends, [&](const SliceEnd& end) {
      return end.kind == EndKind::entered && end.entry_node != kNoNode &&
             !entries.insert({end.entry_node, end.entry_place}).second;
    });
    return std::move(out_);
  }

 private:
  void add_end(const Edge& at, const Inputs& inputs) {
    out_.ends.push_back({end_kind(at, inputs), at.node, at.place, inputs.not_followed, inputs.opaque, inputs.entered,
                         inputs.entry.node, inputs.entry.place});
  }

  EndKind end_kind(const Edge& at, const Inputs& inputs) const {
    const DataNode& node = nodes_[at.node];
    if (node.form == NodeForm::collective) return EndKind::collective;
    if (node.form == NodeForm::gap) return EndKind::gap;
    if ((node.flags & kLaunchFromHost) != 0) return EndKind::from_host;
    if (node.resized) return EndKind::launch;  // that other bytes were found in it is no finding
    return inputs.entered != kNoPlace || node.form == NodeForm::record ? EndKind::entered : EndKind::launch;
  }

  Inputs inputs_of(const Edge& at) const {
    const DataNode& node = nodes_[at.node];
    Inputs inputs;
    if (node.form == NodeForm::collective) {
      for (const uint32_t input : node.inputs) inputs.edges.push_back({input, kNoPlace});
    } else if (node.form == NodeForm::gap) {
      add_gap_inputs(at.node, &inputs);
      if (inputs.edges.empty()) inputs.edges = inputs.weak;
    } else if ((node.flags & kLaunchFromHost) == 0) {
      for (uint32_t place = 0; place < node.places.size(); ++place) add_input(at, place, &inputs);
      if (inputs.edges.empty()) inputs.edges = inputs.weak;
    }
    return inputs;
  }

  // One buffer that a launch of both runs was handed, as an input to the output at.place.
  void add_input(const Edge& at, uint32_t index, Inputs* inputs) const {
    const PlaceFact& place = nodes_[at.node].places[index];
    // In one run only: a number that looks like a pointer there.
    if (place.overwritten || !place.a.there || !place.b.there) return;
    if (place.before_known() && !place.before_differs()) return;
    if (place.mismatched && !places_.always(nodes_[at.node].kernel, place.place())) return;
    std::vector<Edge> edges;
    const bool unobserved = place.before_differs() && place.unobserved();
    for (const bool in_b : {false, true}) {
      if (!unobserved) add_writers(at.node, place.side(in_b), in_b, &edges, &inputs->opaque);
    }
    const Weight weight = place.before_differs() ? weigh(at, index, edges) : Weight::full;
    if (weight == Weight::none || (weight == Weight::light && edges.empty())) {
      inputs->not_followed.push_back(index);
    } else if (edges.empty()) {
      // What stood in memory that nobody has written yet is no input that somebody made.
      if (place.before_differs() && (unobserved || !place.fresh())) enter(at.node, index, inputs);
    } else {
      const bool pointer = places_.always(nodes_[at.node].kernel, place.place());
      auto& list = weight == Weight::light || !pointer ? inputs->weak : inputs->edges;
      list.insert(list.end(), edges.begin(), edges.end());
    }
  }

  // How far a buffer that differs before a launch can explain its output.
  enum class Weight : uint8_t {
    none,   // not at all
    light,  // where nothing else does
    full,
  };

  // Scratch explains nothing: the kernel writes it anew in both runs, and elsewhere its output, or all that was written
  // by launches which were handed this buffer, came out equal though it differed before; and nobody is known to have
  // read a result out of it. So does a buffer that the kernel updates in place, where it was itself the last to write
  // it and was seen to overwrite it whatever it held. What a kernel only reads may have been rounded away, or not
  // looked at, when it made no difference elsewhere, and make one now: it explains where nothing else does.
  Weight weigh(const Edge& at, uint32_t index, const std::vector<Edge>& edges) const {
    const DataNode& node = nodes_[at.node];
    if (at.place == kNoPlace || node.form != NodeForm::launch) return Weight::full;
    const PlaceFact &in = node.places[index], &out = node.places[at.place];
    const bool harmless = sensitivity_.count(node.manner, in, out) > 0;
    if (index == at.place) {
      const bool own = std::all_of(edges.begin(), edges.end(), [&](const Edge& edge) {
        return nodes_[edge.node].form == NodeForm::launch && nodes_[edge.node].kernel == node.kernel;
      });
      return !harmless ? Weight::full : own ? Weight::none : Weight::light;
    }
    const Sensitivity::Buffer buffer = sensitivity_.of(false, in.a.buffer.allocation);
    if (!in.modified()) return harmless ? Weight::light : Weight::full;
    if (buffer.matters > 0) return Weight::full;
    return harmless || buffer.scratch > 0 ? Weight::none : Weight::light;
  }

  void enter(uint32_t id, uint32_t index, Inputs* inputs) const {
    if (inputs->entered != kNoPlace) return;
    inputs->entered = index;
    inputs->entry = entry_of(id, index);
  }

  // Where something that nobody is known to have written was seen first: here, or by a launch before that left it as it
  // was.
  Edge entry_of(uint32_t id, uint32_t index) const {
    const PlaceFact& place = nodes_[id].places[index];
    if (place.unobserved()) return {id, index};
    for (const bool in_b : {false, true}) {
      const PlaceSide& side = place.side(in_b);
      const uint32_t seen = side.writer.known() ? nodes_.find(in_b, side.writer) : kNoNode;
      if (seen == kNoNode) continue;
      for (uint32_t k = 0; k < nodes_[seen].places.size(); ++k) {
        const PlaceFact& there = nodes_[seen].places[k];
        const bool same = there.side(in_b).there && overlap(there.side(in_b).buffer, side.buffer);
        if (same && there.before_differs() && (there.unobserved() || !there.side(in_b).writer.known()))
          return {seen, k};
      }
    }
    return {id, index};
  }

  // The launches that left something else in a buffer in the two runs.
  void add_writers(uint32_t reader, const PlaceSide& side, bool in_b, std::vector<Edge>* edges,
                   std::vector<uint32_t>* opaque) const {
    if (!side.there) return;
    std::vector<LaunchRef> writers = side.others;
    if (side.writer.known()) writers.push_back(side.writer);
    for (const LaunchRef& writer : writers) {
      const uint32_t id = nodes_.find(in_b, writer);
      if (id == kNoNode || id == reader) continue;
      const DataNode& node = nodes_[id];
      for (uint32_t k = 0; k < node.places.size(); ++k) {
        const PlaceSide& left = node.places[k].side(in_b);
        if (!left.there || !overlap(left.buffer, side.buffer)) continue;
        if (node.form == NodeForm::gap && !(node.place_rows[k] == std::pair(in_b, writer.row))) continue;
        const Edge edge{id, k};
        if (leaves_difference(node, k, in_b)) {
          add_once(edges, edge);
        } else if (node.places[k].opaque()) {
          if (leads_on(edge))
            add_once(edges, edge);
          else
            add_once(opaque, id);
        }
      }
    }
  }

  static bool leaves_difference(const DataNode& node, uint32_t k, bool in_b) {
    const PlaceFact& place = node.places[k];
    if (node.form == NodeForm::gap) return !place.reads_only && place.side(in_b).changed != Changed::no;
    if (node.form == NodeForm::collective) return place.after_differs();
    return place.differing_output();
  }

  // A launch of whose result no digest was taken is walked through where one of its own inputs is known to differ.
  bool leads_on(const Edge& edge) const {
    const DataNode& node = nodes_[edge.node];
    return std::any_of(node.places.begin(), node.places.end(), [](const PlaceFact& place) {
      return !place.overwritten && !place.opaque() && place.before_differs() && !place.fresh();
    });
  }

  // Of a gap, an input differs where the other run's part of it found the same content nowhere, and its writer left a
  // difference.
  void add_gap_inputs(uint32_t id, Inputs* inputs) const {
    const DataNode& node = nodes_[id];
    for (uint32_t k = 0; k < node.places.size(); ++k) {
      const bool in_b = node.place_rows[k].first;
      const PlaceSide& side = node.places[k].side(in_b);
      if (node.places[k].overwritten) continue;
      const bool found = side.known && std::any_of(node.places.begin(), node.places.end(), [&](const PlaceFact& other) {
                           const PlaceSide& there = other.side(!in_b);
                           return there.there && there.known && there.held == side.held;
                         });
      if (found) continue;
      std::vector<Edge> edges;
      add_writers(id, side, in_b, &edges, &inputs->opaque);
      const Sensitivity::Buffer buffer = sensitivity_.of(in_b, side.buffer.allocation);
      const bool anew = side.changed == Changed::yes && buffer.matters == 0;
      if (anew && buffer.scratch > 0) continue;
      auto& list = anew ? inputs->weak : inputs->edges;
      list.insert(list.end(), edges.begin(), edges.end());
    }
  }

  template <typename Value>
  static void add_once(std::vector<Value>* list, const Value& value) {
    if (std::find(list->begin(), list->end(), value) == list->end()) list->push_back(value);
  }

  const NodeTable& nodes_;
  const Sensitivity& sensitivity_;
  const Places& places_;
  Slice out_;
};

}  // namespace

Slice slice_back(const RankComparison& comparison, uint32_t start) { return Walk(comparison).run(start); }

}  // namespace forkpoint
