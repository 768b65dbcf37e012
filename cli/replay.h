// A window of a job's steps again, from the newest checkpoint at or before it: what `replay` does once, and bisect in a
// loop.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "cli/job.h"
#include "lib/checkpoints.h"
#include "lib/verdict.h"

namespace forkpoint {

struct ReplayRequest {
  std::string checkpoint_directory;
  std::string checkpoint_pattern;            // of find_checkpoints
  std::string preset;                        // of job_command.h; empty: by the checkpoint's kind
  bool preset_besides_placeholders = false;  // add the preset's arguments although the command has placeholders
  int64_t first_step = 0, last_step = 0;
  bool keep_users_checkpoints = true;
  std::vector<std::string> only_read;        // see keep_users_checkpoints
  int64_t start_at_most = INT64_MAX;         // no checkpoint of a later step than this one and first_step
  // run_directory, level and command (as the user wrote it) set. steps and first_step are filled in.
  RecordingRequest recording;
  EnvironmentChanges environment;
  std::chrono::seconds patience{1800};
  bool show_output = false;
};

struct Replay {
  Checkpoint checkpoint;
  JobRequest request;  // as it was run
  JobResult job;
  // False: all ranks ran here, and none has opened a file of the checkpoint. The job began anew, whatever its steps are
  // numbered as; the run says so (kUnopenedCheckpoint).
  bool opened_checkpoint = true;
};

// The checkpoint that a replay from `first_step` begins with. Checkpoints behind it that are not whole are said on
// stderr. Throws Error when there is none, and says what there is.
Checkpoint choose_checkpoint(const std::string& directory, const std::string& pattern, int64_t first_step);
// A folder of checkpoints of the user's that an option names as what the job saves to (is_saving_option) becomes `own`;
// said on stderr. Not what is in `only_read` (--only-read).
void keep_users_checkpoints(const std::string& pattern, const std::vector<std::string>& only_read,
                            const std::string& own, std::vector<std::string>* command);
std::vector<std::string> parse_only_read(const std::string& text);  // folders, by commas. Throws UsageError
// Says what it will run, and runs it. Throws Error and UsageError before anything was started; what happens to the job
// is in the result. The user's checkpoints are not written to: the job gets a copy (checkpoint_view.h), which is
// removed.
Replay replay_window(const ReplayRequest& request);
// The steps of the window alone, `against` being run A. Never identical when the job did not do all of them.
Verdict compare_window(const std::string& against, const ReplayRequest& request, const Replay& replay);
// On stderr: whether `against` was recorded with another command than the one that is replayed.
void compare_commands(const Manifest& against, const ReplayRequest& request);

}  // namespace forkpoint
