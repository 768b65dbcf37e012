// The digest of a tensor: what two runs compare. See lib/digest_mix.h for the definition (shared with the device code).
//
// D(T) = sum over 32-bit little-endian words i of K(i) * w_i modulo 2^64, in two lanes (K1, K2). It is a sum, so it is
// independent of the order in which words are visited and additive over any split of the bytes.
// All functions here are pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lib/dtype.h"

namespace forkpoint {

struct Digest {
  uint64_t a = 0;
  uint64_t b = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
  // Digests of disjoint parts of one tensor add up to the digest of the whole.
  Digest& operator+=(const Digest& other) { a += other.a; b += other.b; return *this; }
  friend Digest operator+(Digest left, const Digest& right) { return left += right; }
  friend Digest operator-(const Digest& left, const Digest& right) { return {left.a - right.a, left.b - right.b}; }
};

// Taken in the same single read as the digest; integers or maxima only, so order-free.
struct TensorStats {
  // Largest magnitude among the finite elements, rounded to float (values beyond float range saturate to FLT_MAX).
  // 0 for raw and f4x2 tensors and for empty ones.
  float absmax = 0;
  uint64_t nonfinite = 0;  // NaN and infinite elements (a complex element counts once a part)
  uint32_t word_sum = 0;   // fold_word_sum of the plain sum of all 32-bit words: equal under any permutation of words
};

struct DigestResult {
  Digest digest;
  TensorStats stats;
};

// The plain sum modulo 2^32 - 1 (and so, since 2^16 - 1 and 2^8 - 1 divide it, order-free also for 16-bit and 8-bit
// elements), canonical: never 0xFFFFFFFF.
constexpr uint32_t fold_word_sum(uint64_t word_sum) {
  const uint64_t once = (word_sum >> 32) + (word_sum & 0xFFFFFFFFu);
  const uint64_t twice = (once >> 32) + (once & 0xFFFFFFFFu);
  return twice == 0xFFFFFFFFu ? 0 : static_cast<uint32_t>(twice);
}

// Where an element stands in the (global, row-major) tensor that it belongs to, and where it lies in memory.
// shape, strides and positions have one entry a dimension, in elements, outermost first; at most kMaxDims of them.
// Element (i0, i1, ...) lies at base + sum(i_d * strides[d]) elements and has the logical index
// first_position + sum(i_d * positions[d]). For a whole tensor, positions are the row-major strides of shape and
// first_position is 0; for a shard they come from the global shape and the shard's offset (see shard_view).
inline constexpr int kMaxDims = 16;
struct TensorView {
  DType dtype = DType::raw;
  int dims = 0;                  // 0: one element (a scalar tensor)
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
  int64_t positions[kMaxDims] = {};
  int64_t first_position = 0;
};

// REQUIRES: at most kMaxDims dimensions, strides.size() == shape.size() or strides empty (contiguous); else throws Error.
TensorView whole_view(DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides = {});
// A box of a global tensor. REQUIRES: the box lies within global_shape; else throws Error.
TensorView shard_view(DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides,
                      std::span<const int64_t> global_shape, std::span<const int64_t> global_offset);

// data holds size_bytes bytes that start at byte first_byte of the logical tensor. Any alignment.
DigestResult digest_bytes(const void* data, size_t size_bytes, DType dtype = DType::raw, uint64_t first_byte = 0);
// Digest alone, without statistics: the checksum of hash-stream frames and files.
Digest digest_only(const void* data, size_t size_bytes, uint64_t first_byte = 0);
// Logical order, no copy. base is the address of element (0, 0, ...); strides may be zero or negative.
DigestResult digest_view(const void* base, const TensorView& view);

// When exactly one 32-bit word of n_words differs between two tensors of equal size, its index and arithmetic change
// follow from the digests alone. Returns false when no single word explains the difference.
struct WordChange {
  uint64_t word = 0;
  int64_t delta = 0;  // second minus first, in -(2^32 - 1) .. 2^32 - 1, never 0
};
bool find_single_word_change(const Digest& first, const Digest& second, uint64_t n_words, WordChange* change);

}  // namespace forkpoint
