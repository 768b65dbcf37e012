// The payload of a records frame: one column after another. Digests and word sums as they are (they do not compress);
// every other column as byte planes (hash_stream_planes.h). Not for callers outside lib.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/hash_stream.h"
#include "lib/hash_stream_planes.h"

namespace forkpoint {

// Bytes of a record as a reader holds it: raw_bytes of a records frame is this times the number of records.
inline constexpr uint32_t kRawRecordBytes = 16 + 4 + 4 + 4 + 4 + 4 + 8 + 4 + 1;

// Not thread-safe; keeps its memory between calls.
class ColumnEncoder {
 public:
  // Appends the payload of all records in columns to *out.
  void encode(const StepColumns& columns, std::vector<uint8_t>* out);

 private:
  PlaneEncoder planes_;
  std::vector<uint32_t> numbers_;
};

// Not thread-safe; keeps its memory between calls.
class ColumnDecoder {
 public:
  // Writes records [first, first + count) of *columns, which are that large already. False when the payload is not that
  // of `count` records; the rows are then unspecified.
  bool decode(std::span<const uint8_t> payload, size_t first, size_t count, StepColumns* columns);

 private:
  PlaneDecoder planes_;
  std::vector<uint32_t> absmax_;
};

void resize(StepColumns* columns, size_t count);
void append(const Record& record, StepColumns* columns);

}  // namespace forkpoint
