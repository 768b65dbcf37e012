// Division of 32-bit numbers by one that the host knows, in a multiplication and a few shifts (Granlund and Montgomery:
// Division by Invariant Integers using Multiplication, PLDI 1994, figure 4.1).
#pragma once

#include <cstdint>

#include "lib/digest_mix.h"

namespace forkpoint {

struct Divider {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t first_shift = 0;
  uint32_t second_shift = 0;
  FORKPOINT_HD uint32_t divide(uint32_t number) const {
    const auto high = static_cast<uint32_t>((uint64_t{multiplier} * number) >> 32);
    return (high + ((number - high) >> first_shift)) >> second_shift;
  }
};

// REQUIRES: divisor > 0.
constexpr Divider make_divider(uint32_t divisor) {
  uint32_t bits = 0;  // smallest with 2^bits >= divisor
  while (bits < 32 && (uint64_t{1} << bits) < divisor) ++bits;
  const uint64_t excess = (uint64_t{1} << bits) - divisor;
  return {divisor, static_cast<uint32_t>((excess << 32) / divisor + 1), bits < 1 ? bits : 1, bits < 1 ? 0 : bits - 1};
}

}  // namespace forkpoint
