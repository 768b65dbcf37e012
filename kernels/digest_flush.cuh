// Fetches the sums that digests left in their scratch, and sends them to the host; see digest_flush.h. Four threads a
// digest: thread i of them has words i and i + 4, so that loads and stores of a warp lie together.
#pragma once

#include <cstdint>

#include "kernels/digest_finish.cuh"
#include "kernels/digest_flush.h"

namespace forkpoint::device {

struct FlushShared {
  uint32_t results[kBlockWarps];  // of each warp
  Drawn drawn;
};

// What one thread of a digest has of it.
struct Flushed {
  DigestScratch* scratch = nullptr;
  uint64_t low = 0, high = 0;  // words i and i + 4, with their counts
  uint32_t ordinal = 0;
  bool complete = false;       // all eight words are
};

template <typename T>
__device__ T load_latest(const T* address) {
  return *reinterpret_cast<const volatile T*>(address);
}

// All threads of a warp. node 0: none.
__device__ inline Flushed fetch(DigestScratch* scratch, uint32_t node) {
  const int quarter = threadIdx.x % kFlushThreads;
  Flushed found;
  bool complete = false;
  if (node != 0) {
    found.scratch = scratch + node;
    found.low = load_latest(&found.scratch->word[quarter]);
    found.high = load_latest(&found.scratch->word[quarter + kFlushThreads]);
    found.ordinal = load_latest(&found.scratch->ordinal);
    const uint32_t broken = load_latest(&found.scratch->broken);
    complete = broken == 0 && found.low >> kWordBits == kAllCounted && found.high >> kWordBits == kAllCounted;
  }
  const unsigned all = ((1u << kFlushThreads) - 1) << (threadIdx.x % 32 - quarter);
  found.complete = (__ballot_sync(kAllLanes, complete) & all) == all;
  return found;
}

// Ready for the next run, which comes after this kernel.
__device__ inline void reset(const Flushed& found) {
  const int quarter = threadIdx.x % kFlushThreads;
  if (!found.complete) {
    if (quarter == 0) found.scratch->broken = 1;
    return;
  }
  found.scratch->word[quarter] = 0;
  found.scratch->word[quarter + kFlushThreads] = 0;
  if (quarter != 0) return;
  found.scratch->magnitude = 0;
  found.scratch->ordinal = found.ordinal + 1;
}

// How many results of the block stand before this thread's; one of their threads each is the leader. All threads.
__device__ inline uint32_t rank_in_block(bool leads, FlushShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned leaders = __ballot_sync(kAllLanes, leads);
  if (lane == 0) shared.results[warp] = __popc(leaders);
  __syncthreads();
  uint32_t rank = __popc(leaders & ((1u << (lane - lane % kFlushThreads)) - 1));
  for (int i = 0; i < warp; ++i) rank += shared.results[i];
  return rank;
}

__device__ inline void send(const Flushed& found, uint32_t node, DigestSlot* slot, uint32_t ticket) {
  constexpr uint64_t kSum = (uint64_t{1} << kWordBits) - 1;
  const int quarter = threadIdx.x % kFlushThreads;
  write_word(slot, quarter, found.low & kSum, ticket);
  write_word(slot, quarter + kFlushThreads, found.high & kSum, ticket);
  if (quarter == 0) write_word(slot, kWordNode, uint64_t{found.ordinal} << 32 | node, ticket);
}

__device__ inline void flush_digests(const DigestFlush& work, FlushShared& shared) {
  static_assert(2 * kFlushThreads == kWordSums && kWordNode == kWordSums);
  const uint32_t entry = blockIdx.x * kFlushedByBlock + threadIdx.x / kFlushThreads;
  const uint32_t node = entry < work.count ? work.node[entry] : 0;
  const Flushed found = fetch(work.scratch, node);
  const bool leads = threadIdx.x % kFlushThreads == 0;
  const int lost = __syncthreads_count(leads && node != 0 && !found.complete);
  const uint32_t rank = rank_in_block(leads && found.complete, shared);
  if (threadIdx.x == 0) {
    uint32_t results = 0;
    for (const uint32_t count : shared.results) results += count;
    shared.drawn = results > 0 ? draw_slots(work.ring, results) : Drawn{};
    if (lost > 0) count_dropped(work.ring, lost);
  }
  if (node != 0) reset(found);
  __syncthreads();
  if (!found.complete || rank >= shared.drawn.count) return;
  const uint64_t number = shared.drawn.first + rank, capacity = work.ring->capacity;
  send(found, node, work.ring->slots + number % capacity, ring_ticket(number, capacity));
}

}  // namespace forkpoint::device
