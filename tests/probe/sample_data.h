// Values that the client records and the tests digest again.
#pragma once

#include <cstdint>
#include <vector>

inline std::vector<float> sample_floats(int count, uint32_t seed) {
  std::vector<float> values;
  uint32_t state = seed * 2654435761u + 1;
  for (int i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values.push_back(static_cast<float>(static_cast<int32_t>(state)) / 65536.0f);
  }
  return values;
}
