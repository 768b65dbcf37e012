// The field "knobs" of run.json: the knobs of deterministic mode (lib/knobs.h) that the command which made the run was given.
#pragma once

#include <string>
#include <vector>

#include "lib/run.h"

namespace forkpoint {

struct RecordedKnob {
  std::string name;
  std::string state;    // "set", "kept" (the user's own setting is as good), "conflict" (it is not, and was left: not in force)
  std::string value;    // "CUBLAS_WORKSPACE_CONFIG=:4096:8", "in process"
  std::string problem;  // of a conflict: a sentence
  bool in_force() const { return state != "conflict"; }
};

// All that were asked for, in force or not; empty: no deterministic mode. Throws Error where the field is something else.
std::vector<RecordedKnob> recorded_knobs(const Manifest& manifest);
void set_recorded_knobs(const std::vector<RecordedKnob>& knobs, Manifest* manifest);
// Of those in force, by commas: "cublas,nccl". Empty: none was asked for, or is.
std::string knobs_in_force(const Manifest& manifest);

}  // namespace forkpoint
