// Magnitudes of the elements within 32-bit words, one accumulator a DigestLoop: absmax and non-finite count in the same
// read as the digest.
#pragma once

#include <cstdint>

#include "kernels/digest_launch.h"

namespace forkpoint::device {

struct MagnitudeParams {
  uint32_t mask;
  uint64_t largest_finite;
};

// Words come in groups: add() each of a group's, then settle(); where that is false the group holds a non-finite
// element, and recount() must see all its words again (rare, so that the common path neither counts nor selects).
// largest() and nonfinite() are this thread's.
template <DigestLoop kLoop>
struct Magnitude;

template <>
struct Magnitude<kLoopNone> {
  __device__ explicit Magnitude(MagnitudeParams) {}
  template <int N>
  __device__ void add(const uint32_t (&)[N]) {}
  __device__ bool settle() { return true; }
  template <int N>
  __device__ void recount(const uint32_t (&)[N]) {}
  __device__ uint64_t largest() const { return 0; }
  __device__ uint32_t nonfinite() const { return 0; }
};

// Maxima of words that hold one, two or four elements. Four are kept as two halves whose lower byte only breaks ties.
template <int kBits>
struct Packed {
  static __device__ uint32_t largest(uint32_t left, uint32_t right) {
    return kBits == 32 ? max(left, right) : __vmaxu2(left, right);
  }
  static __device__ uint32_t largest_signed(uint32_t left, uint32_t right) {
    return kBits == 32 ? static_cast<uint32_t>(max(static_cast<int>(left), static_cast<int>(right)))
                       : __vmaxs2(left, right);
  }
  static __device__ uint32_t smallest_signed(uint32_t left, uint32_t right) {
    return kBits == 32 ? static_cast<uint32_t>(min(static_cast<int>(left), static_cast<int>(right)))
                       : __vmins2(left, right);
  }
  // `value` as every element of a packed maximum.
  static __device__ uint32_t repeated(uint32_t value) {
    if constexpr (kBits == 32) return value;
    return ((kBits == 16 ? value : value << 8 | 0xFFu) & 0xFFFFu) * 0x00010001u;
  }
  static __device__ uint32_t peak(uint32_t packed) {
    if constexpr (kBits == 32) return packed;
    const uint32_t half = max(packed >> 16, packed & 0xFFFFu);
    return kBits == 16 ? half : half >> 8;
  }
};

// Floats (sign and magnitude) and unsigned integers of 8, 16 or 32 bits: as unsigned numbers the negative floats come
// out largest, as signed ones the positive, so that no word need be masked.
template <int kBits>
struct Masked {
  using Lanes = Packed<kBits>;
  uint32_t mask, limit;  // limit: the largest finite magnitude
  uint32_t best = 0, count = 0;
  uint32_t as_unsigned = 0, as_signed = 0;  // of the group
  __device__ explicit Masked(MagnitudeParams params)
      : mask(params.mask), limit(Lanes::repeated(static_cast<uint32_t>(params.largest_finite))) {}

  template <int N>
  __device__ void add(const uint32_t (&words)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      include(words[i]);
      if constexpr (kBits == 8) include(words[i] << 8);
    }
  }
  __device__ bool settle() {
    const uint32_t most = Lanes::largest(as_unsigned & mask, as_signed);
    as_unsigned = as_signed = 0;
    const uint32_t joined = Lanes::largest(most, best);
    if (Lanes::largest(most, limit) != limit) return false;
    best = joined;
    return true;
  }
  template <int N>
  __device__ void recount(const uint32_t (&words)[N]) {
    constexpr uint32_t kOne = ~0u >> (32 - kBits);
    const uint32_t most = Lanes::peak(limit);
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int shift = 0; shift < 32; shift += kBits) {
        const uint32_t magnitude = ((words[i] & mask) >> shift) & kOne;
        const bool finite = magnitude <= most;
        count += !finite;
        best = Lanes::largest(best, finite ? magnitude << (kBits == 8 ? 8 : 0) : 0);
      }
    }
  }
  __device__ uint64_t largest() const { return Lanes::peak(best); }
  __device__ uint32_t nonfinite() const { return count; }

 private:
  __device__ void include(uint32_t word) {
    as_unsigned = Lanes::largest(as_unsigned, word);
    as_signed = Lanes::largest_signed(as_signed, word);
  }
};
template <>
struct Magnitude<kLoopMasked8> : Masked<8> {
  using Masked::Masked;
};
template <>
struct Magnitude<kLoopMasked16> : Masked<16> {
  using Masked::Masked;
};
template <>
struct Magnitude<kLoopMasked32> : Masked<32> {
  using Masked::Masked;
};

template <>
struct Magnitude<kLoopMasked64> {
  uint32_t mask;
  uint64_t limit, best = 0, group = 0;
  uint32_t count = 0;
  __device__ explicit Magnitude(MagnitudeParams params) : mask(params.mask), limit(params.largest_finite) {}
  template <int N>
  __device__ void add(const uint32_t (&words)[N]) {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) group = max(group, magnitude(words, i));
  }
  __device__ bool settle() {
    const bool finite = group <= limit;
    if (finite) best = max(best, group);
    group = 0;
    return finite;
  }
  template <int N>
  __device__ void recount(const uint32_t (&words)[N]) {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) {
      const uint64_t value = magnitude(words, i);
      count += value > limit;
      best = max(best, value > limit ? 0 : value);
    }
  }
  __device__ uint64_t largest() const { return best; }
  __device__ uint32_t nonfinite() const { return count; }

 private:
  template <int N>
  __device__ uint64_t magnitude(const uint32_t (&words)[N], int i) const {
    return words[i] | uint64_t{words[i + 1] & mask} << 32;
  }
};

// Signed integers of 8, 16 or 32 bits: largest and smallest, so that no element's absolute value need be formed.
template <int kBits>
struct Absolute {
  using Lanes = Packed<kBits>;
  uint32_t most = 0, least = 0;
  __device__ explicit Absolute(MagnitudeParams) {}
  template <int N>
  __device__ void add(const uint32_t (&words)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      include(words[i]);
      if constexpr (kBits == 8) include(words[i] << 8);
    }
  }
  __device__ bool settle() { return true; }
  template <int N>
  __device__ void recount(const uint32_t (&)[N]) {}
  __device__ uint64_t largest() const {
    if constexpr (kBits == 32) return max(most, 0u - least);
    constexpr int kShift = kBits == 8 ? 8 : 0;  // the upper byte of a half counts
    const auto half = [](uint32_t value, int shift) {
      return static_cast<int>(static_cast<int16_t>(value >> shift)) >> kShift;
    };
    return max(max(half(most, 0), half(most, 16)), max(-half(least, 0), -half(least, 16)));
  }
  __device__ uint32_t nonfinite() const { return 0; }

 private:
  __device__ void include(uint32_t word) {
    most = Lanes::largest_signed(most, word);
    least = Lanes::smallest_signed(least, word);
  }
};
template <>
struct Magnitude<kLoopAbsolute8> : Absolute<8> {
  using Absolute::Absolute;
};
template <>
struct Magnitude<kLoopAbsolute16> : Absolute<16> {
  using Absolute::Absolute;
};
template <>
struct Magnitude<kLoopAbsolute32> : Absolute<32> {
  using Absolute::Absolute;
};

template <>
struct Magnitude<kLoopAbsolute64> {
  int64_t most = 0, least = 0;
  __device__ explicit Magnitude(MagnitudeParams) {}
  // One comparison tells which of two elements may be the largest and which the smallest.
  template <int N>
  __device__ void add(const uint32_t (&words)[N]) {
    static_assert(N % 4 == 0);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const auto left = static_cast<int64_t>(words[i] | uint64_t{words[i + 1]} << 32);
      const auto right = static_cast<int64_t>(words[i + 2] | uint64_t{words[i + 3]} << 32);
      const bool less = left < right;
      most = max(most, less ? right : left);
      least = min(least, less ? left : right);
    }
  }
  __device__ bool settle() { return true; }
  template <int N>
  __device__ void recount(const uint32_t (&)[N]) {}
  __device__ uint64_t largest() const { return max(static_cast<uint64_t>(most), 0 - static_cast<uint64_t>(least)); }
  __device__ uint32_t nonfinite() const { return 0; }
};

}  // namespace forkpoint::device
