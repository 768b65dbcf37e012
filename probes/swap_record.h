// What a member tells the others when they agree (swap_decide.cpp, swap_links.cpp).
#pragma once

#include "probes/swap_communicator.h"

namespace forkpoint {

// Rounds in which all say something; where they are to be connected, one more follows (swap_decide.cpp).
inline constexpr uint32_t kSwapRounds = 3;

// In each round. First what it can; then whether it reaches all others' memory and has written to each; then whether
// what all of them wrote has arrived.
struct SwapCommunicator::Record {
  char magic[16];
  uint32_t version, mode, willing, round;
  uint32_t reaches, proven, blocks;
  int32_t device;
  uint64_t host, process;
  uint64_t address, context;
  uint64_t token;
  CUuuid uuid;  // of the device
  CUipcMemHandle shared;
  collective::StagingShape shape;
  char why[96];
  uint64_t waits;  // SwapMember::waits
};

// Of a member, for another one: what it writes into that one's memory.
struct SwapToken {
  uint64_t word[2];
  bool operator==(const SwapToken&) const = default;
};

// Where in SwapMeans::host: tokens to write, those that came.
inline constexpr uint64_t kTokensAt = 1024, kArrivedAt = 2048;
static_assert(collective::kMostRanks * sizeof(SwapToken) <= 1024);

}  // namespace forkpoint
