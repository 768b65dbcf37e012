// Runs a command recorded for a window of its steps, and ends it cleanly behind the last one: what replay, resume,
// bisect and check share.
//
// Clean means: every rank has ended its stream as whole behind step B before any is ended, so that none waits in a
// collective for one that is gone (StopBoard in lib/probe_contract.h); then all processes of the job are ended, those
// that ignore SIGTERM, restart one another or have gone to other sessions too, and are gone on return, with the GPU
// memory that they held. The job runs in a process group of its own, reads nothing, and writes to RUN/job.log.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "cli/job_boards.h"
#include "cli/recording.h"

namespace forkpoint {

struct JobRequest {
  RecordingRequest recording;           // run_directory and command set; steps: what is recorded up to stop_after
  EnvironmentChanges environment;       // besides what recording asks for
  int64_t stop_after = 0;               // B
  std::optional<int64_t> begins_with;   // the step that the job must begin with, as it resumes from a checkpoint
  std::chrono::seconds patience{1800};  // for the next step to begin, on any rank; 0: for ever
  bool show_output = false;             // the job's output to our stderr instead of the log
  std::function<bool()> may_stop;       // behind B: also wait for this (a checkpoint to be whole); empty: do not
};

enum class JobEnd {
  stopped,      // behind B, all ranks
  by_itself,    // it ended with status 0, and had done B
  short_of,     // it ended, hung or could not be recorded before B was over on all ranks
  interrupted,  // Ctrl-C, SIGTERM or SIGHUP to us
};

struct JobResult {
  JobEnd end = JobEnd::short_of;
  std::string trouble;  // with short_of: what happened, in sentences
  TargetEnd target;
  int interrupted_by = 0;  // the signal
  Recorded recorded;
  int64_t first_step = -1;  // that the job began; -1: none
  int64_t steps_run = 0;    // from there on, recorded or not
  std::vector<StepTimes> times;  // of the ranks that ran here: by the probe's marks, also of steps that were not recorded
  double seconds = 0;       // from the start of the command to the end of its last process
};

// Makes the run folder, runs the job, completes the manifest. Throws Error where the folder cannot be made, and
// CannotRun; then the folder is as it was. Whatever is thrown, no process of the job is left. The first Ctrl-C ends the
// job behind the step that it is in, the second at once: the run is whole, or cut where it was. REQUIRES: a single
// thread.
JobResult run_job(const JobRequest& request);

// What is left to say when the job is over, on stderr: the log's last lines after a failure, ranks without a stream.
void report_job(const JobRequest& request, const JobResult& result);
// "13 steps in 4.2 s"
std::string cost_of(int64_t steps, double seconds);
// After an interrupted job: ends this process as the signal would have.
[[noreturn]] void exit_interrupted(const JobResult& result);

}  // namespace forkpoint
