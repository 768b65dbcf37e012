// The payload of a records frame: one column after another. Digests and word sums as they are (they do not compress);
// every other column split into byte planes, each stored as one constant, raw or zstd. Not for callers outside lib.
#pragma once

#include <zstd.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

struct ZstdFree {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// Bytes of a record as a reader holds it: raw_bytes of a records frame is this times the number of records.
inline constexpr uint32_t kRawRecordBytes = 16 + 4 + 4 + 4 + 4 + 4 + 8 + 4 + 1;

// Not thread-safe; keeps its memory between calls.
class ColumnEncoder {
 public:
  // Appends the payload of all records in columns to *out.
  void encode(const StepColumns& columns, std::vector<uint8_t>* out);

 private:
  void put_planes(const uint8_t* values, size_t size_bytes, size_t count, std::vector<uint8_t>* out);
  std::unique_ptr<ZSTD_CCtx, ZstdFree> context_;
  std::vector<uint8_t> plane_;
  std::vector<uint32_t> steps_;
};

// Not thread-safe; keeps its memory between calls.
class ColumnDecoder {
 public:
  // Writes records [first, first + count) of *columns, which are that large already. False when the payload is not that
  // of `count` records; the rows are then unspecified.
  bool decode(std::span<const uint8_t> payload, size_t first, size_t count, StepColumns* columns);

 private:
  template <typename Value>
  bool get_planes(size_t count, Value* values);
  bool get_plane(size_t count, const uint8_t** plane, uint8_t* constant);
  bool take(size_t size_bytes, const uint8_t** bytes);
  std::span<const uint8_t> left_;
  std::unique_ptr<ZSTD_DCtx, ZstdFree> context_;
  std::vector<uint8_t> plane_;
  std::vector<uint32_t> absmax_;
};

void resize(StepColumns* columns, size_t count);
void append(const Record& record, StepColumns* columns);

}  // namespace forkpoint
