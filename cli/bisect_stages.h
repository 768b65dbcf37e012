// The stages of a bisect, in order: where (steps), what (layer), then op or launch with its operands.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bisect_jobs.h"
#include "lib/bisect_search.h"

namespace forkpoint {

// Up to step `same` the arms are the same, behind step `differs` they are not (or so it was seen, or is to be found
// out).
struct ForkRange {
  int64_t same = -1, differs = 0;
};

class Bisect {
 public:
  Bisect(const BisectRequest& request, BisectLog* log) : request_(request), log_(*log), jobs_(request, log) {}
  BisectResult run();

 private:
  // bisect_steps.cpp. Nothing: it is decided already, and the verdict is set.
  std::optional<ForkRange> from_runs();
  std::optional<ForkRange> from_commands();
  std::optional<ForkRange> from_script();
  std::optional<ForkRange> record_all(int64_t first, int64_t last);
  std::optional<ForkRange> narrowed(ForkRange range);
  std::optional<ForkRange> by_contents(int64_t first, int64_t last);
  std::pair<int64_t, int64_t> steps_of_request();
  Verdict ask(int64_t step, int64_t same);
  StepAnswer ask_script(int64_t step);
  Outcome compare_contents(int64_t step);

  // bisect_stages.cpp
  bool find_layer(ForkRange range);
  void find_op(const ForkRange& around);
  std::optional<Verdict> fork_finer(const Divergence& first, BisectWindow* window,
                                    std::pair<WindowDone, WindowDone>* runs);
  std::optional<Verdict> fork_again(BisectWindow window, const std::string& stage,
                                    std::pair<WindowDone, WindowDone>* runs);
  void adopt(const Verdict& finer, const char* stage);
  void save_launch(const BisectWindow& as, const std::pair<WindowDone, WindowDone>& fork);
  void not_again(const std::string& where, int64_t times);
  bool may_have_launches() const;
  BisectWindow window_around(const ForkRange& range) const;
  void compare_with_recorded(const std::pair<WindowDone, WindowDone>& runs, const BisectWindow& window,
                             const Verdict& fork);
  void tell_which_repeats(const std::pair<WindowDone, WindowDone>& runs, const BisectWindow& window);

  // A stage's costs are those of the windows between begin and end.
  void begin_stage() {
    windows_before_ = jobs_.windows(), steps_before_ = jobs_.steps(), seconds_before_ = jobs_.seconds();
  }
  void end_stage(std::string name, std::string found);
  void note(std::string sentence) { notes_.push_back(std::move(sentence)); }

  const BisectRequest& request_;
  BisectLog& log_;
  BisectJobs jobs_;
  BisectResult result_;
  std::optional<Verdict> seen_;         // the first verdict that showed the fork
  WindowDone layer_run_;                // of the good arm
  std::optional<int64_t> script_step_;  // the first that --script called bad
  std::optional<int64_t> other_contents_;  // both arms have a checkpoint of so many steps, and these are not the same
  std::vector<std::string> notes_;
  int passes_ = 0;  // of record_all
  int round_ = 0;   // of find_layer: a fork that shows earlier begins another one
  int64_t windows_before_ = 0, steps_before_ = 0;
  double seconds_before_ = 0;
};

// The index of the launch in its step, in each run; nothing where it cannot be told from others of its kernel.
struct LaunchPlace {
  std::optional<int64_t> good, bad;
  friend bool operator==(const LaunchPlace&, const LaunchPlace&) = default;
};
LaunchPlace find_launch(const std::pair<WindowDone, WindowDone>& runs, const Divergence& first, int rank);

// Sentences on what an op was handed and what it left in both runs; `first` says which op, and where.
std::vector<std::string> operand_sentences(const std::string& good, const std::string& bad, const Divergence& first,
                                           int rank);

}  // namespace forkpoint
