// How the blocks of one launch are dealt out to several runs, so that all of them run at once. Internal to the planners.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/digest_launch.h"

namespace forkpoint::plan {

inline constexpr uint64_t kWarps = kDigestBlockThreads / 32;
inline constexpr uint64_t kFlatBlocksPerMultiprocessor = 1024 / kDigestBlockThreads;
// What one block does alone: a second round of tiles takes as long as two blocks need to add up their sums.
inline constexpr uint64_t kAloneTiles = 2 * kWarps;

// So that no warp has more than `rounds` tiles, unless one block does them alone.
inline uint64_t blocks_of(uint64_t tiles, uint64_t rounds) {
  return tiles <= kAloneTiles ? 1 : (tiles + rounds * kWarps - 1) / (rounds * kWarps);
}

inline uint64_t tiles_a_warp(uint64_t tiles, uint64_t blocks) {
  return std::max<uint64_t>(1, (tiles + blocks * kWarps - 1) / (blocks * kWarps));
}

// As few tiles a warp as let all blocks run at once: the slowest warp decides. tiles_at(i): of run i.
template <typename TilesAt>
uint64_t choose_rounds(size_t count, int multiprocessors, TilesAt tiles_at) {
  const uint64_t most = std::clamp<uint64_t>(kFlatBlocksPerMultiprocessor * static_cast<uint64_t>(multiprocessors),
                                             2 * count, kMostParts);
  uint64_t tiles = 0, blocks = 0;
  for (size_t i = 0; i < count; ++i) tiles += tiles_at(i);
  const uint64_t rounds = tiles_a_warp(tiles, most);
  for (size_t i = 0; i < count; ++i) blocks += blocks_of(tiles_at(i), rounds);
  // Each run may round its blocks up, by less than one.
  return blocks <= most ? rounds : tiles_a_warp(tiles, most - count);
}

}  // namespace forkpoint::plan
