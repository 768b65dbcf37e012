// What one run loaded before it began, against the state in which the other ended the step before. Internal to diff.
#pragma once

#include "lib/diff_origin.h"

namespace forkpoint {

struct Loads {
  LoadDifferences differences;            // by pair
  LoadDifferences buffers;                // by pair: those of `differences` that are a buffer's
  uint64_t compared = 0;
  bool resumed = false;                   // it is proven that the later run loaded what the other had
  std::vector<std::string> unmatched;     // sentences: what could not be compared
};
// Parameters, optimizer state and buffers only: other records of the load have no counterpart in a step. It is proven
// to be a resume when some tensor of the load is the other run's at the end of the step before, is not zero, and is not
// that run's initial one (state of the optimizer: also where that run began with none). Else nothing is compared: the
// later run may have run its first steps unrecorded. What a buffer held need not be of the checkpoint
// (persistent=False), of this rank (one rank's may be saved, loaded by all and broadcast before each use) nor be read
// again: a difference in one counts only where it differs behind the first step as well, and is no rank's or nothing is
// broadcast in that step. is_resume: it needs no proof.
Loads compare_loads(const Alignment& alignment, bool is_resume, Joins* joins);

// What is known about a load before the compared steps.
Loaded loaded_before(const Alignment& alignment, const Loads& loads);

// Tensors of one world size whose shards were cut differently in the two runs.
struct Resharding {
  AssembledDifferences differing;
  uint64_t compared = 0, differing_records = 0, not_comparable = 0;
  std::string why;                        // of the first that could not be compared
};
Resharding assemble_resharded(const Alignment& alignment, const Scan& scan, Joins* joins, int threads);

}  // namespace forkpoint
