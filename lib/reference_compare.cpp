#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>

#include "lib/reference.h"
#include "lib/run_steps.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// Without which nothing can be held against each other.
constexpr std::array<const char*, 5> kFrame = {"digest", "level", "steps", "step base", "world_size"};
constexpr size_t kMostNamed = 4;

using Place = std::pair<int64_t, int>;  // step, rank

std::string value_of(const ReferenceFields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second;
}

uint64_t records_in(const std::string& sum) { return std::strtoull(sum.c_str(), nullptr, 10); }

std::string place_of_tensor(const ReferenceTensor& tensor) {
  return place_text("", tensor.layer, tensor.call, tensor.tensor);
}

std::string who(const std::set<int>& ranks, int world) {
  if (static_cast<int>(ranks.size()) == world) return world == 1 ? "" : ", all ranks";
  return ", " + rank_list({ranks.begin(), ranks.end()});
}

std::string named(const std::vector<std::string>& names) {
  std::vector<std::string> some(names.begin(), names.begin() + static_cast<long>(std::min(names.size(), kMostNamed)));
  return fmt::format("{}{}", fmt::join(some, ", "), some.size() < names.size() ? ", ..." : "");
}

// The same tensors of both sides, and those that one has alone.
struct TensorPair {
  const ReferenceTensor* a = nullptr;
  const ReferenceTensor* b = nullptr;
  bool differs() const { return a && b && a->form == b->form && a->digest != b->digest; }
  bool other() const { return !a || !b || a->form != b->form; }
};
using TensorKey = std::tuple<std::string, std::string, std::string, std::string, int>;
std::map<TensorKey, TensorPair> pair_tensors(const std::vector<ReferenceTensor>& a,
                                             const std::vector<ReferenceTensor>& b) {
  std::map<TensorKey, TensorPair> pairs;
  const auto key = [](const ReferenceTensor& t) { return TensorKey(t.group, t.layer, t.tensor, t.call, t.rank); };
  for (const ReferenceTensor& tensor : a) pairs[key(tensor)].a = &tensor;
  for (const ReferenceTensor& tensor : b) pairs[key(tensor)].b = &tensor;
  return pairs;
}

const std::string& key_group(const TensorKey& key) { return std::get<0>(key); }

// One step of one rank that is not as in the reference.
struct Differing {
  std::set<size_t> groups;     // indices into kReferenceGroups
  bool other_records = false;  // what was recorded is not the same: that says nothing about values
};

class Comparison {
 public:
  Comparison(const Reference& reference, const MeasuredRun& run, const std::string& trouble)
      : reference_(reference), run_(run), trouble_(trouble), world_(reference.world_size()) {}

  ReferenceComparison compare() {
    out_.dependencies = differing_dependencies(reference_, run_.reference, "here");
    Verdict& verdict = out_.verdict;
    fill_coverage();
    verdict.gaps = run_.lost;
    for (const char* name : kFrame) {
      if (reference_.depends_on.at(name) == value_of(run_.reference.depends_on, name)) continue;
      frame_ = fmt::format("the reference is of another {}: {}, here {}", name, reference_.depends_on.at(name),
                           value_of(run_.reference.depends_on, name));
      verdict.reason = frame_;
      list_groups();
      return std::move(out_);
    }
    compare_steps();
    compare_tensors();
    if (resting_one_sided_ > 0) {
      verdict.notes.push_back(fmt::format("{} of what no step trains {} on one side only: not compared",
                                          counted(resting_one_sided_, "tensor"),
                                          resting_one_sided_ == 1 ? "is" : "are"));
    }
    decide();
    list_groups();
    return std::move(out_);
  }

 private:
  void fill_coverage() {
    Coverage& coverage = out_.verdict.coverage;
    coverage.records_compared = run_.records;
    coverage.steps_compared = static_cast<uint64_t>(reference_.last_step - reference_.first_step + 1);
    coverage.ranks_compared = world_;
    coverage.level = value_of(reference_.depends_on, "level");
    coverage.frames_verified = run_.frames_verified;
    coverage.limits = run_.reference.not_seen;
    if (run_.has_final_part)
      coverage.limits.push_back("what the job left behind its last step: references end with that");
  }

  void compare_steps() {
    std::set<Place> places;
    for (const auto& [place, fields] : reference_.steps) places.insert(place);
    for (const auto& [place, fields] : run_.reference.steps) places.insert(place);
    for (const Place& place : places) {
      const auto a = reference_.steps.find(place), b = run_.reference.steps.find(place);
      const bool only_a = b == run_.reference.steps.end();
      // What was lost is no difference.
      if (only_a && !run_.lost.empty()) continue;
      if (a == reference_.steps.end() || only_a) {
        differing_[place].other_records = true;
        continue;
      }
      compare_place(place, a->second, b->second);
    }
  }

  void compare_place(const Place& place, const ReferenceFields& a, const ReferenceFields& b) {
    Differing found;
    for (size_t i = 0; i < std::size(kReferenceGroups); ++i) {
      if (value_of(a, kReferenceGroups[i]) != value_of(b, kReferenceGroups[i])) found.groups.insert(i);
    }
    found.other_records = value_of(a, kReferenceForm) != value_of(b, kReferenceForm);
    // The sum over all is the rule; groups only say where.
    if (value_of(a, kReferenceAll) == value_of(b, kReferenceAll) && !found.other_records && found.groups.empty())
      return;
    differing_.emplace(place, std::move(found));
  }

  void compare_tensors() {
    std::map<std::pair<std::string, std::string>, std::pair<std::set<int>, const char*>> said;
    for (const auto& [key, pair] : pair_tensors(reference_.tensors, run_.reference.tensors)) {
      if (!pair.b && !run_.reference.steps.contains({reference_.last_step, pair.a->rank})) continue;  // lost
      const bool rests = key_group(key) == kRestingGroup;
      if (rests && (!pair.a || !pair.b)) {
        ++resting_one_sided_;
        continue;
      }
      resting_ += rests;
      if (rests && (pair.differs() || pair.other())) {
        differing_[{reference_.last_step, pair.a->rank}].groups.insert(std::size(kReferenceGroups) - 1);
      }
      ++out_.tensors_compared;
      if (!pair.differs() && !pair.other()) continue;
      const ReferenceTensor& tensor = pair.a ? *pair.a : *pair.b;
      values_differ_ |= pair.differs();
      const char* how = pair.differs() ? ""
                        : !pair.b      ? " (in the reference only)"
                        : !pair.a      ? " (here only)"
                                       : " (of another form)";
      auto& [ranks, text] = said[{tensor.group + ": " + place_of_tensor(tensor), how}];
      ranks.insert(tensor.rank), text = how;
    }
    for (const auto& [what, by] : said) out_.tensors.push_back(what.first + what.second + who(by.first, world_));
    // What people look for first.
    std::stable_partition(out_.tensors.begin(), out_.tensors.end(),
                          [](const std::string& text) { return text.starts_with("parameters"); });
  }

  // The earliest step in which values differ that are of the same records.
  std::optional<int64_t> first_step(bool other_records) const {
    for (const auto& [place, found] : differing_) {
      if (found.other_records == other_records) return place.first;
    }
    return std::nullopt;
  }

  void decide() {
    Verdict& verdict = out_.verdict;
    const auto values = first_step(false), others = first_step(true);
    if (values || values_differ_) return decide_diverged(values);
    if (others) {
      verdict.reason = fmt::format("{} holds other records than the reference's, so that its values cannot be compared",
                                   step_text(*others));
    } else if (!trouble_.empty()) {
      verdict.reason = trouble_;
    } else if (!run_.lost.empty()) {
      verdict.reason = run_.lost.front();
    } else if (reference_.not_seen != run_.reference.not_seen) {
      verdict.reason = "what is declared as not seen is not what it was for the reference";
    } else {
      verdict.outcome = Outcome::identical;
      verdict.reason = "every digest is that of the reference";
      if (!out_.dependencies.empty()) verdict.until = fmt::format("although {}", named(out_.dependencies));
      return;
    }
    if (others && !out_.dependencies.empty()) verdict.reason += fmt::format("; and {}", named(out_.dependencies));
  }

  void decide_diverged(std::optional<int64_t> step) {
    Verdict& verdict = out_.verdict;
    for (const auto& [place, found] : differing_) verdict.ranks_diverged.push_back(place.second);
    std::sort(verdict.ranks_diverged.begin(), verdict.ranks_diverged.end());
    auto& ranks = verdict.ranks_diverged;
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    name_first(step.value_or(reference_.last_step));
    const std::string where = at_text(*verdict.first);
    if (out_.dependencies.empty()) {
      verdict.outcome = Outcome::diverged;
      verdict.reason = "the first difference from the reference is " + where;
    } else {
      verdict.reason = fmt::format("it differs from the reference {}, but {}", where, named(out_.dependencies));
    }
    if (!trouble_.empty()) verdict.notes.push_back(trouble_);
    if (const auto others = first_step(true); others && *others <= step.value_or(reference_.last_step)) {
      verdict.notes.push_back(
          fmt::format("from {} on other records were made than for the reference: an earlier difference may lie there",
                      step_text(*others)));
    }
  }

  // The earliest group of each rank; where a rank's own values differ, what only came in by a collective follows.
  void name_first(int64_t step) {
    constexpr size_t kCollectives = 4;
    std::map<size_t, std::set<int>> firsts;
    for (int rank = 0; rank < world_; ++rank) {
      const auto found = differing_.find({step, rank});
      if (found == differing_.end() || found->second.other_records) continue;
      firsts[found->second.groups.empty() ? std::size(kReferenceGroups) : *found->second.groups.begin()].insert(rank);
    }
    const bool local = !firsts.empty() && firsts.begin()->first < kCollectives;
    for (const auto& [group, ranks] : firsts) {
      if (local ? group >= kCollectives : group != firsts.begin()->first) continue;
      if (static_cast<int>(ranks.size()) == world_ && world_ > 1) {
        add_first(step, -1, group);
        continue;
      }
      for (const int rank : ranks) add_first(step, rank, group);
    }
    if (!out_.verdict.first) add_first(step, -1, std::size(kReferenceGroups));
    name_cause(step);
  }

  void add_first(int64_t step, int rank, size_t group) {
    Divergence at;
    at.step = step == kPrologueStep ? reference_.first_step : step;
    at.in_prologue = step == kPrologueStep;
    at.rank = rank;
    at.tensor = group < std::size(kReferenceGroups) ? kReferenceGroups[group] : "records";
    name_tensor(step, rank, &at);
    if (at.tensor == "loss" && rank >= 0) {
      at.before = value_of(reference_.steps.at({step, rank}), kReferenceLossValue);
      at.after = value_of(run_.reference.steps.at({step, rank}), kReferenceLossValue);
    }
    Verdict& verdict = out_.verdict;
    if (!verdict.first)
      verdict.first = at;
    else
      verdict.also_first.push_back(at);
  }

  // In the last step the reference knows each tensor.
  void name_tensor(int64_t step, int rank, Divergence* at) const {
    if (step != reference_.last_step) return;
    for (const auto& [key, pair] : pair_tensors(reference_.tensors, run_.reference.tensors)) {
      if (!pair.differs()) continue;
      const bool here = (at->tensor == pair.a->group || at->tensor == "records") && (rank < 0 || pair.a->rank == rank);
      if (!here) continue;
      at->phase = Phase::optimizer;
      at->layer = pair.a->layer, at->tensor = pair.a->tensor;
      at->before = pair.a->digest, at->after = pair.b->digest;
      return;
    }
  }

  void name_cause(int64_t step) {
    Verdict& verdict = out_.verdict;
    std::map<size_t, std::set<int>> groups;
    for (const auto& [place, found] : differing_) {
      if (place.first != step) continue;
      for (const size_t group : found.groups) groups[group].insert(place.second);
    }
    std::vector<std::string> names;
    for (const auto& [group, ranks] : groups) names.push_back(kReferenceGroups[group] + who(ranks, world_));
    std::vector<std::string>& evidence = verdict.cause.evidence;
    if (!names.empty()) evidence.push_back(fmt::format("{}: {}", step_text(step), fmt::join(names, "; ")));
    add_losses(step, &evidence);
    const auto is = [&](size_t group) { return groups.contains(group); };
    std::vector<std::string>& candidates = verdict.cause.class_candidates;
    if (groups.empty()) return;
    if (step == kPrologueStep)
      candidates = {"initial_state", "state_restore"};
    else if (is(0) || is(1)) {
      if (is(0)) candidates.push_back("data_order");
      if (is(1)) candidates.push_back("rng_state");
    } else if (groups.begin()->first == 5) {
      candidates = {"hyperparameter"};
    }
    if (candidates.size() == 1) verdict.cause.cls = candidates.front();
  }

  void add_losses(int64_t step, std::vector<std::string>* evidence) const {
    for (int rank = 0; rank < world_; ++rank) {
      const auto a = reference_.steps.find({step, rank}), b = run_.reference.steps.find({step, rank});
      if (a == reference_.steps.end() || b == run_.reference.steps.end()) continue;
      const std::string before = value_of(a->second, kReferenceLossValue),
                        after = value_of(b->second, kReferenceLossValue);
      if (before == after) continue;
      evidence->push_back(
          fmt::format("loss of {}, rank {}: {} in the reference, {} here", step_text(step), rank, before, after));
      return;
    }
  }

  void list_groups() {
    const bool seen = frame_.empty() && trouble_.empty() && run_.lost.empty();
    for (size_t i = 0; i < std::size(kReferenceGroups); ++i) {
      GroupVerdict group{kReferenceGroups[i], GroupState::absent, 0, {}};
      bool any_here = false;
      for (const auto& [place, fields] : reference_.steps) group.records += records_in(value_of(fields, group.group));
      for (const auto& [place, fields] : run_.reference.steps) any_here |= fields.contains(group.group);
      if (group.group == kRestingGroup) group.records = resting_;
      if (group.records > 0 || any_here) group.state = seen ? GroupState::same : GroupState::unknown;
      if (group.state == GroupState::unknown) group.sentence = out_.verdict.reason;
      if (frame_.empty()) place_group(i, &group);
      if (group.group == kRestingGroup && resting_ == 0) continue;  // nobody misses it
      out_.groups.push_back(std::move(group));
    }
    // No group is clean where the whole is not and none of them says why.
    const auto differs = [](const GroupVerdict& group) { return group.state == GroupState::differs; };
    if (out_.verdict.outcome == Outcome::identical || std::any_of(out_.groups.begin(), out_.groups.end(), differs))
      return;
    for (GroupVerdict& group : out_.groups) {
      if (group.state == GroupState::same) group.state = GroupState::unknown, group.sentence = out_.verdict.reason;
    }
  }

  void place_group(size_t index, GroupVerdict* group) const {
    std::optional<int64_t> step;
    std::set<int> ranks;
    bool other = false;
    for (const auto& [place, found] : differing_) {
      const bool here = found.groups.contains(index) ||
                        (found.groups.empty() && found.other_records && group->state != GroupState::absent);
      if (!here || (step && *step != place.first)) continue;
      step = place.first, ranks.insert(place.second), other |= found.other_records;
    }
    if (!step) return;
    group->state = GroupState::differs;
    group->sentence =
        fmt::format("{} from {} on{}", other ? "other records" : "differs", step_text(*step), who(ranks, world_));
  }

  const Reference& reference_;
  const MeasuredRun& run_;
  const std::string& trouble_;
  const int world_;
  std::string frame_;
  std::map<Place, Differing> differing_;
  bool values_differ_ = false;
  uint64_t resting_ = 0, resting_one_sided_ = 0;  // of kRestingGroup: on both sides, on one
  ReferenceComparison out_;
};

}  // namespace

std::vector<std::string> differing_dependencies(const Reference& reference, const Reference& other,
                                                const std::string& here) {
  std::set<std::string> names;
  for (const auto& [name, value] : reference.depends_on) names.insert(name);
  for (const auto& [name, value] : other.depends_on) names.insert(name);
  std::vector<std::string> out;
  for (const std::string& name : names) {
    const auto a = reference.depends_on.find(name), b = other.depends_on.find(name);
    const std::string before = a == reference.depends_on.end() ? "(not set)" : a->second;
    const std::string after = b == other.depends_on.end() ? "(not set)" : b->second;
    if (before != after) out.push_back(fmt::format("{} is {} in the reference, {} {}", name, before, after, here));
  }
  return out;
}

ReferenceComparison compare_reference(const Reference& reference, const MeasuredRun& run, const std::string& trouble) {
  return Comparison(reference, run, trouble).compare();
}

std::vector<std::string> changes_of_reference(const Reference& before, const Reference& after) {
  std::vector<std::string> out = differing_dependencies(before, after, "now");
  std::set<int64_t> steps, differing;
  std::set<std::string> groups;
  for (const auto& [place, fields] : before.steps) {
    const auto found = after.steps.find(place);
    steps.insert(place.first);
    if (found == after.steps.end() || found->second != fields) differing.insert(place.first);
    for (const char* group : kReferenceGroups) {
      if (found == after.steps.end() || value_of(fields, group) != value_of(found->second, group)) groups.insert(group);
    }
  }
  for (const auto& [place, fields] : after.steps) {
    if (!before.steps.contains(place)) differing.insert(place.first), steps.insert(place.first);
  }
  if (!differing.empty()) {
    out.push_back(fmt::format("{} of {} differ, from {} on: {}", differing.size(), counted(steps.size(), "step"),
                              step_text(*differing.begin()), fmt::join(groups, ", ")));
  }
  std::map<std::string, std::set<std::string>> tensors;
  std::map<std::string, std::set<std::string>> all;
  for (const auto& [key, pair] : pair_tensors(before.tensors, after.tensors)) {
    const ReferenceTensor& tensor = pair.a ? *pair.a : *pair.b;
    const char* how = !pair.a ? " (new)" : !pair.b ? " (gone)" : "";
    all[tensor.group].insert(place_of_tensor(tensor));
    if (pair.differs() || pair.other()) tensors[tensor.group].insert(place_of_tensor(tensor) + how);
  }
  for (const auto& [group, names] : tensors) {
    out.push_back(fmt::format("{} of {} tensors of {} differ: {}", names.size(), all[group].size(), group,
                              named({names.begin(), names.end()})));
  }
  if (before.not_seen != after.not_seen) out.push_back("what is declared as not seen");
  return out;
}

}  // namespace forkpoint
