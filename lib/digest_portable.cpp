#include <cstring>
#include <vector>

#include "lib/digest_kernels.h"

namespace forkpoint::digest_kernels {
namespace {

WordSums sum_words(const unsigned char* data, uint32_t first_word, uint32_t count, bool) {
  const KeyTables& tables = key_tables();
  WordSums sums;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, data + 4 * size_t{i}, 4);
    sums.a += uint64_t{tables.key[0][first_word + i]} * word;
    sums.b += uint64_t{tables.key[1][first_word + i]} * word;
    sums.plain += word;
  }
  return sums;
}

template <typename Unsigned>
MagnitudeStats scan(const unsigned char* data, size_t count, const MagnitudeRule& rule) {
  MagnitudeStats stats;
  const auto mask = static_cast<Unsigned>(rule.mask);
  const bool absolute = rule.kind == MagnitudeKind::absolute;
  for (size_t i = 0; i < count; ++i) {
    Unsigned bits;
    std::memcpy(&bits, data + i * sizeof(Unsigned), sizeof(Unsigned));
    const bool negative = absolute && (bits >> (8 * sizeof(Unsigned) - 1));
    const Unsigned magnitude =
        negative ? static_cast<Unsigned>(Unsigned{0} - bits) : static_cast<Unsigned>(bits & mask);
    if (magnitude >= rule.nonfinite_from) {
      stats.nonfinite += rule.nonfinite_from != ~uint64_t{0};
      if (rule.nonfinite_from != ~uint64_t{0}) continue;
    }
    if (magnitude > stats.largest_finite) stats.largest_finite = magnitude;
  }
  return stats;
}

MagnitudeStats scan_magnitudes(const unsigned char* data, size_t count, const MagnitudeRule& rule) {
  switch (rule.bytes) {
    case 1:
      return scan<uint8_t>(data, count, rule);
    case 2:
      return scan<uint16_t>(data, count, rule);
    case 4:
      return scan<uint32_t>(data, count, rule);
    default:
      return scan<uint64_t>(data, count, rule);
  }
}

KeyTables make_key_tables() {
  KeyTables tables = {};
  for (uint32_t i = 0; i < kTileWords; ++i) {
    tables.key[0][i] = word_key<1>(i);
    tables.key[1][i] = word_key<2>(i);
  }
  return tables;
}

std::vector<const Kernels*> find_available() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) found.push_back(&kAvx512);
  if (__builtin_cpu_supports("avx2")) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

}  // namespace

const KeyTables& key_tables() {
  static const KeyTables tables = make_key_tables();
  return tables;
}

const Kernels kPortable = {"portable", sum_words, scan_magnitudes};

std::span<const Kernels* const> available() {
  static const std::vector<const Kernels*> found = find_available();
  return found;
}

}  // namespace forkpoint::digest_kernels
