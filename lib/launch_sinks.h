// What left the device: copies to the host, of which none may be missing where runs are called identical. Internal to diff.
#pragma once

#include <string>
#include <vector>

#include "lib/diff_origin.h"

namespace forkpoint {

// Sentences that forbid the word identical: copies of which no digest was taken, or that only one run has; and, where the runs
// have no copy and no record at all to be compared by, launches that only one run has. Steps that cannot be read are passed
// over (they are a Gap). single: launches that only one run has.
std::vector<std::string> sink_blockers(const OriginInput& input, uint64_t records_compared, uint64_t single);

}  // namespace forkpoint
