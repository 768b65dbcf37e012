#include "kernels/digest_slot.h"

namespace forkpoint {

bool read_slot(const DigestSlot& slot, uint32_t ticket, SlotResult* result) {
  uint64_t word[kWordCount] = {};
  for (int i = 0; i < kSlotCells; ++i) {
    const uint64_t cell = __atomic_load_n(&slot.cell[i], __ATOMIC_ACQUIRE);
    if (cell >> 32 != ticket) return false;
    word[i / 2] |= (cell & 0xFFFFFFFFu) << (32 * (i % 2));
  }
  const auto joined = [&](int low) { return word[low] + (word[low + 1] << 32); };
  result->raw.digest = {joined(kWordA), joined(kWordB)};
  result->raw.word_sum = word[kWordSum];
  result->raw.magnitude = {joined(kWordMagnitude), word[kWordNonfinite]};
  result->node = static_cast<uint32_t>(word[kWordNode]);
  result->ordinal = static_cast<uint32_t>(word[kWordNode] >> 32);
  return true;
}

}  // namespace forkpoint
