// --deterministic: its knobs from the command line, what they come to in this process's environment, and what is said of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/recording.h"
#include "lib/knobs.h"
#include "lib/run_knobs.h"

namespace forkpoint {

inline constexpr Option kDeterministicOption{
    "deterministic", 0, "[=KNOBS]",
    "make CMD repeat itself bit by bit: KNOBS is a list of names, -NAME to leave one out, +NAME to add one to the default (see README)"};

// Throws UsageError for an unknown knob. Nothing: the option was not given.
std::optional<Knobs> read_knobs(const Arguments& arguments, std::string_view verb);
// Of a run that was recorded so: those that were asked for then and are still known.
std::optional<Knobs> knobs_of(const Manifest& manifest);
std::string knob_list(const Knobs& knobs);  // as --deterministic takes it

// Against our environment and, for NCCL's variables, its files (NCCL_CONF_FILE, ~/.nccl.conf, /etc/nccl.conf), which a variable
// would override in silence. Nothing: no deterministic mode. Asked where it is needed: bisect changes our environment.
std::optional<KnobPlan> knob_plan(const RecordingRequest& request);
std::vector<RecordedKnob> recorded_knobs(const KnobPlan& plan);  // as they are written into the manifest
// On stderr, each sentence once in this process: which knobs are not in force, and why.
void say_knobs(const RecordingRequest& request);
// And behind the run: what of the job still cannot repeat, by name.
void say_not_deterministic(const Recorded& recorded);

}  // namespace forkpoint
