#include "cli/job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <set>

#include "cli/fresh_folders.h"
#include "cli/job_boards.h"
#include "cli/job_signals.h"
#include "cli/knob_options.h"
#include "cli/probe_file.h"
#include "cli/processes.h"
#include "cli/terminal.h"

namespace forkpoint {
namespace {

using contract::StopBoard;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr milliseconds kShortestPoll{2}, kLongestPoll{50};
constexpr milliseconds kTermPatience{5000};  // between SIGTERM and SIGKILL, when all is written
constexpr seconds kDeadRankPatience{15};     // for a launcher to notice that a rank is gone
constexpr seconds kAbsentRankPatience{30};  // for ranks without a step, when all others are done: they may be elsewhere
constexpr seconds kOrphanPatience{2};       // for what outlives the command
constexpr seconds kInterruptPatience{30};   // for the step that a Ctrl-C came in

std::string in_seconds(seconds time) { return fmt::format("{} s", time.count()); }

// What the boards say as a whole.
struct Progress {
  int64_t first_step = -1, last_step = -1;
  int world_size = 0;
  std::set<int> seen, written, lost, behind;  // ranks; behind: those in the earliest step
  bool all_written = false;
};

Progress progress_of(const std::vector<BoardState>& boards) {
  Progress progress;
  int64_t least = INT64_MAX;
  for (const BoardState& board : boards) {
    progress.first_step = progress.first_step < 0 ? board.first_step : std::min(progress.first_step, board.first_step);
    progress.last_step = std::max(progress.last_step, board.step);
    progress.world_size = std::max(progress.world_size, board.world_size);
    progress.seen.insert(board.rank);
    if (board.state == StopBoard::lost) progress.lost.insert(board.rank);
    if (board.state == StopBoard::written) {
      progress.written.insert(board.rank);
    } else if (board.step <= least) {
      if (board.step < least) progress.behind.clear();
      least = board.step;
      progress.behind.insert(board.rank);
    }
  }
  progress.all_written = !boards.empty() && std::all_of(boards.begin(), boards.end(), [](const BoardState& board) {
    return board.state == StopBoard::written;
  });
  return progress;
}

std::string ranks_in_words(const std::set<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

class Runner {
 public:
  Runner(const JobRequest& request, JobSignals* signals)
      : request_(request),
        signals_(*signals),
        processes_(request.recording.run_directory),
        boards_(request.recording.run_directory) {}
  // Whatever was thrown.
  ~Runner() {
    if (started_ && !ended_) processes_.end(milliseconds(0), nullptr);
  }

  void start(const EnvironmentChanges& environment) {
    const int output = open_output();
    try {
      processes_.set_command(
          start_in_background(request_.recording.command, environment, output, signals_.inherited_mask()));
    } catch (...) {
      close(output);
      throw;
    }
    close(output);
    signals_.ignore_broken_pipe();
    started_ = true;
    begun_ = moved_ = steady_clock::now();
  }

  // Until B is over, or cannot be any more; then ends all processes.
  void watch(JobResult* result) {
    milliseconds poll = kShortestPoll;
    for (bool over = false; !over;) {
      const bool woken = signals_.wait(poll);
      poll = woken ? kShortestPoll : std::min(poll * 2, kLongestPoll);
      over = look(result);
    }
    end_processes(result);
    const Progress progress = progress_of(boards_.read());
    result->first_step = progress.first_step;
    result->times = boards_.step_times();
    if (progress.first_step >= 0) {
      result->steps_run =
          std::max<int64_t>(0, std::min(progress.last_step, request_.stop_after) - progress.first_step + 1);
    }
    result->seconds = std::chrono::duration<double>(steady_clock::now() - begun_).count();
  }

 private:
  int open_output() const {
    const std::string path = request_.recording.run_directory + "/job.log";
    const int file = request_.show_output ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)
                                          : open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) {
      throw Error(
          fmt::format("{}: cannot be written: {}.", request_.show_output ? "stderr" : path, std::strerror(errno)));
    }
    return file;
  }

  // True when the job is to be ended, or has ended.
  bool look(JobResult* result) {
    const auto now = steady_clock::now();
    const std::vector<BoardState> boards = boards_.read();
    const Progress progress = progress_of(boards);
    note_movement(boards, now);
    const bool command_ended = processes_.reap().has_value();
    if (signals_.first() != 0) return look_interrupted(progress, boards, command_ended, now, result);
    if (!progress.lost.empty()) {
      return give_up(result, fmt::format("the recording of {} ended before step {} was over (see {})",
                                         ranks_in_words(progress.lost), request_.stop_after, log_name()));
    }
    if (wrong_start(progress, result)) return true;
    if (is_done(progress, now) && (!request_.may_stop || request_.may_stop())) {
      result->end = command_ended ? JobEnd::by_itself : JobEnd::stopped;
      return true;
    }
    if (command_ended) return look_after_end(progress, boards, now, result);
    return look_for_death(progress, boards, now, result) || look_for_hang(progress, now, result);
  }

  std::string log_name() const {
    return request_.show_output ? "above" : request_.recording.run_directory + "/job.log";
  }

  bool give_up(JobResult* result, std::string why) {
    result->end = JobEnd::short_of;
    result->trouble = std::move(why);
    return true;
  }

  void note_movement(const std::vector<BoardState>& boards, steady_clock::time_point now) {
    int64_t sum = 0;
    for (const BoardState& board : boards) sum += 1 + board.step + board.state;
    if (sum != movement_) moved_ = now;
    movement_ = sum;
  }

  bool wrong_start(const Progress& progress, JobResult* result) {
    if (!request_.begins_with || progress.first_step < 0 || progress.first_step == *request_.begins_with) return false;
    return give_up(
        result, fmt::format("the job began with step {}, not with step {}: it did not load the checkpoint that it was "
                            "given, or counts its steps in another way",
                            progress.first_step, *request_.begins_with));
  }

  // Ranks that have taken no step here may run on another machine, or be late.
  bool is_done(const Progress& progress, steady_clock::time_point now) {
    if (!progress.all_written) return false;
    const std::vector<int>& wanted = request_.recording.ranks;
    size_t expected = static_cast<size_t>(progress.world_size);
    if (!wanted.empty()) {
      expected = static_cast<size_t>(
          std::count_if(wanted.begin(), wanted.end(), [&](int rank) { return rank < progress.world_size; }));
    }
    return progress.written.size() >= expected || now - moved_ > kAbsentRankPatience;
  }

  static bool any_rank_lives(const std::vector<BoardState>& boards) {
    return std::any_of(boards.begin(), boards.end(), [](const BoardState& board) {
      return board.state != StopBoard::written && JobProcesses::is_alive(static_cast<pid_t>(board.pid));
    });
  }

  // A launcher that does not wait for its ranks has ended as well.
  bool look_after_end(const Progress& progress, const std::vector<BoardState>& boards, steady_clock::time_point now,
                      JobResult* result) {
    if (!command_ended_) command_ended_ = now;
    if (any_rank_lives(boards)) return look_for_hang(progress, now, result);
    if (now - *command_ended_ < kOrphanPatience && !processes_.alive().empty()) return false;
    // What it wrote last may have come after we looked.
    const Progress last = progress_of(boards_.read());
    if (last.all_written && is_done(last, now)) {
      result->end = JobEnd::by_itself;
      return true;
    }
    const TargetEnd end = target_end(*processes_.reap());
    if (last.first_step < 0) return give_up(result, fmt::format("{} before it began a step", end.sentence()));
    return give_up(result,
                   fmt::format("{} in or behind step {}, before step {} was over{}", end.sentence(), last.last_step,
                               request_.stop_after, last.behind.empty() ? "" : " on " + ranks_in_words(last.behind)));
  }

  bool look_for_death(const Progress& progress, const std::vector<BoardState>& boards, steady_clock::time_point now,
                      JobResult* result) {
    std::set<int> dead;
    for (const BoardState& board : boards) {
      const bool alive = JobProcesses::is_alive(static_cast<pid_t>(board.pid));
      if (alive) seen_alive_.insert(board.pid);
      if (!alive && board.state != StopBoard::written && seen_alive_.contains(board.pid)) dead.insert(board.rank);
    }
    if (dead.empty()) return death_seen_.reset(), false;
    if (!death_seen_) death_seen_ = now;
    if (now - *death_seen_ < kDeadRankPatience) return false;
    return give_up(
        result,
        fmt::format("the process of {} ended before step {} was over (the job was in step {}), and the command goes "
                    "on without it",
                    ranks_in_words(dead), request_.stop_after, progress.last_step));
  }

  bool look_for_hang(const Progress& progress, steady_clock::time_point now, JobResult* result) {
    if (request_.patience == seconds(0) || now - moved_ < request_.patience) return false;
    const std::string waited = fmt::format("for {} (--timeout)", in_seconds(request_.patience));
    if (progress.first_step < 0) {
      return give_up(
          result,
          fmt::format("the job began no step {}: does it call forkpoint.h, or train with torch.optim?", waited));
    }
    if (progress.all_written) {
      return give_up(result,
                     fmt::format("step {} is over on {}, but what the job should leave behind it did not come {}",
                                 request_.stop_after, ranks_in_words(progress.written), waited));
    }
    return give_up(result, fmt::format("no rank began another step {}: {} stand{} in step {}, and the last step is {}",
                                       waited, ranks_in_words(progress.behind), progress.behind.size() == 1 ? "s" : "",
                                       progress.last_step, request_.stop_after));
  }

  bool look_interrupted(const Progress& progress, const std::vector<BoardState>& boards, bool command_ended,
                        steady_clock::time_point now, JobResult* result) {
    if (!interrupted_) {
      interrupted_ = now;
      print_note("ending the job behind the step that it is in; once more to end it at once");
    }
    boards_.stop_soon();
    result->end = JobEnd::interrupted;
    result->interrupted_by = signals_.first();
    const bool over =
        boards.empty() || progress.all_written || !progress.lost.empty() || (command_ended && !any_rank_lives(boards));
    return over || signals_.count() > 1 || now - *interrupted_ > kInterruptPatience;
  }

  // Notes of processes that found their rank's stream there already.
  std::set<std::string> refusals() const {
    std::set<std::string> found;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(request_.recording.run_directory, error), end;
         !error && entry != end; entry.increment(error)) {
      if (entry->path().filename().string().starts_with("refused-")) found.insert(entry->path().string());
    }
    return found;
  }

  void end_processes(JobResult* result) {
    const auto before = signals_.count();
    const std::optional<int> own_end = processes_.reap();
    const auto hurry = [&] { return signals_.poll(), signals_.count() > std::max<size_t>(before, 1); };
    const std::set<std::string> refused = refusals();
    const std::vector<pid_t> left = processes_.end(kTermPatience, hurry);
    ended_ = true;
    // A launcher that starts its ranks again, now that the first ones are gone: these are no part of the run, and left
    // no stream.
    for (const std::string& path : refusals()) {
      if (result->end == JobEnd::stopped && !refused.contains(path)) unlink(path.c_str());
    }
    if (!left.empty())
      print_warning(fmt::format("processes of the job that cannot be ended: {}", fmt::join(left, ", ")));
    if (own_end) {
      result->target = target_end(*own_end);
      if (result->end == JobEnd::by_itself) result->target.exit_status = 0, result->target.signal = 0;
      return;
    }
    switch (result->end) {
      case JobEnd::stopped:
      case JobEnd::by_itself:
        result->target.stopped = fmt::format("stopped by forkpoint behind step {}", request_.stop_after);
        break;
      case JobEnd::short_of:
        result->target.exit_status = 1;
        result->target.stopped = "ended by forkpoint: " + result->trouble;
        break;
      case JobEnd::interrupted:
        result->target.exit_status = 128 + result->interrupted_by;
        result->target.stopped = fmt::format("ended by forkpoint on signal {} ({})", result->interrupted_by,
                                             strsignal(result->interrupted_by));
        break;
    }
  }

  using OptionalTime = std::optional<steady_clock::time_point>;
  const JobRequest& request_;
  JobSignals& signals_;
  JobProcesses processes_;
  JobBoards boards_;
  bool started_ = false, ended_ = false;
  steady_clock::time_point begun_, moved_;
  int64_t movement_ = 0;
  std::set<int64_t> seen_alive_;
  OptionalTime death_seen_, command_ended_, interrupted_;
};

EnvironmentChanges environment_of(const JobRequest& request) {
  EnvironmentChanges changes = contract_environment(request.recording, find_probe());
  for (const auto& [name, value] : request.environment) changes[name] = value;
  changes[contract::kStopAfter] = std::to_string(request.stop_after);
  return changes;
}

}  // namespace

JobResult run_job(const JobRequest& request) {
  say_knobs(request.recording);
  const EnvironmentChanges environment = environment_of(request);
  const std::string& folder = request.recording.run_directory;
  const FreshFolders fresh(folder);
  create_run(folder, manifest_before(request.recording));
  const Manifest manifest = read_manifest(folder);
  JobSignals signals;
  JobResult result;
  {
    Runner runner(request, &signals);
    try {
      runner.start(environment);
    } catch (const Error&) {
      fresh.remove(folder);
      throw;
    }
    runner.watch(&result);
  }
  result.recorded = finish_recording(request.recording, manifest, result.target);
  signals.poll();
  if (signals.first() != 0 && result.end != JobEnd::interrupted) {
    result.end = JobEnd::interrupted, result.interrupted_by = signals.first();
  }
  return result;
}

}  // namespace forkpoint
