// Which step: of recorded runs by their comparison, of two commands by halves from common checkpoints.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "cli/bisect_stages.h"
#include "cli/job_command.h"
#include "cli/terminal.h"
#include "lib/checkpoint_compare.h"
#include "lib/checkpoints.h"
#include "lib/diff.h"
#include "lib/verdict_text.h"

extern char** environ;

namespace forkpoint {
namespace {

using Json = BisectLog::Json;

constexpr int kSkip = 125, kNotRun = 126, kNotFound = 127;  // exit statuses of a script

std::time_t time_of(const std::string& iso) {
  std::tm parts{};
  return strptime(iso.c_str(), "%Y-%m-%dT%H:%M:%S", &parts) ? timegm(&parts) : -1;
}

double seconds_of(const Manifest& manifest) {
  const std::time_t begin = time_of(manifest.started_at), end = time_of(manifest.ended_at);
  return begin < 0 || end <= begin ? 0 : static_cast<double>(end - begin);
}

// The last step before `step` that both runs hold on every rank; nothing: there is none.
std::optional<int64_t> step_before(const Run& a, const Run& b, int64_t step) {
  std::optional<int64_t> least;
  for (const auto& stream : a.streams()) {
    const HashStreamReader* other = b.stream_of(stream->header().rank);
    if (other == nullptr) continue;
    std::vector<int64_t> theirs;
    for (const StepSummary& summary : other->steps()) theirs.push_back(summary.step);
    std::sort(theirs.begin(), theirs.end());
    std::optional<int64_t> last;
    for (const StepSummary& summary : stream->steps()) {
      if (summary.step < 0 || summary.step >= step || !std::binary_search(theirs.begin(), theirs.end(), summary.step))
        continue;
      last = std::max(last.value_or(0), summary.step);
    }
    if (!last) return std::nullopt;
    least = std::min(least.value_or(*last), *last);
  }
  return least;
}

std::string range_text(int64_t first, int64_t last) {
  return first == last ? fmt::format("step {}", first) : fmt::format("steps {} to {}", first, last);
}

// With our stdout for stderr: stdout is for the answer alone.
int run_script(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  pid_t pid = -1;
  const int error = posix_spawnp(&pid, words[0], &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw Error(fmt::format("bisect: --script {}: cannot be run: {}.", command[0], std::strerror(error)));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) throw Error(fmt::format("bisect: --script {}: {}.", command[0], std::strerror(errno)));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::optional<ForkRange> Bisect::from_runs() {
  const Run a = Run::open(request_.good.run), b = Run::open(request_.bad.run);
  DiffOptions options;
  options.first_step = request_.first, options.last_step = request_.last;
  const Verdict verdict = diff(a, b, options);
  for (const Run* run : {&a, &b}) {
    size_t steps = 0;
    for (const auto& stream : run->streams()) steps = std::max(steps, stream->steps().size());
    const double seconds = seconds_of(run->manifest());
    // What --every left out was run all the same.
    if (steps > 0 && seconds > 0) jobs_.learn(static_cast<int64_t>(steps) * run->manifest().every, seconds);
  }
  end_stage("recorded runs", headline(verdict));
  result_.verdict = verdict;
  if (verdict.outcome != Outcome::diverged || !verdict.first) return std::nullopt;
  if (verdict.first->in_prologue) {
    note("the runs part before the first step: there is no step to run again");
    return std::nullopt;
  }
  seen_ = verdict;
  const int64_t step = verdict.first->step, unseen = request_.first.value_or(0) - 1;
  if (!verdict.gaps.empty()) {
    note("what was lost of the recorded runs may hide an earlier fork: all steps before it were searched");
    return ForkRange{unseen, step};
  }
  return ForkRange{step_before(a, b, step).value_or(unseen), step};
}

std::pair<int64_t, int64_t> Bisect::steps_of_request() {
  const std::vector<int64_t> saved = jobs_.checkpoint_steps(request_.good);
  int64_t first = 0;
  if (has_placeholder(request_.good.command) || has_placeholder(request_.bad.command)) {
    if (const auto start = saved.empty() ? std::nullopt : std::optional(saved.front())) first = *start;
  }
  first = request_.first.value_or(first);
  const int64_t last = request_.last ? *request_.last : saved.empty() ? -1 : saved.back() - 1;
  if (last < first) {
    throw UsageError(
        "bisect: --steps A:B is missing: up to which step is the fork to be looked for?",
        "The state after step B is to be another one in the bad arm; before step A nothing is looked for.");
  }
  return {first, last};
}

std::optional<ForkRange> Bisect::from_commands() {
  const auto [first, last] = steps_of_request();
  if (!jobs_.common_start(last)) return record_all(first, last);
  if (const auto start = jobs_.common_start(first); start && request_.good.checkpoints == request_.bad.checkpoints) {
    note(fmt::format(
        "both arms begin at the good arm's checkpoint of {}: what the bad one does before it is not looked at",
        counted(static_cast<uint64_t>(*start), "step")));
  }
  if (request_.good.checkpoints != request_.bad.checkpoints) {
    if (const auto range = by_contents(first, last)) return range;
  }
  begin_stage();
  const Verdict verdict = ask(last, first - 1);
  end_stage("last step", headline(verdict));
  if (verdict.outcome == Outcome::diverged) {
    seen_ = verdict;
    return ForkRange{first - 1, last};
  }
  if (verdict.outcome == Outcome::identical) return record_all(first, last);
  result_.verdict = verdict;
  return std::nullopt;
}

// Every step of both, from one state: needed for the word identical, and no dearer than halves where every window
// begins at the start.
std::optional<ForkRange> Bisect::record_all(int64_t first, int64_t last) {
  begin_stage();
  BisectWindow window;
  window.first = first, window.last = last;
  window.from = jobs_.common_start(first);
  // What was seen to fork, or called bad, is not identical because it was not so this once.
  const bool is_known = seen_ || script_step_ || other_contents_;
  Verdict verdict;
  int64_t tried = 0;
  do {
    window.name = fmt::format("all-{}", ++passes_);
    verdict = jobs_.compare(jobs_.run_both(fmt::format("every step of {}", range_text(first, last)), window), window);
  } while (++tried < request_.tries && is_known && verdict.outcome == Outcome::identical);
  end_stage("every step", headline(verdict));
  result_.verdict = verdict;
  if (verdict.outcome == Outcome::identical && is_known) not_again(range_text(first, last), tried);
  if (verdict.outcome != Outcome::diverged || !verdict.first) return std::nullopt;
  if (!seen_) seen_ = verdict;
  if (verdict.first->in_prologue) return ForkRange{first - 1, first};
  const int64_t step = verdict.first->step;
  // At its first step, what came before it was not looked at.
  return ForkRange{step == first ? window.from.value_or(0) - 1 : step - 1, step};
}

Outcome Bisect::compare_contents(int64_t step) {
  const std::string key = fmt::format("contents-{}", step);
  if (const Json* entry = log_.find(key)) {
    const std::string said = entry->get<std::string>();
    return said == name(Outcome::identical)  ? Outcome::identical
           : said == name(Outcome::diverged) ? Outcome::diverged
                                             : Outcome::incomparable;
  }
  const auto content = [&](const BisectArm& arm) {
    for (const Checkpoint& checkpoint : find_checkpoints(arm.checkpoints, request_.pattern)) {
      if (!checkpoint.whole || checkpoint.step != step) continue;
      CheckpointContent read = read_content(checkpoint.path);
      digest_content(&read);
      return read;
    }
    throw Error(fmt::format("{}: the checkpoint of {} steps was there, and is not any more.", arm.checkpoints, step));
  };
  const CheckpointComparison compared = compare_checkpoints(content(request_.good), content(request_.bad), true);
  log_.note(key, name(compared.outcome));
  return compared.outcome;
}

// Checkpoints of both trajectories say without running anything between which two of them the fork lies.
std::optional<ForkRange> Bisect::by_contents(int64_t first, int64_t last) {
  std::vector<int64_t> steps;
  const std::vector<int64_t> bad = jobs_.checkpoint_steps(request_.bad);
  for (const int64_t step : jobs_.checkpoint_steps(request_.good)) {
    if (step >= first && step <= last + 1 && std::binary_search(bad.begin(), bad.end(), step)) steps.push_back(step);
  }
  if (steps.empty()) return std::nullopt;
  print_note(fmt::format("checkpoints: which of the {} that both arms have are the same", steps.size()));
  begin_stage();
  // Where the arms begin, they must be the same to begin with.
  const auto start = jobs_.common_start(first);
  if (start && compare_contents(*start) == Outcome::diverged) {
    throw Error(fmt::format("the checkpoints of {} steps differ: the arms part before step {}.", *start, *start),
                "Give --steps an earlier first step, or compare the two with `forkpoint checkpoints`.");
  }
  if (compare_contents(steps.back()) != Outcome::diverged) return std::nullopt;  // windows will tell
  const StepSearch search =
      search_first_step(0, static_cast<int64_t>(steps.size()) - 1, 1, [&](int64_t index, int64_t) {
        const Outcome outcome = compare_contents(steps[static_cast<size_t>(index)]);
        return outcome == Outcome::identical  ? StepAnswer::same
               : outcome == Outcome::diverged ? StepAnswer::differs
                                              : StepAnswer::unknown;
      });
  other_contents_ = steps[static_cast<size_t>(search.differs)];
  ForkRange range{first - 1, *other_contents_ - 1};
  if (search.same >= 0) range.same = steps[static_cast<size_t>(search.same)] - 1;
  const std::string found =
      range.same < first ? fmt::format("the first that differs is of {} steps", range.differs + 1)
                         : fmt::format("the same at {} steps, other ones at {}", range.same + 1, range.differs + 1);
  end_stage("checkpoints", found);
  if (range.differs < first)
    throw Error(fmt::format("the arms part before step {}: {}.", first, found), "Give --steps an earlier first step.");
  return range;
}

Verdict Bisect::ask(int64_t step, int64_t same) {
  BisectWindow window;
  window.first = window.last = step;
  window.from = jobs_.common_start(std::min(step, same + 1));
  window.name = fmt::format("step-{}-from-{}", step, window.from ? std::to_string(*window.from) : "start");
  const Verdict verdict = jobs_.compare(jobs_.run_both("which step", window), window);
  if (verdict.outcome == Outcome::incomparable)
    note(fmt::format("of step {} it could not be told: {}", step, verdict.reason));
  return verdict;
}

std::optional<ForkRange> Bisect::narrowed(ForkRange range) {
  constexpr int64_t kEnough = 2;  // one window tells them apart, and is needed in any case
  if (range.differs - range.same <= kEnough) return range;
  if (!jobs_.common_start(range.differs)) return record_all(range.same + 1, range.differs);
  begin_stage();
  const StepSearch search = search_first_step(range.same + 1, range.differs, kEnough, [&](int64_t step, int64_t same) {
    const Verdict verdict = ask(step, same);
    if (verdict.outcome == Outcome::diverged && !seen_) seen_ = verdict;
    return verdict.outcome == Outcome::identical  ? StepAnswer::same
           : verdict.outcome == Outcome::diverged ? StepAnswer::differs
                                                  : StepAnswer::unknown;
  });
  end_stage("which step", range_text(search.same + 1, search.differs));
  return ForkRange{search.same, search.differs};
}

StepAnswer Bisect::ask_script(int64_t step) {
  const std::string name = fmt::format("script-{}", step);
  BisectWindow window;
  window.name = name;
  window.first = window.last = step;
  // What the script calls good need not be the good arm's state: only the bad arm's own checkpoints lie on its way.
  const bool own = request_.good.checkpoints != request_.bad.checkpoints;
  for (const int64_t saved : jobs_.checkpoint_steps(request_.bad)) {
    if (saved <= (own ? step : steps_of_request().first)) window.from = saved;
  }
  print_note(fmt::format("script: the bad arm {} records step {}: {}",
                         window.from ? fmt::format("from {} steps", *window.from) : "from the start", step,
                         jobs_.estimate(step - window.from.value_or(0) + 1)));
  CommandValues values;
  values.run = jobs_.run(window, request_.bad).run;
  values.step = step;
  int status = 0;
  if (const Json* entry = log_.find(name + "-status")) {
    status = entry->get<int>();
  } else {
    status = run_script(fill_in(request_.script, values));
    if (status < kNotRun) log_.note(name + "-status", status);
  }
  if (status >= kNotRun) {
    const bool not_run = status <= kNotFound;  // what a shell, or env, says of a program that it cannot run
    throw Error(fmt::format("bisect: the script ended with status {} on step {}{}: that ends the search.", status, step,
                            not_run ? ", as where a program cannot be run or is not found" : ""),
                fmt::format("To go on: forkpoint bisect --resume -o {}", request_.folder));
  }
  return status == 0 ? StepAnswer::same : status == kSkip ? StepAnswer::unknown : StepAnswer::differs;
}

std::optional<ForkRange> Bisect::from_script() {
  const auto [first, last] = steps_of_request();
  begin_stage();
  if (const StepAnswer answer = ask_script(last); answer != StepAnswer::differs) {
    const std::string said = answer == StepAnswer::same
                                 ? fmt::format("calls step {} good", last)
                                 : fmt::format("cannot tell step {} (exit status {})", last, kSkip);
    end_stage("script", said);
    result_.verdict.reason = fmt::format("the script {}, the last one that was to be looked at", said);
    return std::nullopt;
  }
  const StepSearch search = search_first_step(first, last, 1, [&](int64_t step, int64_t) { return ask_script(step); });
  const int64_t undecided = search.differs - search.same - 1;
  end_stage("script", undecided
                          ? fmt::format("the first bad one is among {}", range_text(search.same + 1, search.differs))
                          : fmt::format("step {} is the first bad one", search.differs));
  script_step_ = search.differs;
  return ForkRange{first - 1, search.differs};
}

}  // namespace forkpoint
