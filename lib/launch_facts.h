// Looks up in the runs what decide_launch_cause wants to know about the launch at which they part. Internal to diff.
#pragma once

#include "lib/launch_cause.h"
#include "lib/launch_scan.h"

namespace forkpoint {

// The origin as the verdict names it. rank: -1 where all begin alike. record: what of the records it reaches first;
// null: none.
Divergence to_divergence(const OriginInput& input, const LaunchOrigin& origin, int rank, const Site* record);

// The output that the verdict names: the one that was followed to here, else the first that differs.
const PlaceFact* named_place(const LaunchOrigin& origin);

// Reads steps again where it must; what cannot be read is left out.
LaunchFacts gather_launch_facts(const OriginInput& input, const LaunchOrigin& origin, const FreeWords& free_words,
                                const Divergence& first);

}  // namespace forkpoint
