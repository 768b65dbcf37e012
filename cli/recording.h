// The two ends of a recording: the run folder and the environment before the command starts, the manifest after it
// ended.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/target.h"
#include "lib/knobs.h"
#include "lib/run.h"

namespace forkpoint {

enum class OnTrigger { warn, stop, deepen };

// What is looked at while the command runs, and what is done when something is found.
struct WatchRequest {
  bool nan = false, replicas = false;
  OnTrigger on_trigger = OnTrigger::warn;
  int64_t deepen_steps = 5;
  bool any() const { return nan || replicas; }
  std::string names() const;  // "nan,replicas"
};
std::string_view name(OnTrigger on_trigger);
// Throws UsageError. The request's level and ranks are read already.
struct RecordingRequest;
WatchRequest read_watch(const Arguments& arguments, const RecordingRequest& request);

struct RecordingRequest {
  std::string run_directory;  // empty: choose one under runs/
  Level level = Level::step;
  std::optional<StepRange> steps;
  std::vector<int> ranks;  // sorted; empty: all
  int64_t every = 1;
  std::optional<uint64_t> max_size_bytes;
  bool mask_names = false;
  std::optional<int64_t> first_step;
  std::optional<std::string> step_on;        // regular expression
  std::string ops;                           // layers whose framework ops are recorded too: globs, by commas; empty: none
  bool inputs = false;                       // launch level: digests before each launch too
  bool sequence = false;                     // launch level: digests only of what goes to the host
  int64_t retry = 0;                         // repetitions of the launch ...
  std::optional<std::string> retry_launch;   // ... STEP:INDEX
  bool fixed_addresses = false;              // what fix_addresses() said
  std::vector<std::string> notes;            // sentences for the manifest
  WatchRequest watch;
  bool keep_allocators = false;              // leave the frameworks' own allocators as they are
  std::optional<Knobs> knobs;                // of deterministic mode; nothing: it was not asked for
  std::optional<std::string> save;           // whose operands are saved (lib/probe_contract.h, kSave)
  std::vector<std::string> command;
};

// A run folder that did not exist before: `runs/train-20250131-120000`, relative to the working directory.
std::string default_run_directory(const std::string& program);
Manifest manifest_before(const RecordingRequest& request);
// At launch level, the variables by which frameworks make each tensor an allocation of its own, so that the extent of every
// buffer is known; none that the user has set.
EnvironmentChanges allocator_changes(const RecordingRequest& request);
// The variables of lib/probe_contract.h and LD_PRELOAD. Those that the request does not set are removed, so that a
// recording depends on its command line alone.
EnvironmentChanges contract_environment(const RecordingRequest& request, const std::string& probe);

// What the command left behind.
struct Recorded {
  size_t ranks = 0;
  size_t steps = 0;
  int64_t first_step = 0, last_step = 0;  // meaningful when steps > 0
  uint64_t records = 0, launches = 0, size_bytes = 0;
  std::vector<int> missing_ranks, writing_ranks, died_ranks;
  std::vector<std::string> retry;  // what came of --retry, in sentences
  bool retry_failed = false;       // on some rank
  std::vector<std::string> not_deterministic;  // of deterministic mode: what still cannot repeat, and knobs that did not hold
  std::vector<std::string> problems;
};
// Reads the streams, gives those that are still being written a moment to end, completes the manifest from them and
// writes it. The manifest says `whole` only when every stream that is there is whole and none is missing without
// reason. notes: sentences for the manifest.
Recorded finish_recording(const RecordingRequest& request, Manifest manifest, const TargetEnd& end,
                          const std::vector<std::string>& notes = {});

}  // namespace forkpoint
