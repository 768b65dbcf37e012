// Why replicas came apart: from what else was recorded in the step in which they did.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "lib/cause_facts.h"
#include "lib/diff_collective.h"
#include "lib/diff_match.h"
#include "lib/diff_step.h"
#include "lib/error.h"
#include "lib/pointing.h"
#include "lib/replica_judge.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// What one record is called within a step of any rank.
using Place = std::tuple<uint64_t, uint64_t, int32_t, uint32_t>;

class Evidence {
 public:
  Evidence(const Run& run, const Disagreement& found, const ReplicaScan& scan, const ReplicaSites& sites)
      : run_(run),
        found_(found),
        scan_(scan),
        sites_(sites),
        site_(*sites.entries[found.entry].site),
        outliers_(outliers_of(found.pieces, &majority_)),
        columns_(found.pieces.size()) {
    const RunStep& step = scan.steps[found.step];
    for (size_t i = 0; i < found.pieces.size(); ++i) readable_ &= read(step, found.pieces[i].stream, &columns_[i]);
  }

  bool majority() const { return majority_; }
  const std::vector<int>& outliers() const { return outliers_; }
  const Site& site() const { return site_; }

  // Ranks whose output of the collective is what they brought in.
  std::vector<int> keep_own_input() const {
    std::vector<int> ranks;
    for (size_t i = 0; i < found_.pieces.size() && readable_; ++i) {
      const ReplicaPiece& piece = found_.pieces[i];
      for (uint32_t row = 0; row < columns_[i].size(); ++row) {
        const Site& other = site_of(i, row);
        const bool own = other.role == Role::input && columns_[i].micro_step[row] == piece.micro_step &&
                         columns_[i].call[row] == piece.call && op_key(other) == op_key(site_);
        if (own && columns_[i].digest[row] == piece.digest && !(piece.digest == Digest{})) ranks.push_back(piece.rank);
      }
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  // Of the records that `wanted` picks: found on all ranks and alike, found and not alike, or not found.
  struct Alike {
    bool recorded = false;
    std::vector<std::string> differ;
  };
  template <typename Wanted>
  Alike alike(Wanted&& wanted) const {
    Alike out;
    std::map<Place, std::vector<std::pair<Digest, std::string>>> records;
    for (size_t i = 0; i < found_.pieces.size() && readable_; ++i) {
      for (uint32_t row = 0; row < columns_[i].size(); ++row) {
        const Site& other = site_of(i, row);
        if ((columns_[i].flags[row] & kClassFlags) != 0 || !wanted(other)) continue;
        const Digest& key = site_key_of(i, row);
        records[{key.a, key.b, columns_[i].micro_step[row], columns_[i].call[row]}].emplace_back(
            columns_[i].digest[row], other.tensor);
      }
    }
    std::set<std::string> differ;
    for (const auto& [place, values] : records) {
      if (values.size() != found_.pieces.size()) continue;
      out.recorded = true;
      for (const auto& value : values)
        if (!(value.first == values[0].first)) differ.insert(value.second);
    }
    out.differ.assign(differ.begin(), differ.end());
    return out;
  }

  // As a layer took it in this step's forward: it had come apart before anything of the step updated it.
  bool differed_when_used() const {
    if (site_.role != Role::parameter) return false;
    const auto used = alike([&](const Site& other) {
      return other.phase == Phase::forward && other.role == Role::input && other.kind == Kind::tensor &&
             other.layer == site_.layer && other.tensor == site_.tensor;
    });
    return !used.differ.empty();
  }

  // It was recorded in the step before, on one of these ranks: they were alike there, else it would be the first.
  bool step_before_known() const {
    const auto before = std::find_if(scan_.steps.begin(), scan_.steps.end(), [&](const RunStep& step) {
      return step.step != kPrologueStep && step.step + 1 == scan_.steps[found_.step].step;
    });
    if (before == scan_.steps.end()) return false;
    const size_t stream = found_.pieces[0].stream;
    StepColumns columns;
    if (!read(*before, stream, &columns)) return false;
    const auto& entries = sites_.of_stream[stream];
    return std::any_of(columns.site.begin(), columns.site.end(),
                       [&](uint32_t site) { return entries[site] == found_.entry; });
  }

  // Outliers that still hold what they held at the end of the step before.
  std::vector<int> stale() const {
    std::vector<int> ranks;
    const auto before = std::find_if(scan_.steps.rbegin(), scan_.steps.rend(), [&](const RunStep& step) {
      return &step < &scan_.steps[found_.step] && step.step != kPrologueStep;
    });
    if (before == scan_.steps.rend() || before->step + 1 != scan_.steps[found_.step].step) return ranks;
    StepColumns columns;
    for (const ReplicaPiece& piece : found_.pieces) {
      if (!std::binary_search(outliers_.begin(), outliers_.end(), piece.rank) || !read(*before, piece.stream, &columns))
        continue;
      for (uint32_t row = 0; row < columns.size(); ++row) {
        const bool same = sites_.of_stream[piece.stream][columns.site[row]] == found_.entry && (columns.flags[row] & kClassFlags) == 0;
        if (same && columns.digest[row] == piece.digest && !(piece.digest == Digest{})) ranks.push_back(piece.rank);
      }
    }
    return ranks;
  }

 private:
  const Site& site_of(size_t i, uint32_t row) const {
    return run_.streams()[found_.pieces[i].stream]->sites()[columns_[i].site[row]];
  }
  const Digest& site_key_of(size_t i, uint32_t row) const {
    return run_.streams()[found_.pieces[i].stream]->site_keys()[columns_[i].site[row]];
  }
  bool read(const RunStep& step, size_t stream, StepColumns* columns) const {
    const auto at = std::find(step.streams.begin(), step.streams.end(), stream);
    if (at == step.streams.end()) return false;
    try {
      run_.streams()[stream]->read_step(step.indices[static_cast<size_t>(at - step.streams.begin())], columns);
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  const Run& run_;
  const Disagreement& found_;
  const ReplicaScan& scan_;
  const ReplicaSites& sites_;
  const Site& site_;
  bool majority_ = false, readable_ = true;
  std::vector<int> outliers_;
  std::vector<StepColumns> columns_;
};

// One piece of the majority (or the lowest rank) and one of those that disagree with it.
std::pair<const ReplicaPiece*, const ReplicaPiece*> pair_of(const Disagreement& found) {
  const std::vector<int> outliers = outliers_of(found.pieces);
  const auto is_outlier = [&](const ReplicaPiece& piece) {
    return std::binary_search(outliers.begin(), outliers.end(), piece.rank);
  };
  const ReplicaPiece* first = &found.pieces[0];
  for (const ReplicaPiece& piece : found.pieces) {
    if (!is_outlier(piece)) {
      first = &piece;
      break;
    }
  }
  for (const ReplicaPiece& piece : found.pieces) {
    if (&piece != first && is_outlier(piece) && !(piece.digest == first->digest)) return {first, &piece};
  }
  return {first, &found.pieces.back()};
}

void add_values(const Disagreement& found, Cause* cause) {
  const auto [left, right] = pair_of(found);
  if (left->stats.absmax == 0 && right->stats.absmax == 0 && left->stats.nonfinite == 0 &&
      right->stats.nonfinite == 0 && !found.forms_differ) {
    cause->evidence.push_back("as numbers they are equal: only signs of zeros differ");
  } else if (left->stats.nonfinite != 0 && left->stats.nonfinite == right->stats.nonfinite &&
             left->stats.absmax == right->stats.absmax) {
    cause->evidence.push_back(
        fmt::format("{} not finite on both: perhaps only the bits of NaNs differ",
                    counted(left->stats.nonfinite, "element") + (left->stats.nonfinite == 1 ? " is" : " are")));
  } else if (left->stats.word_sum == right->stats.word_sum && left->stats.absmax == right->stats.absmax) {
    cause->evidence.push_back("they hold the same words in another order");
  }
}

void decide_collective_output(const Evidence& evidence, bool one_word, Cause* cause) {
  const std::vector<int> own = evidence.keep_own_input();
  cause->cls = "missing_sync";
  if (!own.empty() && is_reduction(evidence.site().op)) {
    cause->evidence.push_back(fmt::format("{} {} own input: the {} did not happen there, or its result was not kept",
                                          rank_list(own), own.size() == 1 ? "still holds its" : "still hold their",
                                          evidence.site().op));
    return;
  }
  cause->class_candidates = {"missing_sync", "stream_race"};
  if (one_word) cause->class_candidates.push_back("hardware_or_sporadic");
}

void decide_loaded(bool resumed, const std::string& step, Cause* cause) {
  cause->cls = resumed ? "state_restore" : "initial_state";
  cause->class_candidates = {cause->cls, "missing_sync"};
  cause->evidence.push_back(fmt::format("they differ {}: {}", step,
                                        resumed ? "another state was loaded, or not sent to all ranks"
                                                : "each rank began with its own, and nothing made them alike"));
}

// An updated parameter or its state, or a buffer.
void decide_state(const Evidence& evidence, bool one_word, Cause* cause) {
  const Site& site = evidence.site();
  if (evidence.differed_when_used()) {
    const bool known = evidence.step_before_known();
    cause->cls = known ? "overwritten_input" : "unknown";
    cause->class_candidates = {"overwritten_input", "missing_sync", "stream_race"};
    if (!known) cause->class_candidates.push_back("nondeterministic_op");  // of an earlier step
    if (one_word) cause->class_candidates.push_back("hardware_or_sporadic");
    cause->evidence.push_back(fmt::format(
        "its layer took other values on these ranks in this step's forward already, {}",
        known ? "and they were the same at the end of the step before: it was written to in between"
              : "so that the update of this step is not what parted them; the step before was not recorded"));
    return;
  }
  const std::string parameter = parameter_of(site);
  const auto gradients = evidence.alike([&](const Site& other) {
    const bool reduced = other.kind == Kind::collective && other.role == Role::output && leaves_replicas(other.op);
    const bool consumed = other.role == Role::gradient && other.phase == Phase::optimizer;
    return (reduced || consumed) && other.layer == site.layer && parameter_of(other) == parameter;
  });
  const auto scalars =
      evidence.alike([](const Site& other) { return is_hyperparameter(other) && other.phase == Phase::optimizer; });
  if (!scalars.differ.empty()) {
    cause->cls = "hyperparameter";
    cause->evidence.push_back(fmt::format("the ranks update with another {}", fmt::join(scalars.differ, ", ")));
    return;
  }
  cause->cls = "missing_sync";
  if (!gradients.recorded) {
    cause->class_candidates = {"missing_sync", "nondeterministic_op", "hyperparameter"};
    cause->evidence.push_back("the reduced gradient that the update took was not recorded");
  } else if (!gradients.differ.empty()) {
    cause->evidence.push_back("the gradient that the update took differs too");
  } else {
    cause->cls = one_word ? "hardware_or_sporadic" : "nondeterministic_op";
    cause->class_candidates = {"nondeterministic_op", "overwritten_input", "hardware_or_sporadic", "missing_sync"};
    cause->evidence.push_back(
        "the gradient that the update took is the same on these ranks, so the update gave another result from it, or "
        "it was written to afterwards");
  }
  const std::vector<int> stale = evidence.stale();
  if (stale.empty()) return;
  cause->cls = "missing_sync", cause->class_candidates = {"missing_sync", "stream_race"};
  cause->evidence.push_back(fmt::format(
      "{} {} the value of the step before: the update, or the gather after it, did not reach {}", rank_list(stale),
      stale.size() == 1 ? "still holds" : "still hold", stale.size() == 1 ? "it" : "them"));
}

void decide_gradient(const Evidence& evidence, Cause* cause) {
  const Site& site = evidence.site();
  const auto reduced = evidence.alike([&](const Site& other) {
    return other.kind == Kind::collective && other.role == Role::output && leaves_replicas(other.op) &&
           other.layer == site.layer && parameter_of(other) == parameter_of(site);
  });
  cause->cls = "missing_sync";
  if (reduced.recorded && reduced.differ.empty()) {
    cause->cls = "overwritten_input",
    cause->class_candidates = {"overwritten_input", "stream_race", "nondeterministic_op"};
    cause->evidence.push_back(
        "its reduction left the same on these ranks: it was written to between there and the optimizer");
  } else if (!reduced.recorded) {
    // Messages of a bucket name no parameter: what they brought is alike, and this gradient may not have been in any.
    const auto messages = evidence.alike([](const Site& other) {
      return other.kind == Kind::collective && other.role == Role::output && leaves_replicas(other.op);
    });
    cause->class_candidates = {"missing_sync", "overwritten_input"};
    if (messages.recorded && messages.differ.empty()) {
      cause->cls = "unknown", cause->class_candidates = {"overwritten_input", "missing_sync", "stream_race"};
      cause->evidence.push_back(
          "the optimizer is given another gradient on each, though every reduction of the step left the same on these "
          "ranks: it "
          "was written to behind them, or was in none of them");
    } else {
      cause->evidence.push_back(
          "the optimizer is given another gradient on each, and no collective of it was recorded");
    }
  }
}

}  // namespace

Divergence replica_divergence(const Run& run, const Disagreement& found, const ReplicaScan& scan,
                              const ReplicaSites& sites) {
  const Site& site = *sites.entries[found.entry].site;
  bool majority = false;
  const std::vector<int> outliers = outliers_of(found.pieces, &majority);
  const auto [left, right] = pair_of(found);
  Divergence at;
  at.in_prologue = scan.steps[found.step].step == kPrologueStep;
  at.step = scan.steps[found.step].step;
  if (at.in_prologue) {
    const auto next = std::find_if(scan.steps.begin(), scan.steps.end(),
                                   [](const RunStep& step) { return step.step != kPrologueStep; });
    at.step = next == scan.steps.end() ? 0 : next->step;
  }
  at.micro_step = std::max(0, left->micro_step);
  at.rank = majority ? outliers[0] : -1;
  at.phase = site.phase, at.layer = site.layer, at.op = site.op, at.tensor = site.tensor, at.kind = site.kind;
  const Layout& layout = run.streams()[left->stream]->layouts()[left->layout];
  const auto text = [&](const ReplicaPiece& piece) {
    if (site.kind == Kind::scalar) return fmt::format("{} (rank {})", scalar_value(piece.digest), piece.rank);
    return fmt::format("{:016x}{:016x} (rank {})", piece.digest.a, piece.digest.b, piece.rank);
  };
  at.before = text(*left), at.after = text(*right);
  const bool tensor = site.kind != Kind::scalar && site.kind != Kind::state && !found.forms_differ;
  if (tensor && word_count(layout) <= kMaxPointingWords / 8) at.pointing = point(left->digest, right->digest, layout);
  return at;
}

Cause replica_cause(const Run& run, const Disagreement& found, const Judgement& judgement, const ReplicaScan& scan,
                    const ReplicaSites& sites) {
  Cause cause;
  cause.cls.clear();
  const Evidence evidence(run, found, scan, sites);
  const Site& site = evidence.site();
  std::vector<int> ranks;
  for (const ReplicaPiece& piece : found.pieces) ranks.push_back(piece.rank);
  std::sort(ranks.begin(), ranks.end());
  cause.evidence.push_back(
      evidence.majority() && evidence.outliers().size() < ranks.size()
          ? fmt::format("{} of {} ranks hold the same, {} {}", ranks.size() - evidence.outliers().size(), ranks.size(),
                        rank_list(evidence.outliers()), evidence.outliers().size() == 1 ? "does not" : "do not")
          : fmt::format("{} each hold another value, none of them that of a majority", rank_list(ranks)));
  cause.evidence.push_back(judgement.why);
  const Divergence at = replica_divergence(run, found, scan, sites);
  const bool one_word = at.pointing.has_value();
  if (site.kind == Kind::collective)
    decide_collective_output(evidence, one_word, &cause);
  else if (at.in_prologue)
    decide_loaded(at.step > 0, when_text(at), &cause);
  else if (site.role == Role::gradient)
    decide_gradient(evidence, &cause);
  else
    decide_state(evidence, one_word, &cause);
  add_values(found, &cause);
  cause.next = fmt::format("forkpoint show --steps {} --layer {} --tensor {} {}", at.step,
                           shell_words({site.layer.empty() ? std::string("*") : site.layer}),
                           shell_words({parameter_of(site) + "*"}), shell_words({run.directory()}));
  return cause;
}

}  // namespace forkpoint
