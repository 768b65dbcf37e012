// The looks at one job that lib/doctor_job.h judges: its programs' files, and a few recorded steps of it, twice.
#pragma once

#include <string>
#include <vector>

#include "cli/doctor_command.h"
#include "cli/doctor_looks.h"
#include "cli/job.h"

namespace forkpoint {

struct JobPrograms {
  JobLine line;
  std::vector<ProgramLook> programs;  // with the interpreters of scripts behind them
  std::string python;                 // path; empty: none that is known
};
JobPrograms look_at_programs(const std::vector<std::string>& command);
// was_recorded: the probe was in the job when it was run, so that nothing need be guessed.
Findings judge_programs(const JobPrograms& job, const MachineLooks& machine, bool was_recorded);

// Where the two runs differ, two more are made in deterministic mode, and where these are identical one without it: does it
// still differ?
struct DoctorRun {
  std::string folder;           // made: first, second, deterministic-first, deterministic-second, third
  int64_t first = 0, last = 1;  // steps
  RecordingRequest recording;   // level, step_on and the command
  std::chrono::seconds patience{1800};
  bool show_output = false;
};
struct DoctorOutcome {
  Findings findings;
  std::vector<std::string> runs;  // folders
  bool recorded = false;          // the probe was in the job
};
// Throws Error where no run folder can be made. After Ctrl-C this process ends as the signal would have it.
DoctorOutcome run_job_twice(const DoctorRun& request);

}  // namespace forkpoint
