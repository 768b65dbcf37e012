// Definition of the digest's word keys, compiled for host and device. Nothing but arithmetic: no includes beyond <cstdint>.
//
// K(i) = t[i % 512] * M(i / 512) modulo 2^64, for each of two lanes: t is a table of 512 odd 32-bit keys, M a strong odd
// 64-bit mix of the 2 KiB tile's index. Odd keys are invertible, so a single changed word can be found from the digests.
// A product (never a sum) of the two parts, because sums of tables collide exactly on 2 x 2 exchanges; mixed and
// not periodic, because equal keys at two places would make an exchange of their words invisible.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FORKPOINT_HD __host__ __device__
#else
#define FORKPOINT_HD
#endif

namespace forkpoint {

inline constexpr uint32_t kTileWords = 512;
inline constexpr uint32_t kTileBytes = kTileWords * 4;

// Finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
FORKPOINT_HD constexpr uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

template <int kLane>  // 1 or 2
FORKPOINT_HD constexpr uint32_t word_key(uint32_t word_in_tile) {
  constexpr uint64_t kSeed = kLane == 1 ? 0x243F6A8885A308D3ull : 0xA4093822299F31D0ull;  // digits of pi
  return static_cast<uint32_t>(mix64(kSeed ^ (word_in_tile * 0xD1342543DE82EF95ull)) >> 32) | 1u;
}

template <int kLane>
FORKPOINT_HD constexpr uint64_t tile_key(uint64_t tile) {
  constexpr uint64_t kSeed = kLane == 1 ? 0x13198A2E03707344ull : 0x082EFA98EC4E6C89ull;
  return mix64(mix64(tile ^ kSeed) + kSeed) | 1u;
}

template <int kLane>
FORKPOINT_HD constexpr uint64_t key(uint64_t word) {
  return word_key<kLane>(static_cast<uint32_t>(word % kTileWords)) * tile_key<kLane>(word / kTileWords);
}

}  // namespace forkpoint
