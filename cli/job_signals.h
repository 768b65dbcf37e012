// What is sent to us while a job runs: kept and counted instead of ending us. The job is out of the terminal's reach,
// so that a Ctrl-C comes to us alone.
#pragma once

#include <chrono>
#include <csignal>
#include <cstddef>

namespace forkpoint {

class JobSignals {
 public:
  JobSignals();
  ~JobSignals();  // what has come is forgotten: the caller asks first()
  JobSignals(const JobSignals&) = delete;
  JobSignals& operator=(const JobSignals&) = delete;

  // Behind the start of the job, which is not to inherit it: a reader of our stderr that has left does not end us.
  void ignore_broken_pipe();
  // Until a signal comes or a child ends (true), at most so long.
  bool wait(std::chrono::milliseconds limit);
  void poll();
  int first() const { return first_; }  // 0: none so far
  size_t count() const { return count_; }
  const sigset_t& inherited_mask() const { return mask_before_; }

 private:
  sigset_t awaited_, mask_before_;
  struct sigaction child_before_ {
  }, pipe_before_{};
  int first_ = 0;
  size_t count_ = 0;
};

}  // namespace forkpoint
