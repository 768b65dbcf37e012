// Wording about launches and their buffers, shared by everything that writes sentences of a verdict.
#pragma once

#include <string>

#include "lib/launch_compare.h"

namespace forkpoint {

// "buffer at parameter byte 16", "source", "target", "device variable"
std::string place_name(uint32_t place);
// "step 7", "the prologue"
std::string step_name(int64_t step);
// As recorded; empty: no such row, or it cannot be read.
std::string kernel_name(const HashStreamReader& stream, size_t step_index, uint32_t row);
// "gemm (launch 1234 of step 7)"; what it is, where the row has no name.
std::string launch_text(const HashStreamReader& stream, size_t step_index, uint32_t row);

// "what cuMemcpyDtoHAsync copies to the host (launch 512 of step 7)"
std::string sink_text(const LaunchJoin& join, const RankPair& pair, const DataNode& sink);
// "rank 0: a buffer of 4096 bytes (allocated ..., last written by ...) still differs where the recording ends"
std::string live_text(const LaunchJoin& join, const RankPair& pair, const LiveDifference& difference);

}  // namespace forkpoint
