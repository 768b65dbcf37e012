// What is said of a job when it is over.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <csignal>
#include <cstdlib>
#include <deque>
#include <fstream>

#include "cli/job.h"
#include "cli/knob_options.h"
#include "cli/terminal.h"

namespace forkpoint {
namespace {

constexpr size_t kLastLines = 12;

void show_last_lines(const JobRequest& request) {
  const std::string path = request.recording.run_directory + "/job.log";
  std::ifstream log(path);
  std::deque<std::string> lines;
  for (std::string line; std::getline(log, line);) {
    lines.push_back(line);
    if (lines.size() > kLastLines) lines.pop_front();
  }
  if (lines.empty()) return;
  print_note(fmt::format("the last lines of {}:", path));
  for (const std::string& line : lines) fmt::print(stderr, "    {}\n", printable(line));
}

}  // namespace

std::string cost_of(int64_t steps, double seconds) {
  return fmt::format("{} {} in {:.1f} s", steps, steps == 1 ? "step" : "steps", seconds);
}

void report_job(const JobRequest& request, const JobResult& result) {
  for (const std::string& problem : result.recorded.problems) print_warning(problem);
  say_not_deterministic(result.recorded);
  if (!result.recorded.died_ranks.empty() && result.end != JobEnd::short_of) {
    print_warning(fmt::format("ranks {} did not end their streams; what was written until then can be read.",
                              fmt::join(result.recorded.died_ranks, ", ")));
  }
  if (!result.recorded.missing_ranks.empty()) {
    print_warning(fmt::format("ranks {} left no stream here.", fmt::join(result.recorded.missing_ranks, ", ")));
  }
  if (result.end == JobEnd::short_of && !request.show_output) show_last_lines(request);
}

void exit_interrupted(const JobResult& result) {
  std::fflush(nullptr);
  std::signal(result.interrupted_by, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, result.interrupted_by);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  raise(result.interrupted_by);
  std::exit(128 + result.interrupted_by);
}

}  // namespace forkpoint
