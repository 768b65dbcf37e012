// Backwards from a launch or a record that differs, along buffers that differ, to the launches whose inputs all agree.
// Pure functions. Internal to diff.
#pragma once

#include <vector>

#include "lib/launch_compare.h"

namespace forkpoint {

inline constexpr uint32_t kNoPlace = 0xFFFFFFFFu;

enum class EndKind : uint8_t {
  launch,      // its inputs agree and an output differs
  gap,         // what only one run has, or has in another way, and its inputs agree
  from_host,   // the value came from the host
  entered,     // something that differs stands in a buffer that it was handed, and nothing recorded has put it there
  collective,  // a collective's output, though this rank's inputs agree: what the other ranks brought, or itself
};

struct SliceEnd {
  EndKind kind = EndKind::launch;
  uint32_t node = kNoNode;
  uint32_t place = kNoPlace;           // in DataNode::places: the output that was followed to here
  std::vector<uint32_t> not_followed;  // places that differed before it, and elsewhere made no difference
  std::vector<uint32_t> opaque;        // nodes that were handed one of its inputs before, of which no digest was taken
  // entered: the place that differed before it, and where that was seen first: node and place there.
  uint32_t entered_place = kNoPlace, entry_node = kNoNode, entry_place = kNoPlace;
};

struct Slice {
  std::vector<SliceEnd> ends;  // earliest first
  size_t nodes = 0;            // that were walked through
};

// Which of the places that differed before a launch do not explain its output: see the source. REQUIRES: start is a
// node. Ends that look at one and the same thing that entered are one: the earliest.
Slice slice_back(const RankComparison& comparison, uint32_t start);

}  // namespace forkpoint
