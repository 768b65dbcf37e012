// All processes of one job, however far they have gone from the command that started them: descendants (this process is
// made the reaper of orphans, so that none slips away to init) and whoever carries the job's FORKPOINT_RUN in its
// environment, in whatever session or group. Processes on other machines and in containers of another pid namespace are
// not seen.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace forkpoint {

class JobProcesses {
 public:
  // REQUIRES: before the job is started. Children that this process has already are none of the job's. adopt: orphans become
  // children of this process, which must reap() them; else those that carry no FORKPOINT_RUN are out of sight.
  explicit JobProcesses(const std::string& run_directory, bool adopt = true);

  void set_command(pid_t pid) { command_ = pid; }
  // Reaps whoever has ended; the wait status of the command once that is known.
  std::optional<int> reap();
  // Those that run now; zombies do not.
  std::vector<pid_t> alive() const;
  static bool is_alive(pid_t pid);
  // It, its parent, and so on; empty: it is gone.
  static std::set<pid_t> ancestors(pid_t pid);
  // In this order, and to stopped ones too. How many took it.
  static size_t send(const std::vector<pid_t>& pids, int signal);
  // SIGTERM to all; after `patience`, or when hurry() says so, SIGKILL, parents first, until none is left. Returns
  // those that are left all the same after half a minute (waiting for a device or a file server, in the kernel). A
  // killed process has given its GPU memory back when it is gone.
  std::vector<pid_t> end(std::chrono::milliseconds patience, const std::function<bool()>& hurry);

 private:
  bool wait_for_none(std::chrono::milliseconds limit, const std::function<bool()>& hurry, int repeated_signal);

  std::string variable_;  // FORKPOINT_RUN=...
  std::set<pid_t> not_ours_;
  pid_t command_ = -1;
  std::optional<int> status_;
};

}  // namespace forkpoint
