// Compares the launches of one rank in two runs, step after step, and keeps what is not equal. Internal to diff.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lib/align.h"
#include "lib/launch_align.h"
#include "lib/launch_counterparts.h"
#include "lib/launch_nodes.h"

namespace forkpoint {

// A buffer of both runs that holds something else in each.
struct LiveDifference {
  uint64_t allocation_a = 0, allocation_b = 0;
  BufferStates::Part a, b;
};
// It differed at the first sight of it, and no launch is known to have written it.
inline bool is_found(const LiveDifference& difference) { return difference.a.found && difference.b.found; }

class RankComparison {
 public:
  RankComparison(const LaunchJoin& join, const RankPair& pair);

  // Steps in the order of time; those that are left out are equal, and nothing live differs. Throws Error when one of
  // the two cannot be read; nothing is known about any buffer then.
  void compare(size_t pair_step);

  const NodeTable& nodes() const { return nodes_; }
  const Sensitivity& sensitivity() const { return sensitivity_; }
  const Places& places() const { return places_; }
  // Launches that differ and leave the device, of all steps compared so far, in the order of run A.
  const std::vector<uint32_t>& sinks() const { return sinks_; }
  // The node of a record that differs; kNoNode: its bytes did not lie on a device, or it does not differ.
  uint32_t record_node(size_t pair_step, uint32_t record_a) const;
  const std::map<uint64_t, LiveDifference>& live() const { return live_; }
  const Counterparts& counterparts() const { return counterparts_; }

  struct Noise {
    uint64_t buffers = 0;                     // differing results, over all launches
    std::map<std::string, uint64_t> kernels;  // of launches whose inputs agree
  };
  const Noise& noise() const { return noise_; }

 private:
  struct Side {
    bool in_b;
    LaunchStep step;
    StateHistory history;
    BufferStates states;
    std::vector<Access> accesses;
    std::vector<uint32_t> first_access;  // by row; one more at the end
    size_t step_index = 0;
    Side(const LaunchJoin& join, bool in_b)
        : in_b(in_b), history(join, in_b), states([this](uint64_t allocation) { return history.find(allocation); }) {}
    Side(const Side&) = delete;
    const Access* begin(size_t row) const { return accesses.data() + first_access[row]; }
    const Access* end(size_t row) const { return accesses.data() + first_access[row + 1]; }
  };

  void trace(Side* side, size_t step_index, bool carries_on);
  bool is_plainly_equal(uint32_t i, uint32_t j);
  bool apart(const LaunchRef& writer_a, const LaunchRef& writer_b) const;
  void vote(uint32_t i, uint32_t j);
  void settle_mismatches(uint32_t kernel, std::vector<PlaceFact>* places) const;
  void compare_pair(size_t pair_step, uint32_t i, uint32_t j);
  void add_to_gap(size_t pair_step, bool in_b, uint32_t row);
  uint64_t order_of(bool in_b, uint32_t row) const;
  std::vector<PlaceFact> places_of(uint32_t i, uint32_t j) const;
  PlaceSide side_of(const Side& side, const Access& access) const;
  void learn(const DataNode& node);
  void note_noise(const DataNode& node);
  void join_collectives(size_t first_node);
  void join_gap_results();
  void update_live();

  const LaunchJoin& join_;
  const RankPair& pair_;
  Side a_, b_;
  LaunchPairs pairs_;
  NodeTable nodes_;
  std::vector<uint32_t> sinks_, gap_nodes_;
  std::map<std::pair<size_t, uint32_t>, uint32_t> record_nodes_;  // by step and record of run A
  Sensitivity sensitivity_;
  Places places_;
  Noise noise_;
  Counterparts counterparts_;
  std::map<uint64_t, LiveDifference> live_;
  size_t last_ = kNoStep;  // compared before
  uint64_t compared_ = 0;
};

// What one launch found and left in its buffers in both runs, place by place.
std::vector<PlaceFact> join_places(const std::vector<PlaceSide>& a, const std::vector<PlaceSide>& b);

}  // namespace forkpoint
