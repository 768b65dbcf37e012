// What the scenarios look at by themselves.
#pragma once

#include <cstdio>
#include <cstring>

#include "tests/probe/nccl_program.h"

namespace nccl_program {

inline constexpr int kFloat = 7, kSum = 0, kMax = 2, kAvg = 4;

inline std::vector<float> values_of(int rank, size_t count = kCount) { return start_values(rank, count); }

inline void wait_until_ready(NcclComm comm) {
  int state = 7;
  while (state == 7) check(ncclCommGetAsyncError(comm, &state), "state");
}

inline std::vector<float> combined(const Ranks& ranks, size_t count, const std::function<float(float, float)>& combine,
                                   float factor = 1) {
  std::vector<float> all = values_of(0, count);
  for (float& value : all) value *= factor;
  for (int rank = 1; rank < ranks.size; ++rank) {
    const std::vector<float> more = values_of(rank, count);
    for (size_t i = 0; i < count; ++i) all[i] = combine(all[i], more[i] * factor);
  }
  return all;
}
inline float plus(float a, float b) { return a + b; }

inline void expect(const char* what, const float* device, const std::vector<float>& expected) {
  const std::vector<float> found = host_floats(device, expected.size());
  const bool same = memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) == 0;
  printf("%s %s\n", what, same ? "right" : "WRONG");
}

// Scenarios of the deterministic collectives, by name. false: there is no such.
bool swap_scenario(const std::string& name, const Ranks& ranks);
bool member_scenario(const std::string& name, const Ranks& ranks);

}  // namespace nccl_program
