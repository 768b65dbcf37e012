// forkpoint doctor: what of a job, a machine and an environment keeps runs from repeating, or forkpoint from seeing
// them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/doctor_job.h"
#include "cli/doctor_looks.h"
#include "cli/recording_options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/doctor.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

struct DoctorRequest {
  MachineRequest machine;
  DoctorRun job;
  bool json = false, no_run = false;
  bool has_job() const { return !job.recording.command.empty(); }
};

void require_command(const Arguments& arguments) {
  if (!arguments.command().empty()) return;
  for (const char* option : {"steps", "level", "no-run", "step-on", "timeout", "show-output"}) {
    if (arguments.has(option))
      throw UsageError(fmt::format("doctor: --{} is about a command, and there is none.", option),
                       "It stands after `--`.");
  }
}

DoctorRequest request_from(const Arguments& arguments) {
  require_command(arguments);
  DoctorRequest request;
  request.json = arguments.has("json");
  request.no_run = arguments.has("no-run");
  if (const auto text = arguments.value("look-timeout"))
    request.machine.limit = std::chrono::seconds(parse_count(*text, "--look-timeout", 1));
  DoctorRun& job = request.job;
  job.folder = arguments.value("output").value_or("");
  if (arguments.has("output") && job.folder.empty()) throw UsageError("doctor: --output is empty.");
  if (job.folder.empty()) job.folder = default_run_directory("doctor");
  request.machine.run_directory = job.folder;
  if (const auto text = arguments.value("steps")) {
    const StepRange range = parse_steps(*text);
    if (!range.last)
      throw UsageError(fmt::format("doctor: --steps {}: where do they end?", *text),
                       "A:B, both inclusive; the job is ended behind B.");
    job.first = range.first.value_or(0);
    job.last = *range.last;
  } else {
    // The first two, whatever number they have: both runs begin alike, and a job that does not say would not line up.
    job.recording.first_step = 0;
  }
  job.recording.command = arguments.command();
  job.recording.level = parse_level(arguments.value("level").value_or("step"), "doctor");
  job.recording.step_on = arguments.value("step-on");
  if (job.recording.step_on) check_step_on(*job.recording.step_on, "doctor");
  if (const auto text = arguments.value("timeout"))
    job.patience = std::chrono::seconds(parse_count(*text, "--timeout", 0));
  job.show_output = arguments.has("show-output");
  return request;
}

std::string painted(const Finding& finding, const Style& style) {
  const std::string word = fmt::format("{:<8}", name(finding.kind));
  switch (finding.kind) {
    case FindingKind::fix:
      return style.red(word);
    case FindingKind::unknown:
      return style.yellow(word);
    case FindingKind::note:
      return style.bold(word);
    case FindingKind::ok:
      return style.green(word);
  }
  return word;
}

std::string text_of(const Findings& findings, DoctorScope scope, const Style& style, size_t width) {
  constexpr size_t kIndent = 10;
  std::string text = style.bold(doctor_headline(findings, scope)) + "\n\n";
  for (const Finding& finding : findings) {
    const std::string indent(kIndent, ' ');
    text += fmt::format("  {}{}\n", painted(finding, style),
                        wrapped(printable(finding.id + ": " + finding.found), kIndent, width));
    if (finding.kind == FindingKind::ok) continue;
    if (!finding.why.empty()) text += indent + wrapped(printable(finding.why), kIndent, width) + "\n";
    if (!finding.fix.empty()) text += indent + "do: " + printable(finding.fix) + "\n";  // to be copied: never broken
  }
  return text;
}

Findings job_findings(const DoctorRequest& request, const JobPrograms& programs, const MachineLooks& looks,
                      DoctorScope* scope, std::vector<std::string>* runs) {
  DoctorOutcome outcome;
  const Findings before = judge_programs(programs, looks, false);
  const bool cannot_run = std::any_of(before.begin(), before.end(), [](const Finding& finding) {
    return finding.id == "program-missing" || finding.id == "program-not-executable";
  });
  if (request.no_run || cannot_run) {
    if (cannot_run) return before;
    Findings findings = before;
    findings.push_back({"repeats", FindingKind::note, FindingAbout::repeating, "the job was not run (--no-run)",
                        "whether it repeats itself, and what of it is recorded, was not looked at", ""});
    return findings;
  }
  try {
    outcome = run_job_twice(request.job);
    *scope = DoctorScope::job_run;
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    outcome.findings = {{"job", FindingKind::unknown, FindingAbout::repeating, error.what(),
                         "whether it repeats itself was not looked at", error.hint()}};
  }
  *runs = outcome.runs;
  Findings findings = outcome.findings;
  for (Finding& finding : judge_programs(programs, looks, outcome.recorded)) findings.push_back(std::move(finding));
  return findings;
}

int doctor(const Arguments& arguments) {
  DoctorRequest request = request_from(arguments);
  DoctorScope scope = request.has_job() ? DoctorScope::job_not_run : DoctorScope::machine;
  JobPrograms programs;
  if (request.has_job()) programs = look_at_programs(request.job.recording.command);
  request.machine.python = programs.python;
  request.machine.environment = programs.line.look.environment;
  MachineLooks looks;
  Findings findings = look_at_machine(request.machine, &looks);
  std::vector<std::string> runs;
  if (request.has_job()) {
    Findings more = job_findings(request, programs, looks, &scope, &runs);
    findings.insert(findings.begin(), more.begin(), more.end());
  }
  sort_findings(&findings);
  if (request.json)
    print_answer(to_json(findings, scope, runs).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                 "\n");
  else
    print_answer(text_of(findings, scope, Style(stdout), terminal_width(stdout)));
  flush_answer();
  return doctor_exit_status(findings);
}

}  // namespace

const Verb& doctor_verb() {
  static const Verb verb{
      .name = "doctor",
      .summary = "what keeps a job from repeating itself, or forkpoint from seeing it, and the fix",
      .usage = "doctor [options] [-- CMD [ARG...]]",
      .about =
          "Looks at this machine and its environment, and says of each thing what was found, why it matters and what\n"
          "to do. With CMD it also looks at the programs that CMD starts, and runs it twice for a few steps, "
          "recorded:\n"
          "do both runs agree, what was lost, what is not seen; where they differ, twice more in deterministic mode.\n"
          "Kinds of findings: fix; unknown (it could not be looked at, or nothing follows: never counted as ok); "
          "note;\n"
          "ok. Each has an id that does not change. What may crash or hang is looked at in processes of its own. The\n"
          "runs stay in RUNS; what CMD itself writes, it writes each time. --json prints {\"verdict\": "
          "\"ok|fix|unknown\",\n"
          "\"summary\", \"job_was_run\", \"findings\": [{\"id\", \"kind\", \"about\": \"repeating|recording\", "
          "\"found\", \"why\",\n"
          "\"fix\"}], \"runs\"}. Exit status: 0 nothing to fix, 1 something to fix, 2 something could not be looked "
          "at.",
      .options = {{"steps", 0, "A:B", "the steps of CMD that are run and compared (default: its first two)"},
                  {"level", 0, "step|layer|launch", "how fine they are recorded (default: step)"},
                  {"no-run", 0, "", "look at CMD's programs, and do not run it"},
                  {"output", 'o', "RUNS", "folder to make for the runs (default: runs/doctor-YYYYmmdd-HHMMSS)"},
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"timeout", 0, "SECONDS", "how long no step may begin before the job is ended (1800; 0: for ever)"},
                  {"look-timeout", 0, "SECONDS", "how long a look at a driver or a library may take (30)"},
                  {"show-output", 0, "", "the job's output to stderr instead of job.log of each run"},
                  kJsonOption},
      .examples = {{"forkpoint doctor", "this machine and its environment"},
                   {"forkpoint doctor -- torchrun --nproc-per-node 8 train.py",
                    "a job: does it repeat itself, is all of it seen?"},
                   {"forkpoint doctor --json -- ./train | jq -r '.findings[] | select(.kind == \"fix\") | .fix'",
                    "the fixes alone"}},
      .takes_command = true,
      .command_optional = true,
      .run = doctor};
  return verb;
}

}  // namespace forkpoint
