// forkpoint bisect: from two commands (or two recorded runs of them) to the one op in which they part, coarse to fine.
//
// Two arms, good and bad, are run again over windows of steps, each window from one and the same state: from a
// checkpoint of a step up to which nothing differs, or from the start. What a window showed is a run folder in DIR and
// a line in DIR's log; a bisect that was killed goes on from there, and everything else is worked out anew from the
// folders.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "lib/bisect_log.h"
#include "lib/record.h"
#include "lib/verdict.h"

namespace forkpoint {

// One side. All paths are absolute.
struct BisectArm {
  std::string name;  // "good" or "bad"
  std::string run;   // recorded already; empty: it was not
  std::vector<std::string> command;
  std::string working_directory;
  std::map<std::string, std::string> environment;  // all of its variables that can change results, and those before CMD
  std::optional<std::string> knobs;                // of deterministic mode, as --deterministic takes them
  std::string checkpoints;                         // the folder; empty: there is none, every window begins at the start
};

struct BisectRequest {
  BisectArm good, bad;
  std::string folder;                  // DIR
  std::optional<int64_t> first, last;  // --steps
  std::string pattern, preset;
  std::vector<std::string> only_read;  // folders of checkpoints that the commands do not save to
  std::optional<std::string> step_on;
  std::vector<std::string> script;  // --script; empty: the arms are compared
  Level level = Level::launch;      // the finest to go to
  int64_t tries = 3;                // how often a window is run again before "did not fork"
  int64_t retry = 20;               // repetitions of the launch in the end
  std::chrono::seconds patience{1800};
  bool show_output = false;
};

// What a stage cost and found.
struct BisectStage {
  std::string name, found;
  int64_t windows = 0, steps = 0;
  double seconds = 0;
};

struct BisectResult {
  Verdict verdict;
  std::optional<Divergence> seen;  // the fork that did not come again
  std::vector<BisectStage> stages;
  std::vector<std::string> operands;  // a sentence each
  std::vector<std::string> retry;     // what came of the launch's repetition
  std::vector<std::string> kept;      // folders that hold the operands
  int64_t windows = 0, steps = 0;     // replayed: windows of one arm; steps run in them, recorded or not
  double seconds = 0;
};

// Throws UsageError, and Error for a run that cannot be run again.
BisectRequest read_bisect_request(const Arguments& arguments);
BisectLog::Json to_json(const BisectRequest& request);
BisectRequest bisect_request_from(const BisectLog::Json& json);  // throws Error

// Runs what is not in the log yet. Throws Error when an arm cannot be run; the log then holds what was done. Ends this
// process after Ctrl-C, as the signal would have. REQUIRES: a single thread.
BisectResult run_bisect(const BisectRequest& request, BisectLog* log);

std::string bisect_text(const BisectRequest& request, const BisectResult& result);
std::string bisect_json(const BisectRequest& request, const BisectResult& result);

}  // namespace forkpoint
