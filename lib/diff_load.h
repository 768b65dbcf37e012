// What one run loaded before it began, against the state in which the other ended the step before. Internal to diff.
#pragma once

#include "lib/diff_origin.h"

namespace forkpoint {

struct Loads {
  LoadDifferences differences;            // by pair
  uint64_t compared = 0;
  std::vector<std::string> unmatched;     // sentences: what could not be compared
};
// Parameters and optimizer state only: other records of the load have no counterpart in a step.
Loads compare_loads(const Alignment& alignment, Joins* joins);

// Tensors of one world size whose shards were cut differently in the two runs.
struct Resharding {
  AssembledDifferences differing;
  uint64_t compared = 0, differing_records = 0, not_comparable = 0;
  std::string why;                        // of the first that could not be compared
};
Resharding assemble_resharded(const Alignment& alignment, const Scan& scan, Joins* joins, int threads);

}  // namespace forkpoint
