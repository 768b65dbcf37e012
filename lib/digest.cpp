#include "lib/digest.h"

#include "lib/digest_kernels.h"
#include "lib/digest_magnitude.h"
#include "lib/digest_raw.h"

namespace forkpoint {
namespace {

using digest_kernels::Kernels;
using digest_kernels::WordSums;

// Bytes of one word that is not wholly there: each stands where it stands in the logical tensor.
void add_bytes(const unsigned char* data, size_t count, uint64_t first_byte, RawDigest& out) {
  uint32_t word = 0;
  for (size_t i = 0; i < count; ++i) word |= uint32_t{data[i]} << (8 * ((first_byte + i) & 3));
  out.digest.a += key<1>(first_byte >> 2) * word;
  out.digest.b += key<2>(first_byte >> 2) * word;
  out.word_sum += word;
}

// beyond: bytes that follow the words and will be read next.
void add_words(const Kernels& kernels, const unsigned char* data, uint64_t words, uint64_t first_word, size_t beyond,
               RawDigest& out) {
  while (words > 0) {
    const auto in_tile = static_cast<uint32_t>(first_word % kTileWords);
    const uint64_t room = kTileWords - in_tile;
    const auto count = static_cast<uint32_t>(words < room ? words : room);
    const bool read_ahead = 4 * (words - count) + beyond >= digest_kernels::kReadAheadBytes;
    const WordSums sums = kernels.sum_words(data, in_tile, count, read_ahead);
    out.digest.a += tile_key<1>(first_word / kTileWords) * sums.a;
    out.digest.b += tile_key<2>(first_word / kTileWords) * sums.b;
    out.word_sum += sums.plain;
    data += 4 * size_t{count};
    first_word += count;
    words -= count;
  }
}

void add_range(const Kernels& kernels, const unsigned char* data, size_t size_bytes, uint64_t first_byte, size_t beyond,
               RawDigest& out) {
  if (const size_t misplaced = first_byte & 3; misplaced != 0) {
    const size_t head = size_bytes < 4 - misplaced ? size_bytes : 4 - misplaced;
    add_bytes(data, head, first_byte, out);
    data += head;
    first_byte += head;
    size_bytes -= head;
  }
  add_words(kernels, data, size_bytes / 4, first_byte / 4, beyond, out);
  const size_t tail = size_bytes & 3;
  if (tail != 0) add_bytes(data + (size_bytes - tail), tail, first_byte + (size_bytes - tail), out);
}

}  // namespace

void add_contiguous(const void* data, size_t size_bytes, DType dtype, uint64_t first_byte, RawDigest& out) {
  // Words and elements are read in turn, a piece that fits the first-level cache at a time.
  constexpr size_t kPieceBytes = kTileBytes;
  const Kernels& kernels = digest_kernels::best();
  const MagnitudeRule rule = magnitude_rule(dtype);
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t begin = 0; begin < size_bytes; begin += kPieceBytes) {
    const size_t piece = size_bytes - begin < kPieceBytes ? size_bytes - begin : kPieceBytes;
    add_range(kernels, bytes + begin, piece, first_byte + begin, size_bytes - begin - piece, out);
    if (rule.kind != MagnitudeKind::none) {
      out.magnitude.merge(kernels.scan_magnitudes(bytes + begin, piece / rule.bytes, rule));
    }
  }
}

DigestResult finish(DType dtype, const RawDigest& raw) {
  DigestResult result;
  result.digest = raw.digest;
  result.stats.absmax = absmax_from_magnitude(dtype, raw.magnitude.largest_finite);
  result.stats.nonfinite = raw.magnitude.nonfinite;
  result.stats.word_sum = fold_word_sum(raw.word_sum);
  return result;
}

DigestResult digest_bytes(const void* data, size_t size_bytes, DType dtype, uint64_t first_byte) {
  RawDigest raw;
  add_contiguous(data, size_bytes, dtype, first_byte, raw);
  return finish(dtype, raw);
}

Digest digest_only(const void* data, size_t size_bytes, uint64_t first_byte) {
  RawDigest raw;
  add_range(digest_kernels::best(), static_cast<const unsigned char*>(data), size_bytes, first_byte, 0, raw);
  return raw.digest;
}

}  // namespace forkpoint
