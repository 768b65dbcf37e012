// The loops under lib/digest.cpp, one set for each instruction set; the best that the processor has is chosen once.
// Not an interface: use lib/digest.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lib/digest_magnitude.h"
#include "lib/digest_mix.h"

namespace forkpoint::digest_kernels {

// The word keys within a tile, with room for a vector that begins at the last one.
struct KeyTables {
  alignas(64) std::array<uint32_t, kTileWords + 32> key[2];
};
const KeyTables& key_tables();

struct WordSums {
  uint64_t a = 0;      // sum of t1[j] * w_j
  uint64_t b = 0;      // sum of t2[j] * w_j
  uint64_t plain = 0;  // sum of w_j
};

// count words at data (any alignment), the first of which is word first_word of its tile. read_ahead: the bytes up to
// kReadAheadBytes behind these will be read next, so fetch them now (a fifth faster than what the processor foresees).
// REQUIRES: first_word + count <= kTileWords.
inline constexpr size_t kReadAheadBytes = 4096;
using SumWords = WordSums (*)(const unsigned char* data, uint32_t first_word, uint32_t count, bool read_ahead);
// Magnitudes of count elements at data (any alignment). REQUIRES: rule.kind is not none.
using ScanMagnitudes = MagnitudeStats (*)(const unsigned char* data, size_t count, const MagnitudeRule& rule);

struct Kernels {
  const char* name;
  SumWords sum_words;
  ScanMagnitudes scan_magnitudes;
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif
// All that this processor can run, the best first.
std::span<const Kernels* const> available();
inline const Kernels& best() { return *available().front(); }

}  // namespace forkpoint::digest_kernels
