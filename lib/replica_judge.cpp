#include "lib/replica_judge.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/align.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

std::vector<int> ranks_of(const std::vector<ReplicaPiece>& pieces) {
  std::vector<int> ranks;
  for (const ReplicaPiece& piece : pieces) ranks.push_back(piece.rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

class Judge {
 public:
  Judge(const Disagreement& found, const ReplicaScan& scan, const ReplicaGroups& groups, const ReplicaSites& sites)
      : found_(found),
        scan_(scan),
        groups_(groups),
        sites_(sites),
        entry_(sites.entries[found.entry]),
        site_(*entry_.site),
        ranks_(ranks_of(found.pieces)) {}

  Judgement judge() const {
    const std::string what = fmt::format("{} of {}", place_text(site_), rank_list(ranks_));
    if (found_.how == Compared::collective)
      return {Judged::desync, "every member of a collective of this kind holds the same after it"};
    if (found_.how == Compared::box) return {Judged::desync, "these ranks hold the same box of the tensor"};
    if (found_.forms_differ)
      return {Judged::unknown,
              fmt::format("{}: their shapes or dtypes differ, so they are not known to be replicas", what)};
    const bool reduced = groups_.reduced_over(site_.layer, parameter_of(site_), ranks_);
    if (reduced) return {Judged::desync, "the gradient of this tensor is reduced over these ranks"};
    if (sites_.masked && !equal_before()) {
      return {Judged::unknown,
              fmt::format("{}: names are masked, so it is not known whether it is an expert's or a sharded optimizer's own "
                          "part, and it was never alike on these ranks",
                          what)};
    }
    if (names_expert(site_)) {
      return {Judged::unknown,
              fmt::format("{}: experts may differ between expert-parallel ranks, and no \"ep_rank\" or collective "
                          "says which ranks share them",
                          what)};
    }
    if (looks_cut()) {
      return {Judged::not_meant,
              fmt::format("{} is alike on no two ranks although its parameter is: taken for a sharded "
                          "optimizer's own part, and not compared",
                          what)};
    }
    return found_.how == Compared::group ? judge_group()
           : groups_.known()             ? judge_across()
                                         : judge_unknown_places(what);
  }

 private:
  size_t group_slot(uint32_t name) const { return name * scan_.groups + static_cast<size_t>(found_.place); }
  size_t stage_slot(uint32_t name) const { return name * scan_.stages + static_cast<size_t>(found_.place); }

  bool equal_before() const {
    const auto& equal = found_.how == Compared::group ? scan_.equal_in_group : scan_.equal_in_stage;
    const auto before = [&](uint32_t name) {
      return equal[found_.how == Compared::group ? group_slot(name) : stage_slot(name)] < found_.step;
    };
    return before(entry_.name) || before(entry_.parameter);
  }
  bool loaded_equal() const {
    if (found_.how == Compared::group) return false;
    return scan_.equal_when_loaded[stage_slot(entry_.name)] != 0 ||
           scan_.equal_when_loaded[stage_slot(entry_.parameter)] != 0;
  }

  // Optimizer state and gradients of which each rank keeps its own part, under one name and without a box.
  bool looks_cut() const {
    if (site_.role != Role::optimizer_state && site_.role != Role::gradient) return false;
    const auto& equal = found_.how == Compared::group ? scan_.equal_in_group : scan_.equal_in_stage;
    const auto slot = [&](uint32_t name) {
      return found_.how == Compared::group ? group_slot(name) : stage_slot(name);
    };
    if (equal[slot(entry_.name)] < found_.step || entry_.parameter == entry_.name) return false;
    bool majority = false;
    outliers_of(found_.pieces, &majority);
    if (majority) return false;
    // The parameter of the same step, recorded after the update: does it disagree too?
    const bool recorded = equal[slot(entry_.parameter)] != kNoStep;
    return recorded &&
           std::none_of(scan_.disagreements.begin(), scan_.disagreements.end(), [&](const Disagreement& other) {
             const ReplicaSites::Entry& entry = sites_.entries[other.entry];
             return entry.name == entry_.parameter && other.place == found_.place && other.step <= found_.step + 1;
           });
  }

  Judgement judge_group() const {
    if (scan_.group_agrees[static_cast<size_t>(found_.place)] == 0) {
      return {
          Judged::unknown,
          fmt::format("nothing that {} hold was ever alike, so they are not shown to be replicas although {} says so "
                      "(is what they hold cut without its place being recorded?)",
                      rank_list(ranks_), groups_.source())};
    }
    return {Judged::desync, fmt::format("{} are replicas by {}", rank_list(ranks_), groups_.source())};
  }

  // Ranks that differ in a coordinate along which tensors are cut: those that are not cut are on all of them.
  Judgement judge_across() const {
    const std::string base = fmt::format("{} {}", place_text(site_), "is not cut");
    if (equal_before()) return {Judged::desync, "it was the same on these ranks before"};
    if (loaded_equal() && names_norm(site_)) return {Judged::desync, "it was loaded the same on these ranks"};
    if (groups_.has_shards())
      return {Judged::desync, "other tensors are recorded as cut over these ranks, and this one is whole"};
    if (names_norm(site_)) return {Judged::desync, "a norm's parameters are replicated over tensor-parallel ranks"};
    return {Judged::not_meant,
            fmt::format("{} differs between {} and was never alike there: taken for cut, and compared only within "
                        "the ranks that share all coordinates but the data-parallel one",
                        place_text(site_), rank_list(ranks_))};
  }

  Judgement judge_unknown_places(const std::string& what) const {
    if (equal_before()) return {Judged::desync, "it was the same on these ranks before"};
    if (loaded_equal() && groups_.plain()) return {Judged::desync, "it was loaded the same on these ranks"};
    bool majority = false;
    const size_t outliers = outliers_of(found_.pieces, &majority).size();
    if (majority && outliers * 2 < found_.pieces.size()) return {Judged::desync, "most of the ranks hold the same"};
    const uint32_t equal = scan_.names_equal[found_.step], seen = scan_.names_seen[found_.step];
    if (groups_.plain() && equal > 0 && equal * 10 >= seen * 9) {
      return {Judged::desync, fmt::format("{} of {} tensors of this step are the same on all ranks", equal, seen)};
    }
    return {Judged::unknown,
            fmt::format(
                "{}: it was never alike on any of them, and no \"dp_rank\", communicator or shard says whether they "
                "are replicas (tensor, pipeline and expert parallel ranks hold other values under the same "
                "names): forkpoint_fact(\"dp_rank\", ...) tells",
                what)};
  }

  const Disagreement& found_;
  const ReplicaScan& scan_;
  const ReplicaGroups& groups_;
  const ReplicaSites& sites_;
  const ReplicaSites::Entry& entry_;
  const Site& site_;
  const std::vector<int> ranks_;
};

}  // namespace

Judgement judge(const Disagreement& found, const ReplicaScan& scan, const ReplicaGroups& groups,
                const ReplicaSites& sites) {
  return Judge(found, scan, groups, sites).judge();
}

}  // namespace forkpoint
