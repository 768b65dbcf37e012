// The order in which contributions to one destination are added, as plain code for host and device. The contributions
// are sorted by destination, and stably, so that those of one destination (a *segment*) lie in the order of the source:
//
//   - a segment is cut, from its own start, into *pieces* of kPieceRows contributions; a piece is added one by one;
//   - the sums of a segment's pieces are added in kPieceGroups groups of adjacent pieces, then the groups' sums in
//   order.
//
// So a destination's result depends on its own contributions alone: not on grid, occupancy, device, on how the columns
// are spread over threads, or on what goes to other destinations.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FORKPOINT_BOTH __host__ __device__ inline
#else
#define FORKPOINT_BOTH inline
#endif

namespace forkpoint::scatter {

inline constexpr int64_t kPieceRows = 128;
inline constexpr int64_t kPieceGroups = 32;

// Destinations, ascending. One that is negative or not below the number of rows is left out.
struct SortedKeys {
  const void* data;
  int64_t count;
  bool wide;  // int64_t, else int32_t

  FORKPOINT_BOTH int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The first place in [low, high] whose key is not below that of `high`.
FORKPOINT_BOTH int64_t first_of(const SortedKeys& keys, int64_t low, int64_t high) {
  const int64_t key = keys.at(high);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (keys.at(middle) < key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Behind the last place with the key of place `from`.
FORKPOINT_BOTH int64_t end_of(const SortedKeys& keys, int64_t from) {
  const int64_t key = keys.at(from);
  int64_t low = from + 1, high = keys.count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (keys.at(middle) <= key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

FORKPOINT_BOTH bool starts_segment(const SortedKeys& keys, int64_t place) {
  return place == 0 || keys.at(place - 1) != keys.at(place);
}

FORKPOINT_BOTH bool starts_piece(const SortedKeys& keys, int64_t place) {
  if (starts_segment(keys, place)) return true;
  if (place < kPieceRows || keys.at(place - kPieceRows) != keys.at(place)) return false;
  return (place - first_of(keys, 0, place)) % kPieceRows == 0;
}

// Bit i of word w: a piece starts at place 32 w + i. Bits behind the last place are 0.
FORKPOINT_BOTH int64_t end_of_piece(const uint32_t* starts, int64_t count, int64_t place) {
  int64_t next = place + 1;
  while (next < count) {
    uint32_t word = starts[next / 32] >> (next % 32);
    if (word != 0) {
      while ((word & 1u) == 0) word >>= 1, ++next;
      break;
    }
    next = (next / 32 + 1) * 32;
  }
  return next < count ? next : count;
}

// Where the sum of a piece waits, if its segment has several. Unique: where two pieces start within the same kPieceRows
// places, the second is the first of its segment, and the first is not.
FORKPOINT_BOTH int64_t slot_of_piece(int64_t place, bool first_of_segment) {
  return 2 * (place / kPieceRows) + (first_of_segment ? 1 : 0);
}
FORKPOINT_BOTH int64_t slots_of(int64_t count) { return 2 * ((count + kPieceRows - 1) / kPieceRows); }

// Each segment of more than one piece covers a multiple of kPieceRows; the first that it covers is its *mark*.
// Is `mark`, a multiple below the count, one? Then *start is the segment's first place.
FORKPOINT_BOTH bool is_mark(const SortedKeys& keys, int64_t mark, int64_t* start) {
  if (mark >= kPieceRows && keys.at(mark - kPieceRows) == keys.at(mark)) return false;
  *start = first_of(keys, mark >= kPieceRows ? mark - kPieceRows + 1 : 0, mark);
  return *start + kPieceRows < keys.count && keys.at(*start + kPieceRows) == keys.at(mark);
}

// Pieces [begin, end) of a segment of `pieces` are of this group.
FORKPOINT_BOTH void pieces_of_group(int64_t pieces, int64_t group, int64_t* begin, int64_t* end) {
  const int64_t each = (pieces + kPieceGroups - 1) / kPieceGroups;
  *begin = group * each < pieces ? group * each : pieces;
  *end = *begin + each < pieces ? *begin + each : pieces;
}

}  // namespace forkpoint::scatter
