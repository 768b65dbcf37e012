// Where the frames of a finished stream lie: what its index, launch index and end frames hold. Not for callers outside
// lib.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/hash_stream_format.h"

namespace forkpoint {

struct IndexedStep {
  StepSummary summary;
  uint32_t ordinal = 0;
  uint64_t step_frame = 0;              // byte offset; 0: none, the step did not end
  std::vector<uint64_t> record_frames;  // byte offsets
  std::vector<uint64_t> launch_frames;  // byte offsets
};

struct IndexPart {
  std::vector<uint64_t> meta_frames;  // byte offsets of dictionary, gap and coverage limit frames
  std::vector<IndexedStep> steps;     // at most kStepsPerIndex; without what a launch index says of them
};

// What the steps of the index frame before it hold of launches; a stream without launches has none.
struct IndexedLaunches {
  uint32_t ordinal = 0;  // of the step
  uint64_t launches = 0;
  Digest launch_sum;
  std::vector<uint64_t> frames;  // byte offsets
};
using LaunchIndexPart = std::vector<IndexedLaunches>;

struct EndPart {
  uint64_t frames = 0;                 // in the file, this one included
  std::vector<uint64_t> index_frames;  // byte offsets of index and launch index frames
};

// The launch index of an index's steps; empty when none of them has launches.
LaunchIndexPart launch_index_of(const IndexPart& part);

void encode(const IndexPart& part, ByteWriter* out);
void encode(const LaunchIndexPart& part, ByteWriter* out);
// end_offset: where the end frame itself begins; the file's last bytes say it, so that a reader finds it.
void encode(const EndPart& part, uint64_t end_offset, ByteWriter* out);

// As in hash_stream_format.h: false when the bytes do not say what they should.
bool decode(ByteReader in, IndexPart* out);
bool decode(ByteReader in, LaunchIndexPart* out);
bool decode(ByteReader in, EndPart* out);

}  // namespace forkpoint
