// A recording of running processes: the same steps on all of them, or none, or by name which were not.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/jobs.h"
#include "lib/record.h"

namespace forkpoint {

struct AttachRequest {
  std::string run_directory;  // absolute
  Level level = Level::step;
  int64_t steps = 1;             // how many, from the first one that all can reach ...
  std::optional<int64_t> first;  // ... or from this one
  bool mask_names = false;
  std::optional<uint64_t> max_size_bytes;
  int timeout_s = 120;           // how long a rank may take to come to its next step
};

// What came of one process.
struct AttachOutcome {
  int rank = 0;
  std::string who;
  bool recorded = false;
  bool settled = false;    // it is done, or its process has ended: it writes nothing any more
  bool ended = false;      // its process has
  int64_t last_step = -1;  // that it was to record, where it was recorded
  std::string why = {};    // not recorded: a phrase
};

class Attaching {
 public:
  // jobs: of one job, with distinct ranks; else Error. interruptions: how often the user has
  // asked to end; looked at often.
  Attaching(std::vector<std::unique_ptr<Job>> jobs, AttachRequest request, std::function<int()> interruptions);

  // All ranks know the window, and record when it comes. Throws Error, having called all of them off: then nothing was
  // recorded. REQUIRES: the run folder is there, and the jobs' user may write in it.
  void begin();
  // Waits for the window's end on all ranks, a rank's own end, or an interruption.
  std::vector<AttachOutcome> wait();

  int64_t first_step() const { return first_; }
  int64_t last_step() const { return last_; }
  bool was_interrupted() const { return interrupted_; }
  const std::vector<std::unique_ptr<Job>>& jobs() const { return jobs_; }  // by rank

 private:
  void check_ranks();
  void listen();
  void await_steps();
  int64_t next_common_step(int attempt);
  bool arm_all(int64_t first, std::string* why);
  bool await_ready(std::string* why);
  void call_off(const char* request);
  void look_for_interruptions();
  bool window_is_ahead() const;
  bool settled(size_t i);
  void end_the_rest(size_t lost);
  void compare_ends();
  void check_interrupted() const;
  control::Message told(size_t i, const control::Message& request);
  std::string unfit(const Job& job) const;

  std::vector<std::unique_ptr<Job>> jobs_;
  AttachRequest request_;
  std::function<int()> interruptions_;
  std::vector<AttachOutcome> outcomes_;
  std::vector<bool> settled_;
  int64_t first_ = 0, last_ = 0;
  double steps_a_second_ = 0;
  int seen_interruptions_ = 0;
  bool called_off_ = false;  // by `forkpoint detach`, while the ranks were being told of the window
  bool interrupted_ = false;
  std::optional<int64_t> give_up_ms_;  // on the steady clock: those that are still at it are ended then
};

// A step that all these jobs can still be told of in time, and how fast they are. Asks twice. Throws Error when one does not answer.
int64_t reachable_step(const std::vector<std::unique_ptr<Job>>& jobs, double margin_s, double* steps_a_second);

}  // namespace forkpoint
