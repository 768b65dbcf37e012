// The environment contract (lib/probe_contract.h) as the probe read it, once, when it was loaded; or what `forkpoint attach`
// asks of a process later (attachment.h). No allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lib/record.h"

namespace forkpoint {

// What is done when a watched value is found wrong (FORKPOINT_WATCH).
enum class OnTrigger : uint8_t { warn, stop, deepen };

// Operands to save (FORKPOINT_SAVE): of the records of one op, or of one launch.
struct SaveRequest {
  bool wanted = false;
  int64_t step = -1;
  bool is_launch = false;
  uint64_t launch = 0;     // its index in the step
  int phase = -1;          // of the records; -1: any
  char layer[512] = "";    // these two: empty: any
  char op[512] = "";
  uint64_t most_bytes = uint64_t{8} << 30;  // that one process saves
};

struct Settings {
  enum class State : uint8_t { unset, malformed, ready };
  State state = State::unset;
  char problem[400] = "";         // a sentence, when malformed
  char run_directory[4096] = "";  // absolute
  char ranks[1024] = "";          // as given and found well-formed; empty: all
  Level level = Level::step;
  int64_t first_wanted_step = 0;
  int64_t last_wanted_step = INT64_MAX;
  int64_t every = 1;
  uint64_t max_size_bytes = 0;    // 0: no limit
  bool mask_names = false;
  int64_t first_step = -1;        // for callers that do not know the step's number; the C API always gives one
  uint32_t ring_slots = 65536;
  uint32_t ring_wait_ms = 10'000;
  bool inputs = false;            // launch level: digests before each launch too
  bool sequence = false;          // launch level: no digests but of what goes to the host
  uint32_t retry = 0;             // repetitions of the launch (retry_step, retry_index)
  int64_t retry_step = -1;
  uint64_t retry_index = 0;
  SaveRequest save;
  bool torch = true;              // PyTorch is recorded by layers
  char ops[1024] = "";            // layers whose framework ops are recorded too; empty: none
  bool watch_nan = false;
  bool watch_replicas = false;
  OnTrigger on_trigger = OnTrigger::warn;
  char knobs[1024] = "";          // of deterministic mode, by commas; empty: none
  char cupti[1024] = "";          // path; empty: look for it
  char job[128] = "";             // FORKPOINT_JOB or what the launcher calls it; empty: nothing
  char sockets[1024] = "";        // folder of the socket by which a sleeping process is reached
  unsigned long cpus[128] = {};   // where the process may run, as it was at load; not filled in by read_settings
  size_t cpus_bytes = 0;          // 0: not known
  int rank = -1;                  // what the launcher's variables say; -1: nothing
  int world_size = 0;
  bool world_size_known = false;  // false: a lower bound
  char rank_problem[240] = "";    // what the launcher's variables say that makes no sense; empty: nothing
  int64_t stop_after = -1;        // the job is ended behind this step; -1: it is not

  bool wants_rank(int rank) const;
  bool has_knob(std::string_view name) const;
  bool wants_step(int64_t step) const {
    return step >= first_wanted_step && step <= last_wanted_step && step % every == 0;
  }
};

// get: as getenv. Without FORKPOINT_RUN: who the process is, and how it is reached.
void read_settings(const char* (*get)(const char* name), Settings* settings);

}  // namespace forkpoint
