// The steps of one run over its ranks, and what of them is not there. For everything that looks at a run by itself.
// Internal.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/diff_match.h"
#include "lib/run.h"

namespace forkpoint {

struct StepWindow {
  std::optional<int64_t> first, last;  // inclusive; the prologue belongs to every window that has no first step
  std::vector<int> ranks;              // sorted; empty: all
  bool wants(int64_t step) const;
  bool wants_rank(int rank) const;
};

// One step number over the ranks that have it.
struct RunStep {
  int64_t step = 0;
  int occurrence = 0;           // a number may come again in one stream
  bool whole = true;            // complete and without a Gap on every rank that is wanted
  std::vector<size_t> streams;  // indices into Run::streams()
  std::vector<size_t> indices;  // into HashStreamReader::steps(), alongside
};
// The prologue first, then ascending.
std::vector<RunStep> steps_of(const Run& run, const StepWindow& window);

// Sentences: missing ranks, Gaps, steps that were cut, streams that died.
std::vector<std::string> lost_in(const Run& run, const StepWindow& window);
// What was not recorded on purpose: phrases ("only every 10th step"), and declared coverage limits.
std::vector<std::string> left_out_of(const Run& run);

// "before the first step", "step 12"
std::string step_text(int64_t step);

}  // namespace forkpoint
