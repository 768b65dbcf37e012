#include "cli/doctor_job.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "cli/terminal.h"
#include "lib/cause_facts.h"
#include "lib/diff.h"
#include "lib/knobs.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

constexpr int kMostInterpreters = 4;  // scripts run by scripts; the kernel follows as many

void append(Findings* findings, Findings more) {
  for (Finding& finding : more) findings->push_back(std::move(finding));
}

// What makes the loader drop LD_PRELOAD ("secure execution").
std::string changed_user(const std::string& path) {
  struct stat status {};
  struct statvfs system {};
  if (stat(path.c_str(), &status) != 0) return {};
  if (statvfs(path.c_str(), &system) == 0 && (system.f_flag & ST_NOSUID) != 0) return {};
  if ((status.st_mode & S_ISUID) != 0 && status.st_uid != getuid()) return "is set-uid";
  if ((status.st_mode & S_ISGID) != 0 && (status.st_mode & S_IXGRP) != 0 && status.st_gid != getgid())
    return "is set-gid";
  if (getuid() != 0 && getxattr(path.c_str(), "security.capability", nullptr, 0) > 0)
    return "has capabilities of its own";
  return {};
}

void look_at_elf(ProgramLook* look) {
  look->elf = read_elf(look->path);
  if (look->elf->bits != 64) return;
  look->nccl = find_symbol(look->path, "ncclAllReduce");
  look->reports = holds_texts(look->path, {"forkpoint_get_api"});
  // Names that libnccl asks the environment for.
  if (look->nccl == SymbolPlace::absent && !look->elf->has_symbols)
    look->has_nccl_texts = holds_texts(look->path, {"NCCL_COMM_ID", "NCCL_LL_BUFFSIZE"});
}

ProgramLook look_at_program(const std::string& word, const std::string& path) {
  ProgramLook look;
  look.word = word;
  look.path = find_program(word, path, &look.executable);
  if (look.path.empty() || !look.executable) return look;
  look.changes_user = changed_user(look.path);
  try {
    if (is_elf(look.path)) look_at_elf(&look);
  } catch (const Error& error) {
    look.trouble = error.what();
    if (look.trouble.ends_with('.')) look.trouble.pop_back();
  }
  return look;
}

bool is_python(const std::string& word) {
  const std::string name = fs::path(word).filename().string();
  return name.starts_with("python") || name.starts_with("pypy");
}

bool is_shell(const std::string& word) {
  const std::string name = fs::path(word).filename().string();
  return name == "sh" || name == "bash" || name == "dash" || name == "zsh" || name == "ksh";
}

// The programs behind a script's first line: an interpreter, or env and an interpreter.
void follow_script(const ProgramLook& script, const std::string& path, JobPrograms* job) {
  std::string at = script.path;
  for (int depth = 0; depth < kMostInterpreters; ++depth) {
    const auto words = interpreter_words(at);
    if (words.empty()) {
      if (depth == 0) job->line.look.not_followed = fmt::format("{}, which names no interpreter", at);
      return;
    }
    const JobLine line = read_job_line(words);
    if (line.look.programs.empty()) return;
    for (const std::string& word : line.look.programs) job->programs.push_back(look_at_program(word, path));
    if (job->line.look.drops_preload.empty()) {
      job->line.look.drops_preload = line.look.drops_preload;
      job->line.look.how = line.look.how;
    }
    job->line.look.ignores_python_variables |= line.look.ignores_python_variables;
    if (is_shell(line.look.programs.back())) job->line.look.not_followed = fmt::format("{}, a script of the shell", at);
    const ProgramLook& last = job->programs.back();
    if (last.path.empty() || last.elf || !last.trouble.empty()) return;
    at = last.path;
  }
}

}  // namespace

JobPrograms look_at_programs(const std::vector<std::string>& command) {
  JobPrograms job;
  job.line = read_job_line(command);
  const char* own = std::getenv("PATH");
  std::string path = own ? own : "";
  if (const auto set = job.line.look.environment.find("PATH"); set != job.line.look.environment.end())
    path = set->second.value_or("");
  const std::vector<std::string> words = job.line.look.programs;
  for (size_t i = 0; i < words.size(); ++i) {
    ProgramLook look = look_at_program(words[i], path);
    if (look.path.empty() && i >= job.line.certain) {
      job.line.look.not_followed = fmt::format("`{}`: what it starts", words[job.line.certain - 1]);
      break;
    }
    job.programs.push_back(look);
    if (look.path.empty() || !look.executable || look.elf || !look.trouble.empty()) {
      if (is_shell(look.word) && i + 1 == words.size() && command.size() > i + 1 &&
          job.line.look.not_followed.empty()) {
        job.line.look.not_followed = "a script of the shell";
      }
      continue;
    }
    try {
      follow_script(look, path, &job);
    } catch (const Error& error) {
      job.programs.back().trouble = error.what();
    }
  }
  for (const ProgramLook& look : job.programs) {
    if (is_python(look.word) && look.executable && !look.path.empty()) job.python = look.path;
  }
  return job;
}

Findings judge_programs(const JobPrograms& job, const MachineLooks& machine, bool was_recorded) {
  Findings findings = judge_job_line(job.line.look);
  for (const ProgramLook& look : job.programs) append(&findings, judge_program(look));
  if (!job.line.look.not_followed.empty()) {
    const bool seen = was_recorded;
    findings.push_back({"program-not-followed", seen ? FindingKind::note : FindingKind::unknown,
                        FindingAbout::recording,
                        fmt::format("{}: the programs that it starts were not looked at{}", job.line.look.not_followed,
                                    seen ? "; one at least took the probe" : ""),
                        "whether the probe can be loaded into them all is not known", ""});
  }
  const auto torch = machine.python.value("torch_folder");
  const std::string library = torch ? *torch + "/lib/libtorch_cuda.so" : "";
  std::error_code ignored;
  if (!library.empty() && !job.python.empty() && fs::exists(library, ignored)) {
    try {
      append(&findings, judge_torch_links(library, find_symbol(library, "ncclAllReduce")));
    } catch (const Error& error) {
      findings.push_back({"torch-nccl", FindingKind::unknown, FindingAbout::recording, error.what(),
                          "where PyTorch has NCCL from is not known", ""});
    }
  }
  return findings;
}

namespace {

std::string trouble_of(const JobResult& result, const DoctorRun& request) {
  if (result.end == JobEnd::short_of) return result.trouble;
  if (result.end == JobEnd::by_itself && result.target.exit_status != 0) return result.target.sentence();
  if (result.recorded.ranks == 0) return "no rank left a record";
  const auto wanted = static_cast<size_t>(request.last - request.first + 1);
  if (result.recorded.steps < wanted) return fmt::format("{} of {} steps were recorded", result.recorded.steps, wanted);
  return {};
}

class Doctor {
 public:
  explicit Doctor(const DoctorRun& request) : request_(request) {}

  DoctorOutcome look() {
    const PairLook pair = run_pair("", std::nullopt);
    JobSeen seen;
    if (outcome_.recorded) seen = look_at_run(Run::open(pair.run_a));
    std::optional<PairLook> deterministic;
    if (pair.verdict && pair.verdict->outcome == Outcome::diverged) {
      deterministic = run_pair("deterministic-", default_knobs());
      const bool same = deterministic->verdict && deterministic->verdict->outcome == Outcome::identical;
      if (same && trouble_of(run(request_.folder + "/third", std::nullopt), request_).empty()) {
        deterministic->without = diff(Run::open(pair.run_b), Run::open(request_.folder + "/third"), DiffOptions());
      }
    }
    append(&outcome_.findings,
           judge_pair(pair, seen, deterministic,
                      fmt::format("forkpoint record --deterministic -- {}", shell_words(request_.recording.command))));
    if (failed_unrecorded_) {
      outcome_.findings.push_back({"job", FindingKind::unknown, FindingAbout::repeating, pair.trouble,
                                   "a command that fails by itself cannot be looked at",
                                   fmt::format("tail {}/job.log", pair.run_a)});
      return std::move(outcome_);
    }
    if (!outcome_.recorded) {
      outcome_.findings.push_back({"no-records", FindingKind::fix, FindingAbout::recording,
                                   fmt::format("the command left no records: {}", pair.trouble),
                                   "it does not call forkpoint.h and trains with no optimizer of torch.optim, or the "
                                   "probe was not loaded into it",
                                   "forkpoint doctor --level launch --step-on REGEX -- CMD"});
      return std::move(outcome_);
    }
    append(&outcome_.findings,
           judge_seen(seen, pair.trouble.empty() && pair.verdict && pair.verdict->outcome == Outcome::identical));
    return std::move(outcome_);
  }

 private:
  JobResult run(const std::string& folder, const std::optional<Knobs>& knobs) {
    JobRequest job;
    job.recording = request_.recording;
    job.recording.run_directory = folder;
    job.recording.steps = StepRange{request_.first, request_.last};
    job.stop_after = request_.last;
    job.recording.knobs = knobs;
    job.patience = request_.patience;
    job.show_output = request_.show_output;
    print_note(fmt::format("steps {} to {}, recorded to {}", request_.first, request_.last, folder));
    JobResult result = run_job(job);
    report_job(job, result);
    if (result.end == JobEnd::interrupted) {
      print_note(fmt::format("interrupted; {} holds what was recorded until then", folder));
      exit_interrupted(result);
    }
    if (result.recorded.ranks > 0) outcome_.runs.push_back(folder), outcome_.recorded = true;
    failed_unrecorded_ = !outcome_.recorded && result.target.stopped.empty() && result.target.exit_status != 0;
    return result;
  }

  PairLook run_pair(const std::string& prefix, const std::optional<Knobs>& knobs) {
    PairLook pair;
    pair.steps = request_.first == request_.last ? fmt::format("step {}", request_.first)
                                                 : fmt::format("steps {} to {}", request_.first, request_.last);
    pair.run_a = request_.folder + "/" + prefix + "first", pair.run_b = request_.folder + "/" + prefix + "second";
    const JobResult first = run(pair.run_a, knobs);
    pair.trouble = trouble_of(first, request_);
    // A job that cannot be recorded once cannot be compared; one that fails in a step may still show why.
    if (first.recorded.ranks == 0) return pair;
    const JobResult second = run(pair.run_b, knobs);
    if (pair.trouble.empty()) pair.trouble = trouble_of(second, request_);
    if (second.recorded.ranks == 0) return pair;
    DiffOptions options;
    pair.verdict = diff(Run::open(pair.run_a), Run::open(pair.run_b), options);
    return pair;
  }

  const DoctorRun& request_;
  DoctorOutcome outcome_;
  bool failed_unrecorded_ = false;
};

}  // namespace

DoctorOutcome run_job_twice(const DoctorRun& request) { return Doctor(request).look(); }

}  // namespace forkpoint
