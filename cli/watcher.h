// --watch: looks at the run on a thread of its own while the command runs, says what it finds, and acts.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cli/job_boards.h"
#include "cli/processes.h"
#include "cli/recording.h"
#include "lib/watch.h"

namespace forkpoint {

inline constexpr int kStoppedStatus = 124;  // exit status of record where --on-trigger stop has found something

struct Watched {
  std::vector<std::string> notes;  // for the manifest: what was found and done
  std::string first_finding;       // empty: nothing
  bool stopped = false;            // the command was told to end
};

// One thread at a time calls; start once.
class Watcher {
 public:
  // REQUIRES: the run folder is there, the command does not run yet.
  Watcher(const RecordingRequest& request, const Manifest& manifest);
  ~Watcher();
  // The command runs.
  void start();
  // It has ended. Carries a stop out to its end, looks at what is left, and says what there is to say.
  Watched finish();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stop { no, ending_step, terminated, killed };

  void run();
  void look(bool last);
  void trigger(const WatchFinding& finding);
  void say(const std::string& sentence);
  void ask_to_deepen();
  bool write_control(const std::string& text);
  void begin_stop();
  void go_on_stopping();
  bool ranks_have_ended() const;
  std::vector<pid_t> alive() const;
  void say_what_is_left();

  const WatchRequest request_;
  const std::string directory_;
  Watch watch_;
  Watched watched_;
  const int64_t every_, last_wanted_step_;
  const JobProcesses processes_;
  mutable std::optional<JobBoards> boards_;  // of ranks that can be told to end behind a step
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ended_ = false;   // the command has; guarded by mutex_
  bool failed_ = false;  // to look
  Stop stop_ = Stop::no;
  Clock::time_point stop_since_{};
  std::optional<int64_t> to_deepen_;  // the step of a finding for which that has not been asked yet
  std::optional<int64_t> deep_first_, deep_until_;
  uint64_t unsaid_ = 0;
};

}  // namespace forkpoint
