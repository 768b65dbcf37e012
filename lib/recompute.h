// Activation checkpointing runs a layer's forward a second time, in the backward pass. Each record of that second
// forward (kRecordRecompute) must be what the first one gave: same site, step and rank. Where it is not, the gradient
// is that of another function than the loss (dropout with another mask is the usual cause).
#pragma once

#include <string>
#include <vector>

#include "lib/run_steps.h"
#include "lib/verdict.h"

namespace forkpoint {

// The first record of one rank's step whose recomputation is another than its first pass.
struct RecomputeMismatch {
  Divergence at;                            // before: first pass, after: recomputed
  Layout layout;                            // of the first pass
  bool other_layout = false;                // recomputed in another dtype or shape
  bool is_output = false;                   // of its op; else what the op was handed
  bool permuted = false;                    // the same words in another order
  std::vector<std::string> inputs_agree;    // recomputed inputs of its op that are those of the first pass
  std::vector<std::string> inputs_unknown;  // ... of which there is no first pass
  uint64_t differing = 0;                   // such records in this step of this rank
  uint32_t row = 0;                         // in order of arrival
};

struct RecomputeCheck {
  uint64_t compared = 0;                      // records of a second forward that were held against a first pass
  uint64_t unmatched = 0;                     // of which there is no record of a first pass in the step
  std::vector<RecomputeMismatch> mismatches;  // at most one a step and rank
};

// A module that is called several times is compared as a multiset: recomputation goes from the last call to the first,
// and each value may be that of another micro-step, because pipelines recompute when the next micro-steps have begun.
void check_recompute(const HashStreamReader& stream, const StepColumns& columns, int64_t step, RecomputeCheck* check);

// `recompute mismatch at step 3, rank 0, forward, blocks.2.dropout: output`
std::string recompute_headline(const RecomputeMismatch& mismatch);
Cause recompute_cause(const RecomputeMismatch& mismatch, const std::string& run);

// For a comparison of two runs: sentences about the mismatches within run (called "run A") in this step, all ranks;
// empty where there are none. Reads the step of each rank once.
std::vector<std::string> recompute_notes(const Run& run, const std::string& called, int64_t step);

}  // namespace forkpoint
