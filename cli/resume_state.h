// Which state of a training a resume has lost or changed, in the words of its user.
#pragma once

#include <string>
#include <vector>

#include "lib/verdict.h"

namespace forkpoint {

// "momentum (weight.exp_avg of blocks.3.mlp.fc1)", "position in the data (sampler)", ... of the first divergences of a
// verdict on the steps behind a resume, each kind once. Empty: they name no state of the checkpoint, but what was
// computed from it.
std::vector<std::string> states_of(const Verdict& verdict, int64_t first_step);

}  // namespace forkpoint
