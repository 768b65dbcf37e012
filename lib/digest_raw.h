// A digest while it is being summed: what the device kernels hand over and what parts of a tensor add up to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/digest.h"
#include "lib/digest_magnitude.h"

namespace forkpoint {

struct RawDigest {
  Digest digest;
  uint64_t word_sum = 0;  // plain sum of the words modulo 2^64, not yet folded
  MagnitudeStats magnitude;
};

// Adds size_bytes bytes that start at byte first_byte of the logical tensor.
void add_contiguous(const void* data, size_t size_bytes, DType dtype, uint64_t first_byte, RawDigest& out);
DigestResult finish(DType dtype, const RawDigest& raw);

}  // namespace forkpoint
