// How results come from the device to a thread that makes no CUDA call, and what the kernels keep on the device
// meanwhile.
#pragma once

#include <cstdint>

#include "lib/digest_raw.h"

namespace forkpoint {

// The digest as it travels: sums of 32-bit halves, which the reader joins (a carry out of a half stays in it). They add
// up in 48 bits, above which a scratch word counts the blocks that have added to it; so the block that comes last to a
// word knows its total at once, without a fence or a second look (each costs a third of a microsecond).
enum DigestWord : int {
  kWordA = 0,
  kWordB = 2,
  kWordMagnitude = 4,  // low half; the high one is next
  kWordSum = 6,        // folded
  kWordNonfinite = 7,
  kWordSums = 8,
  kWordNode = 8,  // node and ordinal, no sum
  kWordCount = 9
};
inline constexpr int kWordBits = 48;
inline constexpr uint32_t kMostParts = (1u << 16) - 1;
inline constexpr uint64_t kAllCounted = kMostParts;  // of a word that a flush finds complete

// Where a result arrives: mapped pinned host memory, so that a thread which makes no CUDA call can wait for it. Every
// 8-byte cell holds 4 bytes of the result and, above them, the ticket of the use that wrote them: a cell arrives whole
// (PCIe and NVLink keep aligned 8-byte stores whole), so once all cells bear the ticket the result is complete, and the
// device needs no fence towards the host.
// Zero a slot before its first use; a later use needs another ticket and no clearing.
inline constexpr int kSlotCells = 2 * kWordCount;
struct alignas(64) DigestSlot {
  uint64_t cell[24];
};

struct SlotResult {
  RawDigest raw;         // finish(dtype, raw) makes a DigestResult of it
  uint32_t ordinal = 0;  // with a ring: how often this scratch entry's digest was taken before (a graph node's replay)
  uint32_t node = 0;     // DigestTarget::node
};
// False while the digest that was given this ticket is not there yet. Any thread; makes no CUDA call.
bool read_slot(const DigestSlot& slot, uint32_t ticket, SlotResult* result);

// Sums of a digest that several blocks share, or that a flush fetches later (kernels/digest_flush.h). Device memory,
// zeroed once by its owner; each digest, or its flush, leaves it ready for the next. REQUIRES: no two digests that may
// run at the same time share one.
struct alignas(128) DigestScratch {
  uint64_t word[kWordSums];
  uint64_t magnitude;    // largest so far
  uint32_t blocks_done;  // with a ring, where one block must have all sums
  uint32_t ordinal;
  uint32_t broken;       // a flush came when a word was not complete: its results are not believed any more
  uint32_t unused_half;
  uint64_t unused[5];
};
static_assert(sizeof(DigestScratch) == 128);

// Slots that the device chooses at each execution, for digests inside a captured graph, which runs many times. The
// structure lies in device memory (copied there once, counters zero); slots, consumed and dropped in mapped pinned host
// memory. The device never waits: while `capacity` results are unread, further ones are counted in `dropped`.
// The n-th result (from 0) is in slots[n % capacity] under ring_ticket(n, capacity). The reader takes them in this
// order and then stores n + 1 to *consumed (release).
struct DigestRing {
  DigestSlot* slots = nullptr;
  const uint64_t* consumed = nullptr;
  uint64_t* dropped = nullptr;  // total so far; may lag behind by results that are being dropped right now
  uint64_t capacity = 0;        // a power of two
  uint64_t taken = 0;           // device counters from here on
  uint64_t consumed_seen = 0;
  uint64_t dropped_count = 0;
};
constexpr uint32_t ring_ticket(uint64_t n, uint64_t capacity) { return static_cast<uint32_t>(n / capacity) + 1; }

}  // namespace forkpoint
