// Writes what was found into a Verdict. Internal to diff.
#pragma once

#include <map>

#include "lib/diff_load.h"
#include "lib/diff_notes.h"
#include "lib/diff_origin.h"
#include "lib/launch_verdict.h"

namespace forkpoint {

// Everything that is known once the runs have been read.
struct Findings {
  const OriginInput& input;
  const DiffOptions& options;
  const Origins& origins;
  const StructureNotes& structure;
  const SetUpNotes& set_up;
  const RelaidNotes& relaid;
  const Loads& loads;
  const Resharding& resharding;
  const LaunchScan& launches;
};

// Records, launches and steps compared, bytes, level, limits; frames are counted by verify_runs.
Coverage coverage_of(const Findings& findings);
// REQUIRES: something differs (origins, evaluation, permutation, structure, or launches that left a device).
void write_divergence(const Findings& findings, Verdict* verdict);
// One sentence from blockers (sentences), and how far the runs agree.
std::string incomparable_reason(const std::vector<std::string>& blockers, uint64_t steps_compared,
                                uint64_t records_compared);

struct Verified {
  std::vector<std::string> damage;  // sentences
  uint64_t frames = 0;
  struct Launches {
    uint64_t work = 0, buffers = 0;  // of the digests after launches
  };
  std::map<int, std::vector<Launches>> launches;  // of run A, by rank and step in the file
};
// The checksums of every frame of these streams, and that their rows add up to their summaries.
Verified verify_runs(const Run& a, const Run& b, const DiffOptions& options);

// Runs of other world sizes: only what can be put together from all ranks.
Verdict diff_other_world(const Run& a, const Run& b, const Alignment& alignment, const DiffOptions& options);

}  // namespace forkpoint
