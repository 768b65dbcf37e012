// Alignment of two sequences in which much repeats itself. Pure functions. Internal to diff.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace forkpoint {

// Longest common subsequence by the greedy O(ND) algorithm (Myers: An O(ND) Difference Algorithm and Its Variations,
// Algorithmica 1986). Adds the pairs found to in_b, which holds B's index by A's (kNoRow: none). False, and nothing
// added, when more than most_edits elements would be left over: its time is (|a| + |b|) * edits, its memory edits^2 * 4
// bytes.
bool add_common(std::span<const uint64_t> a, std::span<const uint64_t> b, size_t most_edits, std::span<uint32_t> in_b,
                uint32_t first_b);

// Pairs of tokens that occur once in each sequence, the longest chain of them that is in order in both: for sequences
// that have too little in common for add_common.
void add_unique(std::span<const uint64_t> a, std::span<const uint64_t> b, std::span<uint32_t> in_b, uint32_t first_b);

// A common subsequence is seldom the only one: of three equal kernels, which two are the other run's? Looks at every
// place where something is left over, with up to `around` pairs on both sides, and takes the alignment of the largest
// sum of scores there. score(i, j): above 0 where the two may be paired.
void refine_alignment(size_t size_a, size_t size_b, size_t around, const std::function<int(size_t, size_t)>& score,
                      std::vector<uint32_t>* in_b);

using IndexPair = std::pair<uint32_t, uint32_t>;
// What one sequence alone has can often stand at several places with the same right: of A = x x and B = x x x, which x
// is more? Tries them all, up to `around` pairs to both sides, and takes the one at which conflicts(pairs around it) is
// least. may_pair: also has to hold for the pairs that are made on the way.
void slide_leftovers(size_t size_a, size_t size_b, size_t around, const std::function<bool(size_t, size_t)>& may_pair,
                     const std::function<int(std::span<const IndexPair>)>& conflicts, std::vector<uint32_t>* in_b);

}  // namespace forkpoint
