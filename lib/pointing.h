// From the digests of two tensors of one layout: is the difference a single 32-bit word, which one, and by how much?
// Pure functions.
#pragma once

#include <optional>
#include <string>

#include "lib/record.h"
#include "lib/verdict.h"

namespace forkpoint {

// About 2 ns a word: beyond this many words in one verdict the search is left out (and the verdict says so).
inline constexpr uint64_t kMaxPointingWords = 4ull << 30;

uint64_t word_count(const Layout& layout);  // of the global tensor, in 32-bit words

// Both digests are of `layout` (a shard: keyed by its global position). Empty when no single word explains the
// difference.
std::optional<Pointing> point(const Digest& first, const Digest& second, const Layout& layout);

// "one 32-bit word differs (word 17, element [2, 1]), by +1048576: consistent with a flipped bit (bit 20 of the
// element; a change of 2^20 units in the last place looks the same)".
std::string to_sentence(const Pointing& pointing, const Layout& layout);

}  // namespace forkpoint
