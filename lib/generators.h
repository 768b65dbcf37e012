// Generators of a process that the bridge into PyTorch records only where somebody seeded them, since one that nobody
// did differs in any two runs: Python's and NumPy's. A run that was attached cannot know that, and records them in any
// case. What a stream says of it are coverage limits, whose words are those of probes/torch/state.py.
#pragma once

#include <string>
#include <string_view>

#include "lib/hash_stream.h"

namespace forkpoint {

// Does this record say anything, equal or not? Of a generator only where one of the two streams has seen it seeded:
// holds it, and does not say that it may be nobody's. Of any other record: true.
bool is_telling(const HashStreamReader& a, const HashStreamReader& b, const Site& site);

// "whether Python's generator was seeded before the recording began": it was recorded.
bool says_seeding_unknown(std::string_view limit);
// Of "the state of Python's generator, which was not seen to be seeded before the first step": how the other run says
// that it does not know; empty for other limits.
std::string seeding_unknown_for(std::string_view limit);

}  // namespace forkpoint
