// Which row each place of an index tensor goes to, and a stable sort of the places by it: what the scatter kernels
// (kernels/scatter_launch.h) need before they can add. Plain code for host and device; plan_sort() fills the launches,
// to be made in their order on one stream.
//
// A sort by digits, the lowest first. For each digit, the places are cut into chunks of adjacent tiles, one chunk a
// block: `count` writes how often each value of the digit occurs in each chunk, `move` adds up what lies before its
// chunk and moves its places there in their order. No block waits for another one, no memory has to be zero before,
// and the permutation is the only stable one: nothing of it depends on the grid or the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/scatter_plan.h"

namespace forkpoint {

namespace scatter {

inline constexpr int kMostDigitBits = 10;
inline constexpr int kSortThreads = 512;
inline constexpr int64_t kSortTile = 4096;  // places
inline constexpr int64_t kMostChunks = 128;
inline constexpr int kMostDigits = 4;
// One less than 32 bits hold, so that what is left out has a key as well.
inline constexpr int64_t kMostKeys = INT32_MAX;

enum IndexFlags : uint32_t {
  kIndexWide = 1,   // int64_t, else int32_t
  kIndexWrap = 2,   // negative ones count from the end
  kIndexCheck = 4,  // one that is not of a row is an error of the device (as an assertion); else it is left out
};

// An index tensor [blocks, length, columns]. Place p is (block, along, column), the last the fastest, and goes to key
// (block * rows + index[p]) * columns + column; what goes nowhere has the key blocks * rows * columns.
struct IndexView {
  const void* data;
  int64_t strides[3];  // in elements; 0 where it is the same all along
  int64_t blocks, length, columns;
  int64_t rows;     // of out, that an element of the index names
  int64_t padding;  // an element that is left out; -1: none is
  uint32_t flags;

  FORKPOINT_BOTH int64_t count() const { return blocks * length * columns; }
  FORKPOINT_BOTH int64_t limit() const { return blocks * rows * columns; }

  // *good: false where the element is none of a row, and that is an error.
  FORKPOINT_BOTH uint32_t key_at(uint32_t place, bool* good) const {
    int64_t block = 0, along = place, column = 0;
    if (columns != 1) {
      column = place % static_cast<uint32_t>(columns);
      along = place / static_cast<uint32_t>(columns);
    }
    if (blocks != 1) {
      block = static_cast<uint32_t>(along) / static_cast<uint32_t>(length);
      along = static_cast<uint32_t>(along) % static_cast<uint32_t>(length);
    }
    const int64_t at = block * strides[0] + along * strides[1] + column * strides[2];
    int64_t row = flags & kIndexWide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
    if ((flags & kIndexWrap) && row < 0) row += rows;
    const bool inside = row >= 0 && row < rows;
    *good = inside || !(flags & kIndexCheck);
    if (!inside || row == padding) return static_cast<uint32_t>(limit());
    return static_cast<uint32_t>((block * rows + row) * columns + column);
  }
};

}  // namespace scatter

struct SortWork {
  scatter::IndexView index;
  uint32_t* keys;     // out: ascending
  void* places;       // out: of each key, int64_t or uint32_t
  uint32_t* scratch;  // of sort_scratch_bytes()
  bool wide_places;
  // Filled by the planner, for one digit.
  bool from_index, widens;  // the first; the last, where places are wide
  bool alone;               // a tile is all: `move` needs no counts
  const uint32_t *keys_in, *places_in;
  uint32_t* keys_out;
  void* places_out;
  int32_t shift, bits;
  int64_t chunk;  // places of a block
};

struct SortPlan {
  // `count` (but where it is alone) and `move` of each, on `blocks` blocks of kSortThreads.
  SortWork digits[scatter::kMostDigits];
  int digit_count = 0;
  uint32_t blocks = 0;  // 0: nothing to launch
};

size_t sort_scratch_bytes(int64_t count);
// Pure; any thread. REQUIRES: count() and limit() are not above kMostKeys; fields above the planner's are filled.
SortPlan plan_sort(const SortWork& work);

}  // namespace forkpoint
