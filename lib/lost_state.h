// Which state of a training a stop and a resume have lost or changed, by what the recorded values show: what was loaded against
// what was there when the checkpoint was saved, and what the first steps behind it began with. Names only say of which kind a
// state of the optimizer or a scalar is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/run.h"

namespace forkpoint {

struct ResumedRuns {
  const Run* straight = nullptr;  // without a stop; nullptr: the command does not repeat itself, so that it shows nothing
  const Run* stopped = nullptr;   // ended behind the step before `first_step`, with a checkpoint
  const Run* resumed = nullptr;   // from that checkpoint on
  int64_t first_step = 0;         // of `resumed`
};

// "momentum (weight.exp_avg of blocks.3.mlp.fc1)", "dtype (weight of head: rounded to bf16)", "position in the data (batch)",
// "loss scale (scale)", ...: each kind once, with the first value that shows it. Empty: no state of the checkpoint differs, only
// what was computed behind it, or nothing was recorded that would show it. Throws Error when a stream cannot be read.
std::vector<std::string> lost_states(const ResumedRuns& runs);

}  // namespace forkpoint
