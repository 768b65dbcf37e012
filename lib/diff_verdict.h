// Writes what was found into a Verdict. Internal to diff.
#pragma once

#include "lib/diff_load.h"
#include "lib/diff_notes.h"
#include "lib/diff_origin.h"

namespace forkpoint {

// Everything that is known once the runs have been read.
struct Findings {
  const OriginInput& input;
  const DiffOptions& options;
  const Origins& origins;
  const StructureNotes& structure;
  const Loads& loads;
  const Resharding& resharding;
};

// Records and steps compared, bytes, level, limits; frames are counted by verify_runs.
Coverage coverage_of(const Findings& findings);
// REQUIRES: something differs (origins, evaluation, permutation or structure).
void write_divergence(const Findings& findings, Verdict* verdict);
// One sentence from blockers (sentences), and how far the runs agree.
std::string incomparable_reason(const std::vector<std::string>& blockers, uint64_t steps_compared,
                                uint64_t records_compared);

// The checksums of every frame of these streams; returns sentences about damage. Adds to frames those that were
// checked.
std::vector<std::string> verify_runs(const Run& a, const Run& b, const DiffOptions& options, uint64_t* frames);

// Runs of other world sizes: only what can be put together from all ranks.
Verdict diff_other_world(const Run& a, const Run& b, const Alignment& alignment, const DiffOptions& options);

}  // namespace forkpoint
