// The payload of a launches frame: the columns of its rows, then those of their buffers (FORMAT.md). A step's launches
// repeat each other (layer after layer), so a row names an earlier one of the frame, its model, and each column holds
// differences to the model. Not for callers outside lib.
#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "lib/hash_stream_planes.h"
#include "lib/launch.h"

namespace forkpoint {

// Bytes of a row and of a buffer as a reader holds them; together at most kMaxExpansion times those of the payload.
inline constexpr uint32_t kRawLaunchBytes = 1 + 1 + 4 + 4 + 4 + 12 + 12 + 4 + 4 + 16 + 8 + 8 + 4 + 4;
inline constexpr uint32_t kRawBufferBytes = 4 + 1 + 8 + 8 + 8 + 8 + 8 + 16;

// For each row the one before it that its columns are differences to: its model (an earlier row with the same key),
// else the last row that has no model either.
class RowModels {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFFu;
  // Makes room for `count` rows and forgets those before.
  void start(size_t count);
  // The next row. same(i): whether row i has its key, whose hash is given; the last such row becomes its model.
  template <typename Same>
  void find(uint64_t hash, Same same);
  // From the distances of all rows; false when one points to before the first row.
  bool follow(size_t count);

  bool has_model(size_t i) const { return distances_[i] != 0; }
  uint32_t base(size_t i) const { return bases_[i]; }  // kNone: compare with zero
  std::vector<uint32_t>& distances() { return distances_; }

 private:
  std::vector<uint32_t> distances_;  // rows back to the model; 0: none
  std::vector<uint32_t> bases_;
  std::vector<uint32_t> slots_;  // hash table of row + 1
  uint32_t last_without_ = kNone;
};

// One column at a time, taken out of the rows or to be put into them.
using ColumnScratch = std::tuple<std::vector<uint8_t>, std::vector<uint32_t>, std::vector<uint64_t>>;

// Not thread-safe; keeps its memory between calls.
class LaunchEncoder {
 public:
  // Appends the payload of all rows to *out. first: index in the step of the first row. REQUIRES: no more rows and
  // buffers than a frame may hold.
  void encode(const LaunchColumns& launches, uint64_t first, std::vector<uint8_t>* out);

 private:
  void find_models(const LaunchColumns& launches);
  void put_digests(const LaunchColumns& launches, std::vector<uint8_t>* out);
  PlaneEncoder planes_;
  RowModels row_models_, buffer_models_;
  std::vector<uint8_t> repeats_;  // buffers: 1 where the digest is the model's
  ColumnScratch scratch_;
};

// Not thread-safe; keeps its memory between calls.
class LaunchDecoder {
 public:
  // Appends `count` rows and their buffers to *launches. False when the payload is not that of `count` rows, holds more
  // than a frame may, or has a kind that this version does not know; *launches is then as it was.
  bool decode(std::span<const uint8_t> payload, size_t count, uint64_t* first, LaunchColumns* launches);

 private:
  bool get_models(size_t rows, size_t buffers);
  bool get_digests(std::span<LaunchRow> rows, std::span<BufferRow> buffers);
  PlaneDecoder planes_;
  RowModels row_models_, buffer_models_;
  std::vector<uint8_t> repeats_;
  ColumnScratch scratch_;
};

}  // namespace forkpoint
