// The end of a digest: the threads' sums become the block's, the blocks' become the tensor's, and these go to the slot.
#pragma once

#include <cstdint>

#include "kernels/digest_launch.h"

namespace forkpoint::device {

inline constexpr int kBlockThreads = kDigestBlockThreads;
inline constexpr int kBlockWarps = kBlockThreads / 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Four of two words each, in the order of DigestWord: the last is the folded word sum and the non-finite count.
enum Part : int { kPartA, kPartB, kPartMagnitude, kPartWordSum, kPartNonfinite, kPartCount };

struct Sums {
  uint64_t a = 0, b = 0, word_sum = 0, magnitude = 0, nonfinite = 0;
};

__device__ inline uint64_t combine(int part, uint64_t left, uint64_t right) {
  return part == kPartMagnitude ? max(left, right) : left + right;
}

// kMagnitude: whether there can be any magnitude or non-finite element at all; of raw bytes there is none.
template <bool kMagnitude>
__device__ Sums warp_sums(Sums sums) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sums.a += __shfl_xor_sync(kAllLanes, sums.a, step);
    sums.b += __shfl_xor_sync(kAllLanes, sums.b, step);
    sums.word_sum += __shfl_xor_sync(kAllLanes, sums.word_sum, step);
  }
  if (!kMagnitude) return sums;
  // Most tensors have no non-finite element, and 32-bit magnitudes need no 64-bit maximum.
  const uint32_t upper = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(sums.magnitude >> 32));
  const uint32_t lower =
      static_cast<uint32_t>(sums.magnitude >> 32) == upper ? static_cast<uint32_t>(sums.magnitude) : 0;
  sums.magnitude = uint64_t{upper} << 32 | __reduce_max_sync(kAllLanes, lower);
  if (__any_sync(kAllLanes, sums.nonfinite != 0)) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums.nonfinite += __shfl_xor_sync(kAllLanes, sums.nonfinite, step);
  }
  return sums;
}

// Of the calling (first) warp: lane i < kPartCount gets the block's part i.
template <bool kMagnitude>
__device__ uint64_t block_part(const Sums& sums, uint64_t (&shared)[kBlockWarps][kPartCount]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Sums total = warp_sums<kMagnitude>(sums);
  if (lane == 0) {
    shared[warp][kPartA] = total.a;
    shared[warp][kPartB] = total.b;
    shared[warp][kPartWordSum] = total.word_sum;
    shared[warp][kPartMagnitude] = total.magnitude;
    shared[warp][kPartNonfinite] = total.nonfinite;
  }
  __syncthreads();
  uint64_t value = 0;
  if (warp == 0 && lane < kPartCount) {
#pragma unroll
    for (int i = 0; i < kBlockWarps; ++i) value = combine(lane, value, shared[i][lane]);
  }
  return value;
}

// The largest magnitude as a sum: what this block raises the maximum by. Over all blocks the raises add up to it, so it
// can be counted like the others.
__device__ inline uint64_t raise_magnitude(DigestScratch* scratch, uint64_t mine, uint64_t seen) {
  if (mine <= seen) return 0;
  const uint64_t before = atomicMax(reinterpret_cast<unsigned long long*>(&scratch->magnitude), mine);
  return mine > before ? mine - before : 0;
}

// Lane i brings the block's word i. True in the lanes whose word is complete: they have its total, and the scratch is
// made ready for the next digest. That is done by the memory itself and not waited for (a third of a microsecond): the
// next digest with this scratch comes after the answer has reached the host and a launch of the host's this device.
__device__ inline bool join_blocks(DigestScratch* scratch, uint32_t parts, uint64_t& word) {
  const int lane = threadIdx.x % 32;
  bool complete = false;
  if (lane < kWordSums) {
    constexpr uint64_t kOne = uint64_t{1} << kWordBits;
    const uint64_t before = atomicAdd(reinterpret_cast<unsigned long long*>(&scratch->word[lane]), word | kOne);
    complete = before >> kWordBits == parts - 1;
    word = (before + word) & (kOne - 1);
    if (complete) atomicExch(reinterpret_cast<unsigned long long*>(&scratch->word[lane]), 0ull);
    // Whoever added to a magnitude word had its maximum taken before.
    if (complete && lane == kWordMagnitude) {
      atomicExch(reinterpret_cast<unsigned long long*>(&scratch->magnitude), 0ull);
    }
  }
  return complete;
}

// As join_blocks, for a ring: true in all lanes of one block, which draws the slot.
__device__ inline bool join_blocks_in_one(DigestScratch* scratch, uint32_t parts, uint64_t& word) {
  const int lane = threadIdx.x % 32;
  auto* total = reinterpret_cast<unsigned long long*>(&scratch->word[lane]);
  if (lane < kWordSums) atomicAdd(total, word);
  __threadfence();
  __syncwarp();
  uint32_t before = 0;
  if (lane == 0) before = atomicAdd(&scratch->blocks_done, 1u);
  if (__shfl_sync(kAllLanes, before, 0) != parts - 1) return false;
  __threadfence();
  if (lane < kWordSums) word = atomicExch(total, 0ull);
  if (lane == 0) scratch->blocks_done = 0;
  if (lane == kWordMagnitude) scratch->magnitude = 0;
  return true;
}

// One thread. Results that reach nobody.
__device__ inline void count_dropped(DigestRing* ring, uint32_t count) {
  const unsigned long long before = atomicAdd(reinterpret_cast<unsigned long long*>(&ring->dropped_count), count);
  *reinterpret_cast<volatile uint64_t*>(ring->dropped) = before + count;
}

struct Drawn {
  uint64_t first;  // number of the first result
  uint32_t count;  // as many as there was room for
};

// One thread. Places for `wanted` results, one after the other. What finds no room is counted, never waited for.
__device__ inline Drawn draw_slots(DigestRing* ring, uint32_t wanted) {
  auto* taken = reinterpret_cast<unsigned long long*>(&ring->taken);
  unsigned long long mine = *reinterpret_cast<volatile unsigned long long*>(taken);
  uint64_t consumed = *reinterpret_cast<volatile uint64_t*>(&ring->consumed_seen);
  const auto capacity = static_cast<int64_t>(ring->capacity);
  for (;;) {
    // Signed: `mine` may be older than what was consumed since; the exchange below then finds out.
    int64_t room = capacity - static_cast<int64_t>(mine - consumed);
    if (room < wanted) {
      // Only now ask the host's memory: it is a microsecond away. An old value may be stored over a newer one; it is
      // then looked up again.
      consumed = *reinterpret_cast<const volatile uint64_t*>(ring->consumed);
      *reinterpret_cast<volatile uint64_t*>(&ring->consumed_seen) = consumed;
      room = capacity - static_cast<int64_t>(mine - consumed);
    }
    const auto count = static_cast<uint32_t>(min(max(room, int64_t{0}), int64_t{wanted}));
    const unsigned long long found = count == 0 ? mine : atomicCAS(taken, mine, mine + count);
    if (found == mine) {
      if (count < wanted) count_dropped(ring, wanted - count);
      return {mine, count};
    }
    mine = found;
  }
}

__device__ inline void write_word(DigestSlot* slot, int number, uint64_t word, uint32_t ticket) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(&slot->cell[2 * number]),
               "l"(uint64_t{ticket} << 32 | static_cast<uint32_t>(word)), "l"(uint64_t{ticket} << 32 | word >> 32)
               : "memory");
}

// Lane i has word i, all of them.
__device__ inline void write_to_ring(const DigestTarget& target, uint64_t word) {
  const int lane = threadIdx.x % 32;
  DigestSlot* slot = nullptr;
  uint32_t ticket = 0, ordinal = 0;
  if (lane == 0) {
    ordinal = target.scratch->ordinal++;
    const Drawn drawn = draw_slots(target.ring, 1);
    if (drawn.count == 1) {
      ticket = ring_ticket(drawn.first, target.ring->capacity);
      slot = target.ring->slots + drawn.first % target.ring->capacity;
    }
  }
  slot = reinterpret_cast<DigestSlot*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(slot), 0));
  ticket = __shfl_sync(kAllLanes, ticket, 0);
  ordinal = __shfl_sync(kAllLanes, ordinal, 0);
  if (lane == kWordNode) word = uint64_t{ordinal} << 32 | target.node;
  if (slot != nullptr && lane < kWordCount) write_word(slot, lane, word, ticket);
}

// Lane i brings the block's word i, which stays in the scratch for a flush to fetch: nothing to wait for. The first
// part also counts for those that are not there, so that a complete word's count is kAllCounted, whatever the parts.
__device__ inline void keep_in_scratch(DigestScratch* scratch, uint32_t part, uint32_t parts, uint64_t word) {
  const int lane = threadIdx.x % 32;
  const uint64_t count = part == 0 ? kAllCounted + 1 - parts : 1;
  if (lane < kWordSums) {
    // Without a result, which atomicAdd has for the assembler even where nobody uses it.
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&scratch->word[lane]), "l"(word | count << kWordBits)
                 : "memory");
  }
}

// All threads of a block that holds one of target's `parts` parts: which one, only a flush needs to know.
template <bool kMagnitude>
__device__ void finish_digest(const Sums& sums, const DigestTarget& target, uint32_t part_number, uint32_t parts,
                              uint64_t (&shared)[kBlockWarps][kPartCount]) {
  // Asked for early: most blocks raise nothing, and then have one atomic operation to wait for instead of two.
  uint64_t seen = 0;
  if (kMagnitude && parts > 1 && threadIdx.x == kPartMagnitude) {
    seen = *reinterpret_cast<const volatile uint64_t*>(&target.scratch->magnitude);
  }
  uint64_t part = block_part<kMagnitude>(sums, shared);
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  if (kMagnitude && parts > 1 && lane == kPartMagnitude) part = raise_magnitude(target.scratch, part, seen);
  if (lane == kPartWordSum) part = fold_word_sum(part);
  part = __shfl_sync(kAllLanes, part, lane == kWordNonfinite ? kPartNonfinite : lane / 2 % kPartCount);
  uint64_t word = lane == kWordNonfinite ? part : lane % 2 == 0 ? static_cast<uint32_t>(part) : part >> 32;
  if (target.ring != nullptr) {
    if (parts == 1 || join_blocks_in_one(target.scratch, parts, word)) write_to_ring(target, word);
    return;
  }
  if (target.slot == nullptr) return keep_in_scratch(target.scratch, part_number, parts, word);
  bool complete = true;
  if (parts > 1) complete = join_blocks(target.scratch, parts, word);
  const bool last_complete = __shfl_sync(kAllLanes, complete, kWordNonfinite);
  if (lane == kWordNode) {
    complete = last_complete;
    word = target.node;
  }
  if (complete && lane < kWordCount) write_word(target.slot, lane, word, target.ticket);
}

}  // namespace forkpoint::device
