// From what is known about the launch at which two runs part to its cause class. As decide_cause, of records: where the
// evidence does not decide, the class is the broad one and the candidates say what remains. Internal to diff.
#pragma once

#include <string>
#include <vector>

#include "lib/launch_params.h"
#include "lib/launch_race.h"
#include "lib/launch_scan.h"
#include "lib/verdict.h"

namespace forkpoint {

// Repetitions of one launch in one run, from inputs put back each time.
struct RetryFacts {
  uint64_t runs = 0;
  uint64_t outputs = 0;       // different ones
  bool own_output = false;    // one of them is what the run had recorded
  bool other_output = false;  // one of them is what the other run had
};

// Plain values, gathered by lib/launch_facts.h.
struct LaunchFacts {
  Divergence first;
  EndKind end = EndKind::launch;
  bool everyone = false;
  int world_size = 1;
  bool first_seen = false;  // the buffer that differs was never seen before: it may have differed from the start

  std::vector<std::string> configuration;  // what of kernel, grid, block, shared memory or sizes differs, as sentences
  ParameterCheck parameters;
  bool parameters_free = false;  // they differ only where they did so without effect elsewhere
  uint64_t parameters_free_launches = 0;
  std::vector<std::string> only_a, only_b;  // kernels of the gap, or the one that only one run has
  bool repeats = false;   // it was handed the buffers of another launch before it: the same work again
  bool replaced = false;  // both runs have launches in it that left what differs
  bool moves = false;     // a copy or set: there is no kernel to run again
  std::string resized;    // a copy or set of another size in each run, as a sentence
  std::string uneven;     // the step has more launches of this kernel in one run, as a sentence

  std::vector<std::string> inputs;           // buffers whose content before agrees
  std::vector<std::string> unknown_inputs;   // buffers of whose content before nothing is known
  bool inputs_hashed = false;                // right before the launch, all of them
  std::vector<std::string> entered;          // what differs before it and was not seen to be written, as sentences
  bool differed_before = false;              // before the steps that are compared
  bool other_data = false;                   // it was handed what two launches that are not the same had left
  std::vector<std::string> uninitialized;    // memory that nobody had written: it differs, and the launch only reads it
  bool fresh_output = false;                 // the output that differs lies in such memory
  bool beyond_write = false;                 // a copy or set, of whose target more was digested than it wrote
  std::vector<std::string> not_followed;     // scratch that differs, as sentences
  std::vector<std::string> opaque, windows;  // kernels without a digest; buffers of unknown extent
  uint64_t unread_before = 0;                // launches of this step before it whose parameters could not be read
  bool peer_mapped = false;

  RetryFacts retry_a, retry_b;
  RaceEvidence races;
  std::optional<Pointing> pointing;
  std::string reached;
  size_t through = 0;

  std::vector<std::string> environment;
  bool batch_differs = false;  // the records of this step say so
  std::string run_b, command;  // folder, and command of run B, quoted for a shell
  std::string record_options;  // of run B, with a blank behind them: "--step-on ^step$ "
  uint32_t index = 0;          // of the launch in its step, in run B where it is there
};

Cause decide_launch_cause(const LaunchFacts& facts);

}  // namespace forkpoint
