#include <array>
#include <bit>

#include "lib/digest.h"
#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

// Of an odd number, modulo 2^64: each round of Newton's iteration doubles the number of right bits, 3 to begin with.
constexpr uint64_t inverse(uint64_t odd) {
  uint64_t x = odd;
  for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
  return x;
}

// Where t2[j] / t1[j] is known, j is: an open-addressed table of the ratios' low 33 bits.
//
// One changed word i = 512 T + j with change d gives dD1 = K1(i) d and dD2 = K2(i) d, so with d = 2^v * odd (v <= 31)
// t2[j] / t1[j] = (dD2 >> v) / (dD1 >> v) * M1(T) / M2(T) modulo 2^(64 - v): one look-up a tile instead of a test a
// word.
class RatioTable {
 public:
  RatioTable() {
    for (uint32_t j = 0; j < kTileWords; ++j) {
      const uint64_t ratio = uint64_t{word_key<2>(j)} * inverse(word_key<1>(j)) & kMask;
      uint32_t slot = hash(ratio);
      while (entry_[slot].word != kFree) slot = (slot + 1) % kSlots;
      entry_[slot] = {ratio, j};
    }
  }
  // Calls check(j) for every j whose ratio agrees in its low 33 bits.
  template <typename Check>
  void find(uint64_t ratio, Check check) const {
    ratio &= kMask;
    for (uint32_t slot = hash(ratio); entry_[slot].word != kFree; slot = (slot + 1) % kSlots) {
      if (entry_[slot].ratio == ratio) check(entry_[slot].word);
    }
  }

 private:
  static constexpr uint64_t kMask = (uint64_t{1} << 33) - 1;
  static constexpr uint32_t kSlots = 4096, kFree = ~0u;
  // Ratios of odd numbers are odd: the lowest bit says nothing.
  static uint32_t hash(uint64_t ratio) { return static_cast<uint32_t>(ratio >> 1) % kSlots; }
  struct Entry {
    uint64_t ratio = 0;
    uint32_t word = kFree;
  };
  std::array<Entry, kSlots> entry_;
};

}  // namespace

bool find_single_word_change(const Digest& first, const Digest& second, uint64_t n_words, WordChange* change) {
  const Digest difference = second - first;
  if (difference.a == 0 || difference.b == 0) return false;
  const int shift = std::countr_zero(difference.a);
  if (shift > 31 || std::countr_zero(difference.b) != shift) return false;
  static const RatioTable table;
  const uint64_t quotient = (difference.b >> shift) * inverse(difference.a >> shift);
  constexpr int64_t kLargest = (int64_t{1} << 32) - 1;
  int found = 0;
  const uint64_t tiles = n_words / kTileWords + (n_words % kTileWords != 0);
  for (uint64_t tile = 0; tile < tiles; ++tile) {
    const uint64_t ratio = quotient * tile_key<1>(tile) * inverse(tile_key<2>(tile));
    table.find(ratio, [&](uint32_t in_tile) {
      const uint64_t word = tile * kTileWords + in_tile;
      const uint64_t delta = difference.a * inverse(key<1>(word));
      const auto value = static_cast<int64_t>(delta);
      if (word >= n_words || value > kLargest || value < -kLargest || delta * key<2>(word) != difference.b) return;
      ++found;
      *change = {word, value};
    });
  }
  // Two words that explain the difference equally well name neither.
  return found == 1;
}

}  // namespace forkpoint
