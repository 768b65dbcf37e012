// Holds the ranks of a run that is being recorded against each other, each step once it is whole on all of them.
// Internal to Watch.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lib/hash_stream_tail.h"
#include "lib/replica_judge.h"

namespace forkpoint {

struct ReplicaDesync {
  Divergence at;
  std::vector<int> outliers;  // ascending; all that were compared where there is no majority
  std::vector<int> compared;
  std::string why;  // how it is known that they must be equal
};

// Keeps the prologue, the last step that was compared (what was equal in it is known to be replicated) and those that
// are not there on every rank yet. By the rules of diff_replicas, but for one: it cannot know what a later step shows,
// so what is judged `unknown` stays so and is only counted.
class ReplicaWatch {
 public:
  // tails: of all ranks that are there, by ascending rank. run: of these. Gives up steps that are done with.
  std::vector<ReplicaDesync> compare(const Run& run, const std::vector<StreamTail*>& tails);

  bool any_compared() const { return any_compared_; }  // was there anything that must be equal?
  uint64_t steps_compared() const { return steps_; }
  uint64_t steps_left_out() const { return left_out_; }      // not on every rank in time
  std::optional<int64_t> newest() const { return newest_; }  // step that was compared
  const std::set<std::string>& unknown() const { return unknown_; }

 private:
  bool is_old(const RunStep& step) const;
  void refresh(const Run& run, const std::vector<StreamTail*>& tails);
  std::vector<ReplicaDesync> judge_new(const Run& run);
  void keep_reference(const std::vector<RunStep>& steps, std::vector<uint8_t>* keep);
  void leave_out(const std::vector<RunStep>& steps, std::vector<uint8_t>* keep);
  void give_up(const std::vector<RunStep>& steps, const std::vector<uint8_t>& keep,
               const std::vector<StreamTail*>& tails);

  std::optional<ReplicaGroups> groups_;
  ReplicaSites sites_;
  size_t dictionary_ = 0, streams_ = 0;
  bool has_prologue_ = false;
  std::optional<std::pair<int64_t, int>> reference_;  // step, occurrence
  std::optional<int64_t> newest_;
  bool any_compared_ = false;
  uint64_t steps_ = 0, left_out_ = 0;
  std::set<std::string> unknown_;
};

}  // namespace forkpoint
