#include "cli/watcher.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>

#include "cli/terminal.h"
#include "lib/hash_stream_file.h"
#include "lib/probe_contract.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using std::chrono::milliseconds;

constexpr auto kPeriod = milliseconds(25);
// At most a twentieth of one core, however many ranks there are.
constexpr int kShareOfCore = 20;
constexpr auto kStepPatience =
    milliseconds(8'000);  // for the ranks to end the step that they are in, and their streams
constexpr auto kTermPatience = milliseconds(10'000);  // for the job to end after SIGTERM
constexpr auto kKillPatience = milliseconds(2'000);
constexpr auto kAlivePeriod = milliseconds(100);  // it reads all of /proc
constexpr size_t kMostSaid = 20;
// From what was written last to the step in which every rank has heard of it: a rank writes every 50 ms, is read every
// 25 and looks every 50; the rest is for a busy machine.
constexpr double kHearSeconds = 0.5;
// From a look at the boards to all of them being written to.
constexpr double kBoardSeconds = 0.01;

std::string processes_in_words(size_t count) { return count == 1 ? "1 process" : fmt::format("{} processes", count); }

// Each rank is a file that stays open.
void allow_descriptors() {
  struct rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 65'536);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Watcher::Watcher(const RecordingRequest& request, const Manifest& manifest)
    : request_(request.watch),
      directory_(std::filesystem::absolute(request.run_directory).lexically_normal().string()),
      watch_(directory_, manifest,
             {request.watch.nan, request.watch.replicas, request.watch.on_trigger == OnTrigger::deepen}),
      every_(request.every),
      last_wanted_step_(request.steps && request.steps->last ? *request.steps->last
                                                             : std::numeric_limits<int64_t>::max()),
      processes_(directory_, false) {
  if (request_.on_trigger == OnTrigger::stop) boards_.emplace(directory_);
}

Watcher::~Watcher() {
  if (thread_.joinable()) finish();
}

void Watcher::start() {
  allow_descriptors();
  thread_ = std::thread([this] {
    try {
      run();
    } catch (const std::exception& error) {
      print_warning(fmt::format("the watch has ended: {}", error.what()));
    }
  });
}

void Watcher::run() {
  for (;;) {
    const auto begun = Clock::now();
    look(false);
    const auto pause = std::max<Clock::duration>(kPeriod, (Clock::now() - begun) * kShareOfCore);
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, pause, [this] { return ended_; });
    if (!ended_) continue;
    lock.unlock();
    break;
  }
  // The command's first process is gone; a stop that has begun is for all of them.
  while (stop_ != Stop::no && !alive().empty()) {
    look(false);
    if (stop_ == Stop::killed && Clock::now() - stop_since_ > kKillPatience) break;
    std::this_thread::sleep_for(stop_ == Stop::ending_step ? kPeriod : kAlivePeriod);
  }
}

// A stop that has begun goes on also where nothing can be read any more.
void Watcher::look(bool last) {
  try {
    if (!failed_) {
      const std::vector<WatchFinding> findings = last ? watch_.finish() : watch_.look();
      for (const std::string& problem : watch_.take_problems()) print_warning(problem);
      for (const WatchFinding& finding : findings) trigger(finding);
    }
  } catch (const std::exception& error) {
    failed_ = true;
    say(fmt::format("what was recorded from here on is not watched: {}", error.what()));
  }
  if (last) return;
  if (to_deepen_) ask_to_deepen();
  if (stop_ != Stop::no) go_on_stopping();
}

void Watcher::trigger(const WatchFinding& finding) {
  const std::string sentence = finding.sentence();
  if (watched_.notes.size() < kMostSaid) {
    say(sentence);
  } else {
    ++unsaid_;
  }
  if (watched_.first_finding.empty()) watched_.first_finding = sentence;
  bool ended = false;
  {
    const std::lock_guard lock(mutex_);
    ended = ended_;
  }
  if (ended) return;  // there is nothing left to act on
  if (request_.on_trigger == OnTrigger::stop && stop_ == Stop::no) begin_stop();
  if (request_.on_trigger != OnTrigger::deepen) return;
  to_deepen_ = std::max(to_deepen_.value_or(finding.at.step), finding.at.step);
}

void Watcher::say(const std::string& sentence) {
  watched_.notes.push_back("watch: " + sentence);
  print_warning(sentence);
}

// ---- Deepen

void Watcher::ask_to_deepen() {
  const auto newest = watch_.newest_step(), oldest = watch_.oldest_step();
  const double step_seconds = watch_.step_seconds();
  if (!newest || !oldest || step_seconds <= 0) return;  // asked again with the next look
  // A rank that is still in them must not be told of others.
  if (deep_until_ && *oldest <= *deep_until_) return to_deepen_.reset();
  // Every rank must have heard of it when the first of these steps begins, so that all of them begin together.
  int64_t first = std::max(*newest, *to_deepen_) + 1 + static_cast<int64_t>(std::ceil(kHearSeconds / step_seconds));
  first += (every_ - first % every_) % every_;
  const int64_t last = std::min(first + (request_.deepen_steps - 1) * every_, last_wanted_step_);
  to_deepen_.reset();
  if (last < first) return say(fmt::format("no step is recorded by layer: step {} is the last one", last));
  if (!write_control(fmt::format("deepen {} {}\n", first, last))) return;
  if (!deep_first_) deep_first_ = first;
  deep_until_ = last;
  const std::string which =
      first == last ? fmt::format("step {} is", first) : fmt::format("steps {} to {} are", first, last);
  const std::string what = fmt::format("{} recorded by layer, on every rank", which);
  watched_.notes.push_back("watch: " + what);
  print_note(what);
}

// Replaced as a whole: a rank never reads half of it.
bool Watcher::write_control(const std::string& text) {
  const std::string path = directory_ + "/" + contract::kControlFile;
  std::ofstream(path + ".new") << text;
  if (std::rename((path + ".new").c_str(), path.c_str()) == 0) return true;
  print_warning(fmt::format("{}: cannot be written, so the ranks do not hear what the watch asks of them.", path));
  return false;
}

// ---- Stop: the ranks end behind a step, then SIGTERM, then SIGKILL

void Watcher::begin_stop() {
  const double step_seconds = watch_.step_seconds();
  const double steps = step_seconds > 0 ? std::ceil(kBoardSeconds / step_seconds) : 1;
  boards_->stop_soon(step_seconds > 100 * kBoardSeconds ? 0 : static_cast<int64_t>(steps));
  stop_ = Stop::ending_step;
  stop_since_ = Clock::now();
}

// Each has written all that it recorded, or never will.
bool Watcher::ranks_have_ended() const {
  const std::vector<BoardState> states = boards_->read();
  return !states.empty() && std::all_of(states.begin(), states.end(), [](const BoardState& board) {
    return board.state == contract::StopBoard::written || board.state == contract::StopBoard::lost;
  });
}

// Ranks need not descend from the command (a launcher's daemon has them), and what a program calls itself may lie where
// its environment was.
std::vector<pid_t> Watcher::alive() const {
  std::vector<pid_t> pids = processes_.alive();
  for (const StreamHeader* header : watch_.headers()) {
    const auto pid = static_cast<pid_t>(header->pid);
    const bool known = std::find(pids.begin(), pids.end(), pid) != pids.end();
    if (!known && process_is_alive(*header).value_or(false)) pids.push_back(pid);
  }
  return pids;
}

void Watcher::go_on_stopping() {
  const auto waited = Clock::now() - stop_since_;
  if (stop_ == Stop::ending_step && (ranks_have_ended() || waited > kStepPatience)) {
    // A launcher that is told first may have ended the rest before their turn.
    const std::vector<pid_t> pids = alive();
    watched_.stopped = JobProcesses::send(pids, SIGTERM) > 0;
    stop_ = Stop::terminated, stop_since_ = Clock::now();
    if (watched_.stopped)
      print_note(fmt::format("the command is stopped: SIGTERM to {}", processes_in_words(pids.size())));
  } else if (stop_ == Stop::terminated && waited > kTermPatience) {
    const size_t sent = JobProcesses::send(alive(), SIGKILL);
    stop_ = Stop::killed, stop_since_ = Clock::now();
    if (sent == 0) return;
    print_warning(fmt::format("the command did not end within {} s of SIGTERM: SIGKILL to {}",
                              std::chrono::duration_cast<std::chrono::seconds>(kTermPatience).count(),
                              processes_in_words(sent)));
  }
}

Watched Watcher::finish() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  look(true);
  say_what_is_left();
  boards_.reset();
  std::error_code ignored;
  std::filesystem::remove(directory_ + "/" + contract::kControlFile, ignored);
  return std::move(watched_);
}

void Watcher::say_what_is_left() {
  if (unsaid_ > 0) say(fmt::format("and {}", counted(unsaid_, "more such finding")));
  for (const std::string& sentence : watch_.summary()) {
    watched_.notes.push_back("watch: " + sentence);
    print_note("watch: " + sentence);
  }
  if (to_deepen_ || (deep_first_ && watch_.newest_step().value_or(0) < *deep_first_)) {
    say("the command ended before the steps that were to be recorded by layer");
  }
}

}  // namespace forkpoint
