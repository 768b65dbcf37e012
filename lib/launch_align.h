// Which launch of run A is which of run B, within one step. Launches of a stream keep their order; streams are joined
// by what ran on them, since two runs may number them differently. What only one run has lies in a gap between launches
// that both have; what stands in one gap in the two runs (a kernel replaced by another) is compared as one unit.
// Internal to diff.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/launch_step.h"

namespace forkpoint {

struct LaunchPairs {
  std::vector<uint32_t> in_b, in_a;    // by row: its counterpart; kNoRow: none, or not aligned at all
  std::vector<uint32_t> gap_a, gap_b;  // by row that lacks a counterpart: the gap that it lies in; else kNoRow
  uint32_t gaps = 0;
  uint32_t paired = 0, only_a = 0, only_b = 0;  // of work; records are counted elsewhere

  uint32_t counterpart(bool of_b, size_t row) const { return (of_b ? in_a : in_b)[row]; }
  uint32_t gap(bool of_b, size_t row) const { return (of_b ? gap_b : gap_a)[row]; }
};

// Records are paired where they are the same record. Kernels, copies and sets only with their like by name; which of
// several is decided by size, place in the program, buffers and content.
LaunchPairs pair_launches(const LaunchJoin& join, const LaunchStep& a, const LaunchStep& b);

// True when the aligned rows of both are the same by kind and name in the order of the host: then nothing has to be
// searched.
bool same_sequence(const LaunchJoin& join, const LaunchStep& a, const LaunchStep& b, std::vector<uint32_t>* rows_a,
                   std::vector<uint32_t>* rows_b);

}  // namespace forkpoint
