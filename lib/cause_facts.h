// Looks up in the runs what decide_cause wants to know about an origin. Internal to diff.
#pragma once

#include "lib/cause.h"
#include "lib/diff_origin.h"

namespace forkpoint {

// The origin as the verdict names it. rank: one of origin.ranks, or -1.
Divergence to_divergence(const OriginInput& input, const Origin& origin, int rank);
// The pair of values as text: digests, numbers for scalars, forms where those differ.
void describe_values(const Site& site, const Layout& layout_a, const Layout& layout_b, const Difference& difference,
                     Divergence* out);

// Reads steps again where it must; what cannot be read is left out.
CauseFacts gather_facts(const OriginInput& input, const Origin& origin, const Divergence& first);

// "is run A's batch of step 5, rank 0 (15 steps before)"; empty: not found. searched: every recorded step was read.
std::string find_batch(const OriginInput& input, const Origin& origin, bool* searched);

std::string shell_words(const std::vector<std::string>& command);

}  // namespace forkpoint
