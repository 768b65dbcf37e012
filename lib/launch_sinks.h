// What left the device unseen: copies to the host of which no digest was taken. Internal to diff.
#pragma once

#include <string>
#include <vector>

#include "lib/diff_origin.h"

namespace forkpoint {

// Sentences that forbid the word identical, at most one a run: without these digests nobody has looked at what counts. Steps
// that cannot be read are passed over (they are a Gap).
std::vector<std::string> undigested_sinks(const OriginInput& input);

}  // namespace forkpoint
