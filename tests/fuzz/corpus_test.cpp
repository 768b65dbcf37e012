// Every file of the fuzzing corpus again, also where there is no libFuzzer: what once crashed stays fixed.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/stream_exercise.h"

using namespace forkpoint;

TEST_CASE("every file of the fuzzing corpus is read without a crash or a contradiction") {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(FORKPOINT_SOURCE "/tests/fuzz/corpus"))
    paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  CHECK(paths.size() >= 10);
  size_t opened = 0;
  for (const std::string& path : paths) {
    CAPTURE(path);
    CHECK_NOTHROW(opened += exercise_stream(path, true).error.empty());
  }
  CHECK(opened >= 5);  // the corpus reaches beyond the first check
}
