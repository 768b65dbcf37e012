#include "lib/watch_replicas.h"

#include <algorithm>

namespace forkpoint {
namespace {

// That one rank may be ahead of another.
constexpr size_t kMostWaitingSteps = 64;
constexpr size_t kMostUnknown = 64;  // sentences that are kept

}  // namespace

bool ReplicaWatch::is_old(const RunStep& step) const {
  if (step.step == kPrologueStep) return has_prologue_;
  return reference_ && *reference_ == std::pair(step.step, step.occurrence);
}

// Entries point into the dictionaries, which move when they grow.
void ReplicaWatch::refresh(const Run& run, const std::vector<StreamTail*>& tails) {
  size_t dictionary = 0;
  for (const StreamTail* tail : tails) dictionary += tail->dictionary_size();
  if (groups_ && dictionary == dictionary_ && tails.size() == streams_) return;
  groups_.emplace(run);
  sites_ = replica_sites(run);
  dictionary_ = dictionary, streams_ = tails.size();
}

std::vector<ReplicaDesync> ReplicaWatch::compare(const Run& run, const std::vector<StreamTail*>& tails) {
  std::vector<ReplicaDesync> found;
  if (tails.size() < 2) {
    for (StreamTail* tail : tails) {
      while (tail->steps().size() > kMostWaitingSteps) tail->give_up(0);
    }
    return found;
  }
  const std::vector<RunStep> steps = steps_of(run, {});
  const bool any_new =
      std::any_of(steps.begin(), steps.end(), [&](const RunStep& step) { return step.whole && !is_old(step); });
  std::vector<uint8_t> keep(steps.size(), 1);
  if (any_new) {
    refresh(run, tails);
    found = judge_new(run);
    keep_reference(steps, &keep);
  }
  leave_out(steps, &keep);
  give_up(steps, keep, tails);
  return found;
}

std::vector<ReplicaDesync> ReplicaWatch::judge_new(const Run& run) {
  std::vector<ReplicaDesync> found;
  DiffOptions options;
  options.threads = 1, options.verify_checksums = false;  // the tails have checked them
  const ReplicaScan scan = scan_replicas(run, *groups_, sites_, {}, options);
  any_compared_ |= scan.compared > 0;
  for (const Disagreement& entry : scan.disagreements) {
    const Site& site = *sites_.entries[entry.entry].site;
    // What is loaded apart may be sent around before the first step: the steps show it.
    if (is_old(scan.steps[entry.step]) || site.phase == Phase::load) continue;
    Judgement judgement = judge(entry, scan, *groups_, sites_);
    if (judgement.judged == Judged::unknown && unknown_.size() < kMostUnknown) unknown_.insert(judgement.why);
    if (judgement.judged != Judged::desync) continue;
    ReplicaDesync desync{
        replica_divergence(run, entry, scan, sites_), outliers_of(entry.pieces), {}, std::move(judgement.why)};
    for (const ReplicaPiece& piece : entry.pieces) desync.compared.push_back(piece.rank);
    found.push_back(std::move(desync));
  }
  return found;
}

// Of the steps that were compared only the last one: it is the next reference.
void ReplicaWatch::keep_reference(const std::vector<RunStep>& steps, std::vector<uint8_t>* keep) {
  std::optional<size_t> last;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!steps[i].whole) continue;
    if (steps[i].step == kPrologueStep) {
      has_prologue_ = true;
      continue;
    }
    if (!is_old(steps[i])) newest_ = steps[i].step, ++steps_;  // of a program that goes back, too
    (*keep)[i] = 0;
    last = i;
  }
  if (!last) return;
  (*keep)[*last] = 1;
  reference_ = {steps[*last].step, 0};  // alone of its number, once the others are given up
}

// What is not on every rank, and will not be: the others are past it.
void ReplicaWatch::leave_out(const std::vector<RunStep>& steps, std::vector<uint8_t>* keep) {
  size_t waiting = 0;
  for (const RunStep& step : steps) waiting += step.whole ? 0 : 1;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].whole || steps[i].step == kPrologueStep) continue;
    const bool passed = newest_ && steps[i].step < *newest_;
    if (passed || waiting > kMostWaitingSteps) (*keep)[i] = 0, --waiting, ++left_out_;
  }
}

void ReplicaWatch::give_up(const std::vector<RunStep>& steps, const std::vector<uint8_t>& keep,
                           const std::vector<StreamTail*>& tails) {
  std::vector<std::vector<size_t>> gone(tails.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    for (size_t k = 0; keep[i] == 0 && k < steps[i].streams.size(); ++k) {
      gone[steps[i].streams[k]].push_back(steps[i].indices[k]);
    }
  }
  for (size_t s = 0; s < tails.size(); ++s) {
    std::sort(gone[s].rbegin(), gone[s].rend());
    for (const size_t index : gone[s]) {
      const bool open = index + 1 == tails[s]->steps().size() && !tails[s]->steps()[index].complete;
      if (!open) tails[s]->give_up(index);
    }
  }
}

}  // namespace forkpoint
