// A small hash stream that uses every part of the format, for tests and as the seed of the fuzzing corpus.
#pragma once

#include <string>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

inline constexpr int kSampleSteps = 5;          // complete ones; the first is kPrologueStep
inline constexpr int kSampleFramesInStep2 = 3;  // records frames, because of flushes

StreamHeader sample_header();
Site sample_site(int number);      // every phase, kind and role in turn
Layout sample_layout(int number);  // scalar, dense, strided, shard, empty
Record sample_record(HashStreamWriter* writer, int64_t step, int number);
// Writes everything but the end.
void write_sample(HashStreamWriter* writer);
// Writes it to path and finishes it.
void make_sample(const std::string& path);

}  // namespace forkpoint
