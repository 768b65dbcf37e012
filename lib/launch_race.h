// Is a launch, whose result differs, ordered with the others that touch its buffers? Internal to diff.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/align.h"
#include "lib/launch_step.h"

namespace forkpoint {

struct RaceEvidence {
  // Pairs that no edge orders in this run though the other run orders them, or has no such pair.
  bool only_a = false, only_b = false;
  bool both = false;    // unordered in both runs
  bool stale = false;   // a buffer holds what it held before another launch wrote it ...
  bool future = false;  // ... or what a later launch wrote to it
  std::vector<std::string> sentences;
  bool found() const { return only_a || only_b || both; }
};

// row_a, row_b: the launch in the two runs, in step pair_step. Looks for writers of what it was handed (place: of this
// buffer only) in that step and the one before. What cannot be read, or is more than LaunchOrder takes, is no evidence.
RaceEvidence find_races(const LaunchJoin& join, const RankPair& pair, size_t pair_step, uint32_t row_a, uint32_t row_b,
                        std::optional<uint32_t> place = {});

}  // namespace forkpoint
