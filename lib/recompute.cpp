#include "lib/recompute.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "lib/cause_facts.h"
#include "lib/diff_step.h"
#include "lib/digest_mix.h"
#include "lib/error.h"
#include "lib/pointing.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr uint32_t kTaken = kNoRow - 1;

// The rows of the first pass of one site, in order of arrival.
struct FirstPass {
  std::vector<uint32_t> rows;
};

class StepCheck {
 public:
  StepCheck(const HashStreamReader& stream, const StepColumns& columns) : stream_(stream), columns_(columns) {
    for (uint32_t row = 0; row < columns.size(); ++row) {
      if ((columns.flags[row] & kRecordEval) != 0) continue;
      if ((columns.flags[row] & kRecordRecompute) != 0)
        second_.push_back(row);
      else
        first_[columns.site[row]].rows.push_back(row);
    }
  }

  void run(RecomputeCheck* check) {
    partner_.assign(second_.size(), kNoRow);
    std::vector<size_t> open;
    // Two rounds: values of the own micro-step are taken first, so that equal values of another are left for those.
    for (size_t i = 0; i < second_.size(); ++i) {
      if (!first_.contains(columns_.site[second_[i]]))
        ++check->unmatched;
      else if (++check->compared; !take(i, true))
        open.push_back(i);
    }
    for (const size_t i : open) {
      if (!take(i, false)) differing_.push_back(i);
    }
  }

  bool differs() const { return !differing_.empty(); }
  uint64_t differing() const { return differing_.size(); }

  RecomputeMismatch mismatch(int64_t step) const {
    const size_t i = causally_first();
    const uint32_t row = second_[i];
    const Site& site = stream_.sites()[columns_.site[row]];
    RecomputeMismatch out;
    out.at.step = step, out.at.micro_step = std::max(0, columns_.micro_step[row]), out.at.rank = stream_.header().rank;
    out.at.phase = site.phase, out.at.layer = site.layer, out.at.op = site.op, out.at.tensor = site.tensor;
    out.at.kind = site.kind;
    out.row = row, out.differing = differing_.size(), out.is_output = is_op_output(site);
    describe(row, counterpart(i), &out);
    for (size_t k = 0; k < second_.size(); ++k) {
      const Site& other = stream_.sites()[columns_.site[second_[k]]];
      if (k == i || !same_instance(second_[k], row) || !is_op_input(other)) continue;
      if (!first_.contains(columns_.site[second_[k]]))
        out.inputs_unknown.push_back(other.tensor);
      else if (std::find(differing_.begin(), differing_.end(), k) == differing_.end())
        out.inputs_agree.push_back(other.tensor);
    }
    return out;
  }

 private:
  bool same_value(uint32_t left, uint32_t right) const {
    const auto layouts = stream_.layout_keys();
    return columns_.digest[left] == columns_.digest[right] &&
           layouts[columns_.layout[left]] == layouts[columns_.layout[right]];
  }

  bool take(size_t i, bool own_micro_step) {
    const uint32_t row = second_[i];
    for (uint32_t& candidate : first_[columns_.site[row]].rows) {
      if (candidate == kTaken || !same_value(candidate, row)) continue;
      if (own_micro_step && columns_.micro_step[candidate] != columns_.micro_step[row]) continue;
      partner_[i] = candidate;
      candidate = kTaken;
      return true;
    }
    return false;
  }

  bool same_instance(uint32_t left, uint32_t right) const {
    return columns_.micro_step[left] == columns_.micro_step[right] && columns_.call[left] == columns_.call[right] &&
           op_key(stream_.sites()[columns_.site[left]]) == op_key(stream_.sites()[columns_.site[right]]);
  }

  // An op's inputs come before its output, whatever the order in which they were recorded.
  size_t causally_first() const {
    const size_t first = *std::min_element(differing_.begin(), differing_.end());
    if (!is_op_output(stream_.sites()[columns_.site[second_[first]]])) return first;
    for (const size_t k : differing_) {
      if (k != first && same_instance(second_[k], second_[first]) &&
          is_op_input(stream_.sites()[columns_.site[second_[k]]]))
        return k;
    }
    return first;
  }

  // The first pass that was left over for it: of its micro-step, else any.
  uint32_t counterpart(size_t i) const {
    const uint32_t row = second_[i];
    uint32_t other = kNoRow;
    for (const uint32_t candidate : first_.at(columns_.site[row]).rows) {
      if (candidate == kTaken) continue;
      if (columns_.micro_step[candidate] == columns_.micro_step[row]) return candidate;
      if (other == kNoRow) other = candidate;
    }
    return other;
  }

  void describe(uint32_t row, uint32_t first, RecomputeMismatch* out) const {
    const Layout& second_layout = stream_.layouts()[columns_.layout[row]];
    const auto hex = [&](uint32_t at) {
      return fmt::format("{:016x}{:016x}", columns_.digest[at].a, columns_.digest[at].b);
    };
    out->layout = second_layout;
    out->at.after = hex(row);
    if (first == kNoRow) return;  // recomputed more often than it was computed
    out->layout = stream_.layouts()[columns_.layout[first]];
    out->at.before = hex(first);
    out->other_layout = layout_key(out->layout) != layout_key(second_layout);
    if (out->other_layout) {
      out->at.before = to_string(out->layout), out->at.after = to_string(second_layout);
      return;
    }
    out->permuted =
        columns_.word_sum[first] == columns_.word_sum[row] && columns_.absmax[first] == columns_.absmax[row];
    if (word_count(out->layout) <= kMaxPointingWords / 8)
      out->at.pointing = point(columns_.digest[first], columns_.digest[row], out->layout);
  }

  const HashStreamReader& stream_;
  const StepColumns& columns_;
  std::unordered_map<uint32_t, FirstPass> first_;  // by site
  std::vector<uint32_t> second_, partner_;
  std::vector<size_t> differing_;  // of second_
};

bool names_dropout(const Divergence& at) {
  std::string name = at.layer + " " + at.op + " " + at.tensor;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name.find("drop") != name.npos || name.find("bernoulli") != name.npos;
}

}  // namespace

void check_recompute(const HashStreamReader& stream, const StepColumns& columns, int64_t step, RecomputeCheck* check) {
  const bool any = std::any_of(columns.flags.begin(), columns.flags.end(),
                               [](uint8_t flags) { return (flags & kClassFlags) == kRecordRecompute; });
  if (!any) return;
  StepCheck of_step(stream, columns);
  of_step.run(check);
  if (of_step.differs()) check->mismatches.push_back(of_step.mismatch(step));
}

std::string recompute_headline(const RecomputeMismatch& mismatch) {
  return "recompute mismatch at " + place_text(mismatch.at);
}

Cause recompute_cause(const RecomputeMismatch& mismatch, const std::string& run) {
  Cause cause;
  cause.evidence.push_back(
      fmt::format("recomputed under activation checkpointing, it is not what the first forward of the same step gave: "
                  "the backward pass "
                  "works with another value than the loss does ({} of this rank's step)",
                  counted(mismatch.differing, "such record")));
  if (mismatch.other_layout) {
    cause.cls = "precision_or_formula";
    cause.evidence.push_back(fmt::format("it was {} first and {} when recomputed (autocast that is not restored?)",
                                         mismatch.at.before, mismatch.at.after));
  } else if (!mismatch.is_output) {
    cause.class_candidates = {"overwritten_input", "rng_state", "nondeterministic_op"};
    cause.evidence.push_back(
        "it is an input: what the checkpoint kept was overwritten after the first forward, or what computed "
        "it within the checkpoint was not recorded");
  } else if (mismatch.inputs_agree.empty() || !mismatch.inputs_unknown.empty()) {
    cause.class_candidates = {"rng_state", "overwritten_input", "nondeterministic_op"};
    cause.evidence.push_back("whether its recomputed inputs are those of the first forward was not recorded");
  } else {
    cause.cls = names_dropout(mismatch.at) ? "rng_state" : "nondeterministic_op";
    cause.class_candidates = {"rng_state"};
    if (cause.cls != "rng_state") cause.class_candidates.insert(cause.class_candidates.begin(), "nondeterministic_op");
    cause.evidence.push_back(fmt::format("its recomputed {} {} with the first forward",
                                         fmt::join(mismatch.inputs_agree, ", "),
                                         mismatch.inputs_agree.size() == 1 ? "agrees" : "agree"));
    if (mismatch.permuted) cause.evidence.push_back("the same words in another order");
  }
  if (cause.cls == "rng_state") {
    cause.evidence.push_back(
        "it draws random numbers: the generator was not put back to where it stood in the first forward "
        "(preserve_rng_state=False?)");
  }
  cause.next =
      fmt::format("forkpoint show --steps {} --ranks {} --layer {} {}", mismatch.at.step, mismatch.at.rank,
                  shell_words({mismatch.at.layer.empty() ? std::string("*") : mismatch.at.layer}), shell_words({run}));
  return cause;
}

std::vector<std::string> recompute_notes(const Run& run, const std::string& called, int64_t step) {
  std::vector<std::string> notes;
  StepColumns columns;
  for (const RunStep& at : steps_of(run, {step, step, {}})) {
    RecomputeCheck check;
    for (size_t s = 0; s < at.streams.size() && at.whole; ++s) {
      const HashStreamReader& stream = *run.streams()[at.streams[s]];
      try {
        stream.read_step(at.indices[s], &columns);
      } catch (const Error&) {  // a Gap: the comparison itself says so
        continue;
      }
      check_recompute(stream, columns, step, &check);
    }
    if (check.mismatches.empty()) continue;
    const size_t more = check.mismatches.size() - 1;
    notes.push_back(fmt::format("within {}: {}{} (`forkpoint diff --replicas {}` says more)", called,
                                recompute_headline(check.mismatches.front()),
                                more == 0 ? "" : fmt::format(", and on {}", counted(more, "other rank")),
                                shell_words({run.directory()})));
  }
  return notes;
}

}  // namespace forkpoint
