#include "lib/run_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// A Gap that is placed nowhere may lie in any step.
bool placed(const Gap& gap) { return gap.last_step != kPrologueStep; }

bool lost_within(const HashStreamReader& stream, int64_t step) {
  const auto gaps = stream.gaps();
  return std::any_of(gaps.begin(), gaps.end(),
                     [&](const Gap& gap) { return !placed(gap) || (gap.first_step <= step && step <= gap.last_step); });
}

std::string gap_text(int rank, const Gap& gap) {
  if (!placed(gap)) return fmt::format("rank {}: {}", rank, gap.reason);
  const std::string steps = gap.first_step == gap.last_step ? step_text(gap.first_step)
                                                            : fmt::format("steps {}-{}", gap.first_step, gap.last_step);
  return fmt::format("rank {}, {}: {}", rank, steps, gap.reason);
}

void add_stream(const HashStreamReader& stream, const StepWindow& window, bool run_goes_on,
                std::vector<std::string>* lost) {
  const int rank = stream.header().rank;
  for (const Gap& gap : stream.gaps()) {
    const bool outside = placed(gap) && ((window.first && gap.last_step < *window.first) ||
                                         (window.last && gap.first_step > *window.last));
    if (!outside) lost->push_back(gap_text(rank, gap));
  }
  const auto steps = stream.steps();
  bool cut = false;
  for (const StepSummary& step : steps) {
    if (step.complete || !window.wants(step.step) || lost_within(stream, step.step)) continue;
    if (run_goes_on && &step == &steps.back()) continue;  // it is being recorded
    lost->push_back(fmt::format("rank {}, {} is cut", rank, step_text(step.step)));
    cut = true;
  }
  const bool to_its_end = !window.last || steps.empty() || steps.back().step < *window.last;
  if (stream.state() == StreamState::died && !cut && to_its_end) {
    lost->push_back(steps.empty()
                        ? fmt::format("the recording of rank {} died in no step", rank)
                        : fmt::format("the recording of rank {} died after {}", rank, step_text(steps.back().step)));
  }
}

}  // namespace

std::string step_text(int64_t step) {
  return step == kPrologueStep ? "before the first step" : fmt::format("step {}", step);
}

bool StepWindow::wants(int64_t step) const {
  if (step == kPrologueStep) return !first;
  return (!first || step >= *first) && (!last || step <= *last);
}

bool StepWindow::wants_rank(int rank) const {
  return ranks.empty() || std::binary_search(ranks.begin(), ranks.end(), rank);
}

std::vector<RunStep> steps_of(const Run& run, const StepWindow& window) {
  std::map<std::pair<int64_t, int>, RunStep> steps;
  size_t wanted = 0;
  for (size_t s = 0; s < run.streams().size(); ++s) {
    const HashStreamReader& stream = *run.streams()[s];
    if (!window.wants_rank(stream.header().rank)) continue;
    ++wanted;
    std::map<int64_t, int> seen;
    for (size_t i = 0; i < stream.steps().size(); ++i) {
      const StepSummary& summary = stream.steps()[i];
      if (!window.wants(summary.step)) continue;
      const int occurrence = seen[summary.step]++;
      RunStep& step = steps[{summary.step, occurrence}];
      step.step = summary.step, step.occurrence = occurrence;
      step.whole &= summary.complete && !lost_within(stream, summary.step);
      step.streams.push_back(s);
      step.indices.push_back(i);
    }
  }
  std::vector<RunStep> list;
  for (auto& [key, step] : steps) {
    step.whole &= step.streams.size() == wanted;
    list.push_back(std::move(step));
  }
  return list;
}

std::vector<std::string> lost_in(const Run& run, const StepWindow& window) {
  std::vector<std::string> lost;
  std::vector<int> missing;
  for (const int rank : run.missing_ranks()) {
    if (window.wants_rank(rank)) missing.push_back(rank);
  }
  if (!missing.empty())
    lost.push_back(fmt::format("{} {} missing", rank_list(missing), missing.size() == 1 ? "is" : "are"));
  for (const std::string& problem : run.problems()) lost.push_back(problem);
  std::set<int> present;
  for (const auto& stream : run.streams()) {
    present.insert(stream->header().rank);
    if (window.wants_rank(stream->header().rank)) {
      add_stream(*stream, window, run.state() == RunState::recording, &lost);
    }
  }
  for (const int rank : window.ranks) {
    const bool said = std::find(missing.begin(), missing.end(), rank) != missing.end();
    if (!present.contains(rank) && !said) lost.push_back(fmt::format("there is no rank {}", rank));
  }
  return lost;
}

std::vector<std::string> left_out_of(const Run& run) {
  std::vector<std::string> out;
  const Manifest& manifest = run.manifest();
  if (manifest.every > 1)
    out.push_back(fmt::format("only every {}th step was recorded (--every {})", manifest.every, manifest.every));
  if (!manifest.ranks.empty() && static_cast<int>(manifest.ranks.size()) < run.world_size()) {
    out.push_back(fmt::format("only {} of {} were recorded (--ranks)", rank_list(manifest.ranks), run.world_size()));
  }
  if (manifest.level == Level::step) out.push_back("no layer's inputs and outputs (level step)");
  if (run.state() == RunState::recording) out.push_back("the run is still being recorded");
  std::set<std::string> limits;
  for (const auto& stream : run.streams()) {
    for (const CoverageLimit& limit : stream->coverage_limits()) {
      if (limits.insert(limit.what).second)
        out.push_back(limit.detail.empty() ? limit.what : limit.what + ": " + limit.detail);
    }
  }
  return out;
}

}  // namespace forkpoint
