// forkpoint ps: the jobs that can be attached. forkpoint run: starts one.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/jobs.h"
#include "cli/probe_file.h"
#include "cli/target.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace {

constexpr int kOwnFailure = 125;

std::string command_text(const Job& job) { return fmt::format("{}", fmt::join(command_of(job.pid()), " ")); }

std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }

std::string doing(const Job& job) {
  const control::Message& status = job.status();
  if (job.state() == "dormant") return "sleeps";
  if (status.text("run").empty()) return job.state();
  return fmt::format("{} {} to {}", job.state(), or_dash(status.text("first")), or_dash(status.text("last")));
}

nlohmann::json as_json(const Job& job) {
  const auto number = [&](const char* name) {
    const auto value = job.status().number(name);
    return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
  };
  const auto text = [&](const char* name) {
    const std::string value = job.status().text(name);
    return value.empty() ? nlohmann::json(nullptr) : nlohmann::json(value);
  };
  return {{"pid", job.pid()}, {"rank", number("rank")}, {"world_size", number("world")}, {"step", number("step")}, {"job", text("job")},
          {"state", job.state()}, {"level", text("level")}, {"run", text("run")}, {"first_step", number("first")}, {"last_step", number("last")},
          {"command", command_of(job.pid())}};
}

void print_table(const std::vector<std::unique_ptr<Job>>& jobs) {
  std::vector<std::vector<std::string>> rows = {{"PID", "RANK", "STEP", "LEVEL", "STATE", "JOB", "COMMAND"}};
  for (const auto& job : jobs) {
    const std::string rank = job->status().text("rank");
    rows.push_back({std::to_string(job->pid()), rank.empty() ? "-" : rank + "/" + job->status().text("world"), or_dash(job->status().text("step")),
                    or_dash(job->status().text("level")), doing(*job), or_dash(job->status().text("job")), command_text(*job)});
    if (const std::string run = job->status().text("run"); !run.empty()) rows.back().back() += "  -> " + run;
  }
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) widths[i] = std::max(widths[i], printable(row[i]).size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i + 1 < row.size(); ++i) line += fmt::format("{:<{}}  ", printable(row[i]), widths[i]);
    print_answer(line + printable(row.back()) + "\n");
  }
}

int ps(const Arguments& arguments) {
  const FoundJobs found = find_jobs();
  for (const std::string& problem : found.problems) print_warning(problem);
  if (arguments.has("json")) {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& job : found.jobs) list.push_back(as_json(*job));
    print_answer(list.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  } else if (found.jobs.empty()) {
    print_note("no job on this machine can be attached; start one with `forkpoint run -- CMD`.");
  } else {
    print_table(found.jobs);
  }
  return 0;
}

int run(const Arguments& arguments) {
  EnvironmentChanges changes;
  changes[contract::kRun] = std::nullopt;
  if (const auto job = arguments.value("job")) changes[contract::kJob] = *job;
  changes["LD_PRELOAD"] = preload_with(find_probe(), std::getenv("LD_PRELOAD"));
  try {
    exit_like(run_target(arguments.command(), changes));
  } catch (const CannotRun& error) {
    print_error(error);
    return error.exit_status();
  }
}

}  // namespace

const Verb& ps_verb() {
  static const Verb verb{.name = "ps",
                         .summary = "list the running jobs that can be attached",
                         .usage = "ps [--json]",
                         .about = "One line a process of this machine that has the probe, trains and belongs to you (root sees everybody's): where it\n"
                                  "is and, while it is attached, what is recorded of it. The step of a PyTorch job shows while it is attached.",
                         .options = {kJsonOption},
                         .examples = {{"forkpoint ps", "what `forkpoint attach` can be given"},
                                      {"forkpoint ps --json | jq '.[].pid'", "for scripts"}},
                         .trouble_status = kOwnFailure,
                         .run = ps};
  return verb;
}

const Verb& run_verb() {
  static const Verb verb{.name = "run",
                         .summary = "run a command with the probe asleep, to be attached later",
                         .usage = "run [--job NAME] -- CMD [ARG...]",
                         .about = "Runs CMD with the probe loaded (LD_PRELOAD) and asleep: nothing is recorded before `forkpoint attach` asks for it.\n"
                                  "CMD keeps its stdin, stdout and stderr; its exit status is passed on.",
                         .options = {{"job", 0, "NAME", "a name for attach --job (FORKPOINT_JOB)"}},
                         .examples = {{"forkpoint run --job pretrain -- torchrun --nproc-per-node 8 train.py", "a job that can be looked into while it runs"},
                                      {"forkpoint run -- ./train", "the same, without a name"}},
                         .takes_command = true,
                         .trouble_status = kOwnFailure,
                         .run = run};
  return verb;
}

}  // namespace forkpoint
