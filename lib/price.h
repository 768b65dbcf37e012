// What determinism costs: step times of runs that were interleaved, and the search for the cheapest knobs with which a job
// still repeats. Pure; the jobs are run elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace forkpoint {

// Steps that began on one rank, by number, in nanoseconds of any clock of that rank's machine.
using StepBegins = std::map<int64_t, int64_t>;

// How long steps first..last-1 took, each from its begin to that of the next, in ms, on the rank that took longest. A step
// of which a rank lacks either end is left out. The last step has no end, and is the one that is hashed.
std::vector<double> step_times_ms(const std::vector<StepBegins>& ranks, int64_t first, int64_t last);
double median(std::vector<double> values);  // REQUIRES: not empty

// Of the runs of one arm, each by the median of its steps.
struct ArmTime {
  double median_ms = 0, low_ms = 0, high_ms = 0;  // over runs
  double spread_ms() const { return high_ms - low_ms; }
};
ArmTime arm_time(const std::vector<double>& run_medians_ms);  // REQUIRES: not empty
inline constexpr size_t kFewestRuns = 3;  // of an arm, for a difference to be believed
// Whether the difference of two arms was measured: it is larger than the spread of either, and every run of one is on the
// same side of every run of the other. Never so with fewer than three runs each: two say too little of the noise.
bool differ(const ArmTime& a, const ArmTime& b, size_t runs_a, size_t runs_b);

// The search. Knobs are 0..count-1, in order of preference: those to keep first. repeats(kept): whether the job repeated with
// these alone (ascending); it is asked each set at most once. Where more knobs never make a job repeat less, the result is
// minimal: it repeats, and without any one of its knobs it does not. REQUIRES: repeats(all) was found true; nothing kept at
// all was found false.
std::vector<size_t> minimal_knobs(size_t count, const std::function<bool(const std::vector<size_t>&)>& repeats);

}  // namespace forkpoint
