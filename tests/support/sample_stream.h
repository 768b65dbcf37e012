// A small hash stream that uses every part of the format, for tests and as the seed of the fuzzing corpus.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

inline constexpr int kSampleSteps = 5;          // complete ones; the first is kPrologueStep
inline constexpr int kSampleFramesInStep2 = 3;  // records frames, and launches frames, because of flushes
inline constexpr int kSampleLaunches = 24;      // of steps 2 and 4; the others have none

StreamHeader sample_header();
Site sample_site(int number);      // every phase, kind and role in turn
Layout sample_layout(int number);  // scalar, dense, strided, shard, empty
Record sample_record(HashStreamWriter* writer, int64_t step, int number);
struct SampleLaunch {
  LaunchRow row;
  std::vector<BufferRow> buffers;
};
// Every kind and flag in turn. REQUIRES: sites 0 to 23 were used; row.object names a record that was appended when
// number < records.
SampleLaunch sample_launch(HashStreamWriter* writer, int64_t step, int number);
// Rows in which everything repeats now and then and has all sizes, as a frame's models want it. Sites are below 24; no
// row is a record or a retry.
LaunchColumns random_launches(uint64_t seed, size_t count);
void append_all(const LaunchColumns& launches, HashStreamWriter* writer);
// A writer that knows sites 0 to 23 and is in step 0, in which 100 records were appended.
std::unique_ptr<HashStreamWriter> writer_in_step(const std::string& path);

// Writes everything but the end.
void write_sample(HashStreamWriter* writer);
// Writes it to path and finishes it.
void make_sample(const std::string& path);

}  // namespace forkpoint
