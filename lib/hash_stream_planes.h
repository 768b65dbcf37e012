// Columns of numbers as byte planes: plane k holds byte k of each value and is stored as one constant, raw or zstd.
// What the payloads of records frames and launches frames share. Not for callers outside lib.
#pragma once

#include <zstd.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace forkpoint {

struct ZstdFree {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// A difference to a prediction, modulo 2^32 or 2^64, so that small ones of either sign have few non-zero bytes.
constexpr uint32_t zigzag(uint32_t value) { return value << 1 ^ (0u - (value >> 31)); }
constexpr uint32_t unzigzag(uint32_t value) { return value >> 1 ^ (0u - (value & 1)); }
constexpr uint64_t zigzag(uint64_t value) { return value << 1 ^ (uint64_t{0} - (value >> 63)); }
constexpr uint64_t unzigzag(uint64_t value) { return value >> 1 ^ (uint64_t{0} - (value & 1)); }

void append_bytes(const void* data, size_t size_bytes, std::vector<uint8_t>* out);

// Not thread-safe; keeps its memory between calls.
class PlaneEncoder {
 public:
  // Appends the planes of `count` values to *out. Value: an unsigned number of 1, 4 or 8 bytes.
  template <typename Value>
  void put(const Value* values, size_t count, std::vector<uint8_t>* out);

 private:
  void put_varying(std::vector<uint8_t>* out);
  std::unique_ptr<ZSTD_CCtx, ZstdFree> context_;
  std::vector<uint8_t> plane_;
};

// Takes what a PlaneEncoder has put, from the front of a payload. Not thread-safe; keeps its memory between calls.
class PlaneDecoder {
 public:
  void open(std::span<const uint8_t> payload) { left_ = payload; }
  size_t left() const { return left_.size(); }
  // False when the payload does not go on with the planes of `count` values; *values is then unspecified.
  template <typename Value>
  bool get(size_t count, Value* values);
  // The next size_bytes as they are, valid as long as the payload; false when there are fewer.
  bool take(size_t size_bytes, const uint8_t** bytes);

 private:
  bool get_plane(size_t count, const uint8_t** plane, uint8_t* constant);
  std::span<const uint8_t> left_;
  std::unique_ptr<ZSTD_DCtx, ZstdFree> context_;
  std::vector<uint8_t> plane_;
};

}  // namespace forkpoint
