// What two runs need not be alike in, as it is in no verdict's path.
#pragma once

#include <span>
#include <string_view>

#include "lib/hash_stream.h"

namespace forkpoint {

// How a coverage limit begins that says no more than that evaluations were not recorded as a whole.
inline constexpr std::string_view kEvaluationLimit = "records of an evaluation";
// What an attached run does not see of a program: modules that rest, which a run that saw them being made records as
// evaluations.
inline constexpr std::string_view kUncalledLimit = "modules that were made before the recording began";
// What a program did behind its last step belongs to none that is compared by its number.
inline constexpr std::string_view kBehindLastStepLimit =
    "records and launches made after the end of the last step are not kept";

// What a program left behind its last step stands under that step's number once more, as records of kRecordEval only
// (and, at level launch, with rows of these and of memory that is freed).
inline bool is_final_part(std::span<const StepSummary> steps, size_t i) {
  return i > 0 && steps[i].step == steps[i - 1].step && steps[i].step != kPrologueStep && steps[i].records == 0 &&
         steps[i].eval_records > 0;
}

}  // namespace forkpoint
