// What came of `record --launch STEP:INDEX --retry N`: the launch is found in the streams afterwards, whatever the probe did.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/run.h"

namespace forkpoint {

struct RetryReport {
  std::vector<std::string> sentences;  // of every rank; one where all ranks say the same
  bool repeated = false;               // everywhere, as often as was asked for
};

// step: kPrologueStep for what stands before the first one.
RetryReport report_retry(const Run& run, int64_t step, uint64_t index, int64_t times);

}  // namespace forkpoint
