// forkpoint check: a few steps of a command against a reference that lies in its repository.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "cli/check_report.h"
#include "cli/job.h"
#include "cli/knob_options.h"
#include "cli/recording_options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/reference.h"
#include "lib/run_steps.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kDefaultSteps = 10;

struct CheckRequest {
  std::string reference, junit, summary;
  std::optional<int64_t> steps;
  std::optional<int64_t> first_step;
  bool update = false;
  JobRequest job;
};

// Said before an hour is spent, not after it.
void require_folder(const std::string& option, const std::string& path) {
  if (path.empty()) return;
  const fs::path folder = fs::path(path).parent_path();
  std::error_code ignored;
  if (!folder.empty() && !fs::is_directory(folder, ignored)) {
    throw Error(fmt::format("check: {} {}: there is no folder {}.", option, path, folder.string()), "Make it first.");
  }
  if (fs::is_directory(path, ignored))
    throw Error(fmt::format("check: {} {}: a folder; expected a file.", option, path));
}

CheckRequest request_from(const Arguments& arguments) {
  CheckRequest request;
  request.reference = arguments.value("reference").value_or("");
  if (request.reference.empty())
    throw UsageError("check: --reference is missing.", "Name the file, as in --reference ci/gpt.json.");
  if (const auto steps = arguments.value("steps")) request.steps = parse_count(*steps, "--steps", 1);
  if (const auto first = arguments.value("first-step")) request.first_step = parse_count(*first, "--first-step", 0);
  request.update = arguments.has("update");
  request.junit = arguments.value("junit").value_or("");
  request.summary = arguments.value("summary").value_or("");
  RecordingRequest& recording = request.job.recording;
  recording.level = Level::step;
  recording.command = arguments.command();
  recording.run_directory = arguments.value("output").value_or("");
  if (recording.run_directory.empty()) recording.run_directory = default_run_directory("check");
  recording.step_on = arguments.value("step-on");
  if (recording.step_on) check_step_on(*recording.step_on, "check");
  recording.knobs = read_knobs(arguments, "check");
  if (const auto text = arguments.value("timeout"))
    request.job.patience = std::chrono::seconds(parse_count(*text, "--timeout", 0));
  request.job.show_output = arguments.has("show-output");
  return request;
}

std::optional<Reference> read_known(const CheckRequest& request) {
  std::error_code ignored;
  if (!fs::exists(request.reference, ignored)) {
    if (request.update) return std::nullopt;
    throw Error(fmt::format("{}: there is no such reference.", request.reference),
                "Make it from a commit that is known to be good, with --update.");
  }
  try {
    return read_reference(request.reference);
  } catch (const Error& error) {
    if (!request.update) throw;
    print_warning(fmt::format("{} It is replaced.", error.what()));
    return std::nullopt;
  }
}

// Also what cannot be compared whatever the command does: it is not run then.
void choose_steps(const std::optional<Reference>& reference, CheckRequest* request) {
  int64_t first = request->first_step.value_or(reference ? reference->first_step : 0);
  int64_t last =
      first + request->steps.value_or(reference ? reference->last_step - reference->first_step + 1 : kDefaultSteps) - 1;
  if (reference && !request->update) {
    if (first != reference->first_step || last != reference->last_step) {
      throw Error(fmt::format("{}: it holds steps {} to {}; --steps and --first-step ask for {} to {}.",
                              request->reference, reference->first_step, reference->last_step, first, last),
                  "Leave them out, or make the reference anew with --update.");
    }
    const auto digest = reference->depends_on.find("digest");
    if (digest == reference->depends_on.end() || digest->second != digest_version()) {
      throw Error(fmt::format("{}: incomparable: made by a forkpoint whose digests are defined in another way.",
                              request->reference),
                  "Make it anew with --update, from a commit that is known to be good.");
    }
  }
  request->job.recording.steps = StepRange{first, last};
  request->job.stop_after = last;
  request->job.begins_with = first;
}

JobResult run(const CheckRequest& request) {
  print_note(fmt::format("steps {} to {}, recorded to {}", *request.job.recording.steps->first, request.job.stop_after,
                         request.job.recording.run_directory));
  JobResult result = run_job(request.job);
  report_job(request.job, result);
  if (result.end == JobEnd::interrupted) {
    print_note(fmt::format("interrupted; {} holds what was recorded until then", request.job.recording.run_directory));
    exit_interrupted(result);
  }
  const bool other_start = result.first_step >= 0 && result.first_step != *request.job.begins_with;
  if (result.recorded.ranks == 0 || other_start) {
    throw Error(fmt::format("{}.", result.trouble.empty() ? "the command recorded nothing" : result.trouble),
                other_start ? "Tell the step that it begins with by --first-step." : "See `forkpoint record -h`.");
  }
  print_note(fmt::format("{}: {}", request.job.recording.run_directory, cost_of(result.steps_run, result.seconds)));
  return result;
}

std::string trouble_of(const JobResult& result) {
  if (result.end == JobEnd::short_of) return result.trouble;
  if (result.end == JobEnd::by_itself && result.target.exit_status != 0) return result.target.sentence();
  return {};
}

// Of a run that lost anything no reference is made: it would bless what nobody has seen.
CheckReport update(const CheckRequest& request, const std::optional<Reference>& before, const MeasuredRun& measured,
                   const std::string& trouble) {
  if (!trouble.empty() || !measured.lost.empty()) {
    throw Error(
        fmt::format("{}: not updated: {}.", request.reference, trouble.empty() ? measured.lost.front() : trouble),
        fmt::format("It is as it was. See {}.", request.job.recording.run_directory));
  }
  CheckReport report;
  report.updated = true;
  const std::string text = reference_text(measured.reference);
  parse_reference(request.reference, text);  // what could not be read back is not written
  if (before) report.changes = changes_of_reference(*before, measured.reference);
  if (before && reference_text(*before) == text) {
    report.sentence = fmt::format("{}: as it was: nothing has changed", request.reference);
    return report;
  }
  write_reference(request.reference, measured.reference);
  if (before && report.changes.empty()) report.changes.push_back("the command alone");
  report.sentence = fmt::format(
      "{}: {}: {} records in {} steps on {} ranks", request.reference, before ? "updated" : "made", measured.records,
      request.job.stop_after - *request.job.begins_with + 1, measured.reference.depends_on.at("world_size"));
  if (!before) report.changes.push_back("check once more without --update to see that the command repeats itself");
  return report;
}

void write_all(const std::string& path, const std::string& text, int mode) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | mode, 0666);
  size_t done = 0;
  while (file >= 0 && done < text.size()) {
    const ssize_t count = write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  const int error = errno;
  if (file >= 0) close(file);
  if (file < 0 || done < text.size())
    throw Error(fmt::format("{}: cannot be written: {}.", path, std::strerror(error)));
}

void write_reports(const CheckRequest& request, CheckReport* report) {
  report->reference = request.reference;
  report->run = request.job.recording.run_directory;
  if (!request.junit.empty()) write_all(request.junit, check_junit(*report), O_TRUNC);
  if (!request.summary.empty()) write_all(request.summary, check_markdown(*report), O_APPEND);
}

CheckReport checked(CheckRequest* request) {
  const std::optional<Reference> reference = read_known(*request);
  choose_steps(reference, request);
  const JobResult result = run(*request);
  const std::string trouble = trouble_of(result);
  const MeasuredRun measured =
      measure_run(Run::open(request->job.recording.run_directory), *request->job.begins_with, request->job.stop_after);
  CheckReport report;
  if (request->update)
    report = update(*request, reference, measured, trouble);
  else
    report.comparison = compare_reference(*reference, measured, trouble);
  report.seconds = result.seconds;
  return report;
}

int check(const Arguments& arguments) {
  CheckRequest request = request_from(arguments);
  require_folder("--reference", request.reference);
  require_folder("--junit", request.junit);
  require_folder("--summary", request.summary);
  CheckReport report;
  try {
    report = checked(&request);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    report.sentence = error.what();  // CI shows its files, not our stderr
    if (!error.hint().empty()) report.changes.push_back(error.hint());
    write_reports(request, &report);
    throw;
  }
  write_reports(request, &report);
  print_answer(check_text(report, Style(stdout)));
  flush_answer();
  return report.comparison ? exit_code(report.comparison->verdict.outcome) : 0;
}

}  // namespace

const Verb& check_verb() {
  static const Verb verb{
      .name = "check",
      .summary = "a few steps against a reference in the repository: a gate for CI",
      .usage = "check --reference REF [--steps N] [--update] [options] -- CMD [ARG...]",
      .about =
          "Runs CMD, recorded at level step, ends it behind N steps, and compares with REF: a JSON file of digests (of "
          "all\n"
          "records of each step; of each parameter and optimizer state after the last). REF names what the digests "
          "depend on\n"
          "(GPU, versions, world size, variables): where they differ and something of that does too, the answer is\n"
          "incomparable, not diverged; equal digests are identical on any machine. --update makes REF anew and says "
          "what\n"
          "changed; it is refused for a run that ended early or lost anything. --deterministic switches on what makes\n"
          "CMD repeat itself; without it nothing is. CMD writes to RUN/job.log. Exit status: 0 identical (or updated),\n"
          "1 diverged, 2 trouble or incomparable.",
      .options = {{"reference", 0, "REF", "the file to compare with"},
                  {"steps", 0, "N", "how many steps (default: as REF; 10 for a new one)"},
                  {"first-step", 0, "N", "the step that CMD begins with (default: as REF; 0 for a new one)"},
                  {"update", 0, "", "make REF from this run, and say what changed"},
                  {"junit", 0, "FILE", "write a JUnit file: one testcase a group of records"},
                  {"summary", 0, "FILE", "append a short Markdown summary to this file"},
                  {"output", 'o', "RUN", "folder to make (default: runs/check-YYYYmmdd-HHMMSS)"},
                  kDeterministicOption,
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"timeout", 0, "SECONDS", "how long no step may begin before the job is ended (1800; 0: for ever)"},
                  {"show-output", 0, "", "the job's output to stderr instead of RUN/job.log"}},
      .examples = {{"forkpoint check --reference ci/gpt.json --steps 20 --update -- ./minigpt --ranks 4",
                    "make the reference, on a commit that is known to be good"},
                   {"forkpoint check --reference ci/gpt.json --junit check.xml -- ./minigpt --ranks 4", "in CI"}},
      .takes_command = true,
      .run = check};
  return verb;
}

}  // namespace forkpoint
