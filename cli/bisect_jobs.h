// The windows of a bisect: one arm, some steps, recorded to a folder of its own; each is run once, whatever happens
// between.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bisect.h"

namespace forkpoint {

// What is recorded of one arm, or of both.
struct BisectWindow {
  std::string name;  // of the folder: DIR/NAME-good, DIR/NAME-bad
  int64_t first = 0, last = 0;
  std::optional<int64_t> from;  // a checkpoint of so many steps; nothing: from the start
  Level level = Level::step;
  std::string ops;
  bool inputs = false;
  std::vector<int> ranks;
  std::string save_good, save_bad;      // whose operands (lib/probe_contract.h, kSave)
  std::string launch_good, launch_bad;  // STEP:INDEX that is repeated
};

struct WindowDone {
  std::string run;  // the folder
  int64_t steps = 0;
  double seconds = 0;
  uint64_t launches = 0;
  std::vector<std::string> retry;  // what came of the launch's repetition
};

class BisectJobs {
 public:
  BisectJobs(const BisectRequest& request, BisectLog* log) : request_(request), log_(*log) {}

  // Runs it, or finds it in the log. Throws Error when the arm does not do these steps: then nothing is noted.
  WindowDone run(const BisectWindow& window, const BisectArm& arm);
  // Both arms, good first; in one line, what will be run and about how long.
  std::pair<WindowDone, WindowDone> run_both(const std::string& stage, const BisectWindow& window);
  // The verdict on the steps first..last of a window of both arms.
  Verdict compare(const std::pair<WindowDone, WindowDone>& runs, const BisectWindow& window);

  // The newest checkpoint at or before `at_most` steps that both arms have. Nothing: the arms begin at the start.
  std::optional<int64_t> common_start(int64_t at_most) const;
  std::vector<int64_t> checkpoint_steps(const BisectArm& arm) const;  // of whole ones, ascending
  // "about 40 s", by what was learned of windows before and of recorded runs.
  std::string estimate(int64_t steps) const;
  void learn(int64_t steps, double seconds) { known_steps_ += steps, known_seconds_ += seconds; }

  int64_t windows() const { return windows_; }
  int64_t steps() const { return steps_; }
  double seconds() const { return seconds_; }

 private:
  WindowDone start(const BisectWindow& window, const BisectArm& arm, const std::string& run);

  const BisectRequest& request_;
  BisectLog& log_;
  mutable std::map<std::string, std::vector<int64_t>> found_;  // by the folder; looked for once
  int64_t windows_ = 0, steps_ = 0, known_steps_ = 0;
  double seconds_ = 0, known_seconds_ = 0;
};

// For as long as it lives, this process stands in the arm's folder and has the arm's variables: those that change
// results, as they were for the arm, and none else of that kind. What it starts inherits them, and its manifest tells
// of them.
class ArmPlace {
 public:
  explicit ArmPlace(const BisectArm& arm);
  ~ArmPlace();
  ArmPlace(const ArmPlace&) = delete;
  ArmPlace& operator=(const ArmPlace&) = delete;

 private:
  std::string directory_;
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace forkpoint
