#include "cli/bisect_jobs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "cli/job_command.h"
#include "cli/machine.h"
#include "cli/processes.h"
#include "cli/replay.h"
#include "cli/terminal.h"
#include "lib/cause_facts.h"
#include "lib/diff.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Json = BisectLog::Json;

void set_variable(const std::string& name, const std::optional<std::string>& value) {
  if (value)
    setenv(name.c_str(), value->c_str(), 1);
  else
    unsetenv(name.c_str());
}

// What a killed bisect left of a window that is not in the log: its processes, and the folders that it made.
void clear_away(const std::string& run) {
  if (!fs::exists(run) && !fs::exists(run + ".checkpoint")) return;
  print_note(fmt::format("{} is not in the log: it was cut short, and is made anew", run));
  JobProcesses left(run);
  left.end(std::chrono::milliseconds(0), [] { return false; });
  fs::remove_all(run);
  fs::remove_all(run + ".checkpoint");
}

// The arm's command from its start: what it saves does not go to the user's checkpoints.
std::vector<std::string> command_from_start(const BisectArm& arm, const BisectRequest& request,
                                            const std::string& run) {
  if (has_placeholder(arm.command)) {
    std::vector<Checkpoint> all;
    if (!arm.checkpoints.empty()) all = find_checkpoints(arm.checkpoints, request.pattern);
    const auto broken = std::ranges::find_if(all, [](const Checkpoint& checkpoint) { return !checkpoint.whole; });
    const std::string why =
        broken == all.end() ? "" : fmt::format(" ({} is not whole: {})", broken->path, broken->why_not);
    throw UsageError(
        fmt::format("bisect: the {} command has to be given a checkpoint, and there is no whole one at or before the "
                    "first step{}.",
                    arm.name, why),
        "Name the folder with --checkpoint, and steps behind its first one with --steps A:B.");
  }
  CommandValues values;
  values.run = run;
  std::vector<std::string> command = fill_in(arm.command, values);
  const std::string own = run + ".checkpoint";
  const auto is_users = [&](const std::string& path, const std::string&) {
    return is_same_folder(path, arm.checkpoints);
  };
  if (!arm.checkpoints.empty()) redirect(is_users, own, &command);
  keep_users_checkpoints(request.pattern, request.only_read, own, &command);
  if (std::any_of(command.begin(), command.end(), [&](const auto& word) { return word.ends_with(own); }))
    fs::create_directory(own);
  return command;
}

JobResult run_from_start(const BisectArm& arm, const RecordingRequest& recording, const BisectRequest& request) {
  JobRequest job;
  job.recording = recording;
  job.recording.command = command_from_start(arm, request, recording.run_directory);
  job.stop_after = *recording.steps->last;
  job.patience = request.patience;
  job.show_output = request.show_output;
  print_note(fmt::format("steps {} to {} from the start: {}", *recording.steps->first, job.stop_after,
                         shell_words(job.recording.command)));
  const JobResult result = run_job(job);
  report_job(job, result);
  fs::remove_all(recording.run_directory + ".checkpoint");
  return result;
}

JobResult run_from_checkpoint(const BisectArm& arm, const RecordingRequest& recording, const BisectRequest& request,
                              int64_t from) {
  ReplayRequest replay;
  replay.checkpoint_directory = arm.checkpoints;
  replay.checkpoint_pattern = request.pattern;
  replay.preset = request.preset;
  replay.only_read = request.only_read;
  replay.first_step = *recording.steps->first;
  replay.last_step = *recording.steps->last;
  replay.start_at_most = from;
  replay.recording = recording;
  replay.patience = request.patience;
  replay.show_output = request.show_output;
  const Replay done = replay_window(replay);
  if (done.checkpoint.step != from) {
    throw Error(fmt::format("{}: the checkpoint of {} steps was there, and is not any more.", arm.checkpoints, from));
  }
  // A job that died has more to say.
  if (!done.opened_checkpoint && done.job.end != JobEnd::short_of && done.job.end != JobEnd::interrupted) {
    throw Error(
        fmt::format("bisect: the {} command was given the checkpoint of {} steps, and its job opened no file of it: it "
                    "began anew.",
                    arm.name, from),
        fmt::format("Say where the command takes it: --{} 'CMD' with {{checkpoint}} or {{checkpoint_dir}} in a word.",
                    arm.name));
  }
  return done.job;
}

RecordingRequest recording_of(const BisectWindow& window, const BisectArm& arm, const BisectRequest& request,
                              const std::string& run) {
  const bool good = arm.name == "good";
  RecordingRequest recording;
  recording.run_directory = run;
  recording.command = arm.command;
  recording.level = window.level;
  recording.steps = StepRange{window.first, window.last};
  recording.ranks = window.ranks;
  recording.step_on = request.step_on;
  if (arm.knobs) recording.knobs = parse_knobs(*arm.knobs);
  recording.ops = window.ops;
  recording.inputs = window.inputs;
  const std::string& save = good ? window.save_good : window.save_bad;
  const std::string& launch = good ? window.launch_good : window.launch_bad;
  if (!save.empty()) recording.save = save;
  if (!launch.empty()) recording.retry = request.retry, recording.retry_launch = launch;
  if (window.level == Level::launch) recording.fixed_addresses = fix_addresses();
  return recording;
}

std::string in_time(double seconds) {
  if (seconds < 90) return fmt::format("{:.0f} s", std::max(1.0, std::ceil(seconds)));
  if (seconds < 5400) return fmt::format("{:.0f} min", std::ceil(seconds / 60));
  return fmt::format("{:.1f} h", seconds / 3600);
}

}  // namespace

ArmPlace::ArmPlace(const BisectArm& arm) : directory_(fs::current_path().string()) {
  for (const auto& [name, value] : numeric_environment()) {
    if (!arm.environment.contains(name)) before_[name] = value;
  }
  for (const auto& [name, value] : arm.environment) {
    const char* old = std::getenv(name.c_str());
    before_[name] = old ? std::optional<std::string>(old) : std::nullopt;
  }
  for (const auto& [name, value] : before_) {
    const auto wanted = arm.environment.find(name);
    set_variable(name, wanted == arm.environment.end() ? std::nullopt : std::optional<std::string>(wanted->second));
  }
  fs::current_path(arm.working_directory);
}

ArmPlace::~ArmPlace() {
  std::error_code ignored;
  fs::current_path(directory_, ignored);
  for (const auto& [name, value] : before_) set_variable(name, value);
}

WindowDone BisectJobs::run(const BisectWindow& window, const BisectArm& arm) {
  const std::string key = fmt::format("{}-{}", window.name, arm.name);
  const std::string run = request_.folder + "/" + key;
  WindowDone done;
  done.run = run;
  if (const Json* entry = log_.find(key)) {
    if (!fs::exists(run + "/run.json"))
      throw Error(fmt::format("{}: it is in the log {}, and not there any more.", run, log_.path()),
                  "Start anew with another folder (-o).");
    done.steps = entry->at("steps"), done.seconds = entry->at("seconds"), done.launches = entry->at("launches");
    entry->at("retry").get_to(done.retry);
  } else {
    done = start(window, arm, run);
    log_.note(key,
              {{"steps", done.steps}, {"seconds", done.seconds}, {"launches", done.launches}, {"retry", done.retry}});
  }
  ++windows_;
  steps_ += done.steps, seconds_ += done.seconds;
  learn(done.steps, done.seconds);
  return done;
}

WindowDone BisectJobs::start(const BisectWindow& window, const BisectArm& arm, const std::string& run) {
  clear_away(run);
  const ArmPlace place(arm);
  const RecordingRequest recording = recording_of(window, arm, request_, run);
  const JobResult job = window.from ? run_from_checkpoint(arm, recording, request_, *window.from)
                                    : run_from_start(arm, recording, request_);
  const std::string resume = fmt::format("forkpoint bisect --resume -o {}", request_.folder);
  if (job.end == JobEnd::interrupted) {
    print_note(fmt::format("interrupted; to go on: {}", resume));
    exit_interrupted(job);
  }
  if (job.end == JobEnd::short_of || job.recorded.ranks == 0) {
    throw Error(fmt::format("the {} arm did not do steps {} to {}: {}.", arm.name, window.first, window.last,
                            job.trouble.empty() ? "it recorded nothing" : job.trouble),
                fmt::format("See {}/job.log; when the reason is gone: {}", run, resume));
  }
  WindowDone done;
  done.run = run;
  done.steps = job.steps_run, done.seconds = job.seconds, done.launches = job.recorded.launches;
  done.retry = job.recorded.retry;
  return done;
}

std::pair<WindowDone, WindowDone> BisectJobs::run_both(const std::string& stage, const BisectWindow& window) {
  const int64_t each = window.last - window.from.value_or(0) + 1;
  const bool one = window.first == window.last;
  print_note(
      fmt::format("{}: both arms {}, recording {} at level {}: {}", stage,
                  window.from ? fmt::format("from the checkpoint of {} steps", *window.from) : "from the start",
                  one ? fmt::format("step {}", window.first) : fmt::format("steps {} to {}", window.first, window.last),
                  name(window.level), estimate(2 * each)));
  const WindowDone good = run(window, request_.good);
  return {good, run(window, request_.bad)};
}

Verdict BisectJobs::compare(const std::pair<WindowDone, WindowDone>& runs, const BisectWindow& window) {
  const Run a = Run::open(runs.first.run), b = Run::open(runs.second.run);
  DiffOptions options;
  options.first_step = window.first;
  options.last_step = window.last;
  options.ranks = window.ranks;
  // What was loaded is the state before the window only where the window begins with it.
  options.loads = window.from.value_or(0) == window.first;
  return diff(a, b, options);
}

std::vector<int64_t> BisectJobs::checkpoint_steps(const BisectArm& arm) const {
  if (arm.checkpoints.empty()) return {};
  const auto [entry, is_new] = found_.try_emplace(arm.checkpoints);
  std::vector<int64_t>& steps = entry->second;
  if (!is_new) return steps;
  for (const Checkpoint& checkpoint : find_checkpoints(arm.checkpoints, request_.pattern)) {
    if (checkpoint.whole && (steps.empty() || steps.back() != checkpoint.step)) steps.push_back(checkpoint.step);
  }
  return steps;
}

std::optional<int64_t> BisectJobs::common_start(int64_t at_most) const {
  const std::vector<int64_t> good = checkpoint_steps(request_.good), bad = checkpoint_steps(request_.bad);
  std::optional<int64_t> newest;
  for (const int64_t step : good) {
    if (step <= at_most && std::binary_search(bad.begin(), bad.end(), step)) newest = step;
  }
  return newest;
}

std::string BisectJobs::estimate(int64_t steps) const {
  if (known_steps_ == 0) return "how long is not known yet";
  return "about " + in_time(static_cast<double>(steps) * known_seconds_ / static_cast<double>(known_steps_));
}

}  // namespace forkpoint
