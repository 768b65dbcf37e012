// One step's collectives over all ranks: who brought a difference in, and whom it reached. Internal to diff.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lib/diff_origin.h"

namespace forkpoint {

class CollectiveView {
 public:
  using Analyse = std::function<RankStep(size_t pair, size_t step_index)>;
  CollectiveView(const OriginInput& input, std::pair<int64_t, int> step, Analyse analyse);

  // REQUIRES: step outlives the view. Ranks with differences are added; the others are analysed when they are asked
  // about.
  void add(size_t pair, const RankStep* step) { steps_[pair] = step; }

  struct Reached {
    std::string via;
    std::vector<int> sources;  // members whose input differs
  };
  // The collective through which a rank's first difference came, if it came through one.
  std::optional<Reached> reached_through(size_t pair, const RankStep& step, const Difference& first);
  // Fills the collective fields of an origin that was not reached through a collective.
  void judge(Origin* origin);

 private:
  struct Member {
    int rank = 0;
    size_t pair = 0;
    const CollectiveUse* use = nullptr;  // null: it is not known to have taken part in this step
  };
  using Instance = std::tuple<uint64_t, int32_t, uint32_t, std::vector<int>>;  // op, micro-step, call, member ranks
  const std::vector<int>& members_of(size_t pair, const Site& site);
  const std::vector<Member>& members(size_t pair, const CollectiveUse& use);
  const RankStep* step_of(size_t pair);
  std::vector<int> differing_inputs(size_t pair, const CollectiveUse& use);
  std::vector<int> differing_senders(size_t pair, const Site& site);
  std::string via_text(const Site& site) const;

  const OriginInput& in_;
  const std::pair<int64_t, int> step_;
  const Analyse analyse_;
  std::map<size_t, const RankStep*> steps_;
  std::map<size_t, std::optional<RankStep>> loaded_;
  std::map<int, size_t> pair_of_rank_;
  std::map<std::pair<size_t, std::string>, std::vector<int>> members_of_;  // by pair and communicator
  std::map<Instance, std::vector<Member>> instances_;
  std::map<size_t, std::map<std::tuple<uint64_t, int32_t, uint32_t>, std::vector<const CollectiveUse*>>>
      uses_;  // by pair
};

// What must hold of a collective's outputs, by its name: "all_reduce", "ncclAllReduce", "reduce_scatter_tensor", ...
bool is_reduction(const std::string& op);
bool leaves_replicas(const std::string& op);  // every member holds the same afterwards

}  // namespace forkpoint
