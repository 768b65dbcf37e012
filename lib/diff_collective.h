// One step's collectives over all ranks: who brought a difference in, and whom it reached. Internal to diff.
//
// Which calls of several ranks are one collective: where the streams hold the communicator's id, the n-th call of an op
// on it in the step, since all members must issue their calls in one order; by whatever name and from whatever layer they
// are made. Else the calls of equal name, layer, micro-step and number on a communicator of equal name and members.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lib/communicators.h"
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
  // The communicator of a site, as the two streams of a pair name it and the runs join it.
  struct Group {
    std::vector<int> ranks;            // members, ascending
    std::vector<int> unnamed;          // of which no stream says that they are members, but which must be
    bool whole = true;                 // every member is known
    Digest id;                         // run A's; zero: the ranks call it by one name
    const Communicators::Group* joined = nullptr;  // in run A
    int own_place = Communicators::kUnknown;       // of the rank; the lowest where its process has several
  };
  using Named = std::tuple<uint64_t, int32_t, uint32_t>;                  // op, micro-step, call
  using Ordered = std::tuple<uint64_t, uint64_t, std::string>;            // communicator's id, op
  using Instance = std::tuple<uint64_t, int32_t, uint32_t, std::vector<int>>;  // named, member ranks
  using OrderedInstance = std::pair<Ordered, size_t>;
  struct Uses {  // of one rank in this step
    std::map<Named, std::vector<const CollectiveUse*>> named;
    std::map<Ordered, std::vector<const CollectiveUse*>> ordered;  // as they were issued, whatever the layer
    std::map<const CollectiveUse*, size_t> ordinal;
  };
  struct Sent {
    int rank = 0;
    const CollectiveUse::Part* part = nullptr;  // null: that rank's record of it is not known
  };

  const Group& group_of(size_t pair, const Site& site);
  Group make_group(size_t pair, const std::string& communicator) const;
  void add_side(const Run& run, const HashStreamReader& stream, const std::string& communicator, Group* group) const;
  const RankStep* step_of(size_t pair);
  const Uses* uses_of(size_t pair);
  const std::vector<const CollectiveUse*>* calls_of(size_t pair, const Ordered& key);  // nullptr: none
  bool in_step(const Ordered& key, const Group& group);
  const std::vector<Member>& members(size_t pair, const CollectiveUse& use);
  std::vector<Member> find_members(const Group& group, const std::function<const CollectiveUse*(size_t pair)>& find);
  std::vector<int> differing_inputs(size_t pair, const CollectiveUse& use);
  std::vector<int> differing_senders(size_t pair, const Site& site);
  std::optional<Sent> sent_to(size_t pair, const CollectiveUse& use, const Site& received);
  std::vector<const CollectiveUse::Part*> outputs_like(size_t pair, const CollectiveUse& own, const Member& member,
                                                       const Site& output);
  void judge_outputs(const CollectiveUse& own, const std::vector<Member>& all, Origin* origin);
  void judge_receive(const CollectiveUse& own, Origin* origin);
  std::string via_text(const Site& site) const;

  const OriginInput& in_;
  const std::pair<int64_t, int> step_;
  const Analyse analyse_;
  std::map<size_t, const RankStep*> steps_;
  std::map<size_t, std::optional<RankStep>> loaded_;
  std::map<int, size_t> pair_of_rank_;
  std::map<std::pair<size_t, std::string>, Group> groups_;  // by pair and communicator
  std::map<Instance, std::vector<Member>> instances_;
  std::map<OrderedInstance, std::vector<Member>> ordered_instances_;
  std::map<Ordered, bool> in_step_;
  std::map<size_t, Uses> uses_;  // by pair
};

// What must hold of a collective's outputs, by its name: "all_reduce", "ncclAllReduce", "reduce_scatter_tensor", ...
bool is_reduction(const std::string& op);
bool leaves_replicas(const std::string& op);  // every member holds the same afterwards
inline bool is_all_reduce(const std::string& op) { return is_reduction(op) && leaves_replicas(op); }

}  // namespace forkpoint
