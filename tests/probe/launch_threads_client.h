// What launch_threads_client does, as its test counts it.
#pragma once

#include <cstddef>

namespace launch_threads {

inline constexpr int kRanks = 4;  // threads, in each step anew
inline constexpr int kSteps = 6;
inline constexpr int kRounds = 48;        // of launches, a rank and step
inline constexpr size_t kCount = 64;      // floats of a buffer
inline constexpr int kBuffers = 4;        // that a rank keeps through a step
inline constexpr int kLargeBuffers = 80;  // that one launch in eight is handed
inline constexpr int kReplays = 3;        // of a graph
inline constexpr int kMarks = 1500;       // of steps, that each rank of many_marks makes
inline constexpr int kReductions = 15;    // on five communicators

// What the kernel `put` writes, everywhere another number.
constexpr float put_value(int rank, int step, int round) {
  return static_cast<float>(1'000'000 + rank * 100'000 + step * 1'000 + round);
}
constexpr float graph_value(int rank, int step) { return static_cast<float>(rank * 100 + step + 7); }

}  // namespace launch_threads
