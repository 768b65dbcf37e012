// forkpoint resume: the same training straight on, and with a stop and a resume in between. Is it the same training?
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/job_command.h"
#include "cli/knob_options.h"
#include "cli/recording_options.h"
#include "cli/replay.h"
#include "cli/report.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/cause_facts.h"
#include "lib/diff.h"
#include "lib/lost_state.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

constexpr int kTrouble = 2;

struct ResumeRequest {
  std::string folder;                    // made: straight, stopped and resumed are runs in it
  int64_t checkpoint_at = 0, steps = 0;  // K, N
  std::vector<std::string> command, save_words, resume_words;
  std::string preset, pattern;
  RecordingRequest recording;  // level and the like; no folder, no command
  std::chrono::seconds patience{1800};
  bool show_output = false;

  std::string run(const char* name) const { return folder + "/" + name; }
};

int64_t required_count(const Arguments& arguments, const char* option, int64_t least) {
  const auto text = arguments.value(option);
  if (!text) throw UsageError(fmt::format("resume: --{} is missing.", option), "See `forkpoint resume -h`.");
  return parse_count(*text, fmt::format("--{}", option), least);
}

ResumeRequest request_from(const Arguments& arguments) {
  ResumeRequest request;
  request.checkpoint_at = required_count(arguments, "checkpoint-at", 1);
  request.steps = required_count(arguments, "steps", 2);
  if (request.steps <= request.checkpoint_at) {
    throw UsageError(fmt::format("resume: --steps {} leaves nothing behind the checkpoint at {}.", request.steps,
                                 request.checkpoint_at),
                     "N counts all steps of the training, those before the checkpoint too.");
  }
  request.command = arguments.command();
  request.save_words = split_words(arguments.value("save-args").value_or(""), "--save-args");
  request.resume_words = split_words(arguments.value("resume-args").value_or(""), "--resume-args");
  request.pattern = arguments.value("checkpoint-pattern").value_or("");
  request.preset = arguments.value("preset").value_or(preset_of_program(request.command));
  const auto& known = presets();
  if (!request.preset.empty() && std::find(known.begin(), known.end(), request.preset) == known.end()) {
    throw UsageError(fmt::format("resume: --preset `{}` is not known.", request.preset),
                     fmt::format("There are {}.", fmt::join(known, ", ")));
  }
  request.recording.level = parse_level(arguments.value("level").value_or("step"), "resume");
  request.recording.step_on = arguments.value("step-on");
  if (request.recording.step_on) check_step_on(*request.recording.step_on, "resume");
  request.recording.knobs = read_knobs(arguments, "resume");
  if (const auto text = arguments.value("timeout"))
    request.patience = std::chrono::seconds(parse_count(*text, "--timeout", 0));
  request.show_output = arguments.has("show-output");
  request.folder = arguments.value("output").value_or("");
  if (request.folder.empty()) request.folder = default_run_directory("resume");
  return request;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error(fmt::format("{}: cannot be made: {}.", folder, error.message()));
  if (!fs::is_empty(folder))
    throw Error(fmt::format("{}: expected a new or empty folder.", folder), "Name another one with -o.");
}

bool is_saved(const std::string& directory, const ResumeRequest& request) {
  try {
    const auto found = find_checkpoints(directory, request.pattern);
    return std::any_of(found.begin(), found.end(), [&](const Checkpoint& checkpoint) {
      return checkpoint.whole && checkpoint.step == request.checkpoint_at;
    });
  } catch (const Error&) {
    return false;  // a folder that is only just being made
  }
}

// Step K is over on all ranks: until its checkpoint is whole. The job is held a while and then goes on, as a save in
// the background may be ended by a later step.
class SaveWait {
 public:
  SaveWait(const std::string& directory, const ResumeRequest& request) : directory_(directory), request_(request) {}
  bool is_over() {
    if (is_saved(directory_, request_)) return true;
    const auto now = std::chrono::steady_clock::now();
    if (!begun_) begun_ = now;
    if (!said_ && now - *begun_ > std::chrono::seconds(3)) {
      said_ = true;
      print_note(fmt::format("{} steps are done; waiting for a whole checkpoint of them in {}", request_.checkpoint_at,
                             directory_));
    }
    return false;
  }

 private:
  const std::string& directory_;
  const ResumeRequest& request_;
  std::optional<std::chrono::steady_clock::time_point> begun_;
  bool said_ = false;
};

[[noreturn]] void leave_interrupted(const ResumeRequest& request, const JobResult& result) {
  print_note(fmt::format("interrupted; {} holds what was recorded until then", request.folder));
  exit_interrupted(result);
}

// One of the two arms that begin at step 0 and save a checkpoint on the way. Throws Error when it does not get to its
// end.
JobResult run_from_start(const ResumeRequest& request, const char* name, const std::string& checkpoints, int64_t steps,
                         bool stops) {
  fs::create_directory(checkpoints);
  std::vector<std::string> command = request.command;
  command.insert(command.end(), request.save_words.begin(), request.save_words.end());
  CommandValues values;
  values.checkpoint_dir = fs::absolute(checkpoints).lexically_normal().string();
  values.step = request.checkpoint_at;
  values.run = fs::absolute(request.run(name)).lexically_normal().string();
  JobRequest job;
  job.recording = request.recording;
  job.recording.run_directory = request.run(name);
  job.recording.command = saving(command, request.preset, values);
  job.recording.steps = StepRange{0, steps - 1};
  job.stop_after = steps - 1;
  job.begins_with = 0;
  job.patience = request.patience;
  job.show_output = request.show_output;
  if (stops) job.may_stop = [wait = SaveWait(checkpoints, request)]() mutable { return wait.is_over(); };
  print_note(fmt::format("{}: {} steps: {}", name, steps, shell_words(job.recording.command)));
  const JobResult result = run_job(job);
  report_job(job, result);
  if (result.end == JobEnd::interrupted) leave_interrupted(request, result);
  if (result.end == JobEnd::short_of)
    throw Error(fmt::format("the arm `{}` did not do its {} steps: {}.", name, steps, result.trouble));
  return result;
}

Replay run_resumed(const ResumeRequest& request, const std::string& checkpoints) {
  if (!is_saved(checkpoints, request)) {
    throw Error(
        fmt::format("{}: the command left no whole checkpoint of {} steps.", checkpoints, request.checkpoint_at),
        "Does it save behind that step? See --save-args; for a layout of one's own, --checkpoint-pattern.");
  }
  ReplayRequest replay;
  replay.checkpoint_directory = checkpoints;
  replay.checkpoint_pattern = request.pattern;
  replay.keep_users_checkpoints = false;  // as for the arms that it is compared with
  replay.preset = request.preset;
  replay.preset_besides_placeholders = request.resume_words.empty();
  replay.first_step = request.checkpoint_at;
  replay.last_step = request.steps - 1;
  replay.recording = request.recording;
  replay.recording.run_directory = request.run("resumed");
  replay.recording.command = request.command;
  replay.recording.command.insert(replay.recording.command.end(), request.resume_words.begin(),
                                  request.resume_words.end());
  replay.patience = request.patience;
  replay.show_output = request.show_output;
  Replay resumed = replay_window(replay);
  if (resumed.job.end == JobEnd::interrupted) leave_interrupted(request, resumed.job);
  if (resumed.job.recorded.ranks == 0)
    throw Error(fmt::format("the resumed arm recorded nothing: {}.", resumed.job.trouble));
  return resumed;
}

Verdict compare(const ResumeRequest& request, const char* with, int64_t first_step, int64_t last_step) {
  const Run a = Run::open(request.run("straight")), b = Run::open(request.run(with));
  DiffOptions options;
  options.first_step = first_step;
  options.last_step = last_step;
  options.is_resume = first_step > 0;
  return diff(a, b, options);
}

// A training that does not repeat itself says nothing about a resume: what differs behind it has no cause that could be
// told.
void take_back(const ResumeRequest& request, const Verdict& before, Verdict* verdict) {
  verdict->outcome = Outcome::incomparable;
  const bool differs = before.outcome == Outcome::diverged;
  verdict->reason =
      differs ? fmt::format("the command does not repeat itself before the stop: {}", headline(before))
              : fmt::format("whether the command repeats itself before the stop cannot be told: {}", before.reason);
  verdict->first.reset();
  verdict->also_first.clear();
  verdict->ranks_diverged.clear();
  verdict->cause = {};
  verdict->cause.cls.clear();
  verdict->cause.next = shell_words({"forkpoint", "diff", request.run("straight"), request.run("stopped")});
  verdict->propagated = 0;
}

std::vector<std::string> states_of(const Verdict& verdict, const ResumeRequest& request, bool repeats) {
  if (!verdict.first) return {};
  const Run straight = Run::open(request.run("straight")), stopped = Run::open(request.run("stopped")),
            resumed = Run::open(request.run("resumed"));
  try {
    return lost_states({repeats ? &straight : nullptr, &stopped, &resumed, request.checkpoint_at});
  } catch (const Error& error) {
    print_warning(fmt::format("which state was lost cannot be told: {}", error.what()));
    return {};
  }
}

void print_verdict(const Verdict& verdict, const ResumeRequest& request, const std::vector<std::string>& states, bool json) {
  if (json) {
    using Json = nlohmann::ordered_json;
    Json object = to_json(verdict);
    object["resume"] = {{"checkpoint_at", request.checkpoint_at}, {"steps", request.steps}, {"state", states}};
    return print_answer(object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  std::string text = text_report(verdict, Style(stdout), terminal_width(stdout));
  if (!states.empty()) text += fmt::format("\nnot as it was after the resume: {}\n", fmt::join(states, ", "));
  print_answer(text);
}

int resume(const Arguments& arguments) {
  const ResumeRequest request = request_from(arguments);
  make_folder(request.folder);
  const std::string checkpoints = request.run("checkpoints"), unused = request.run("straight-checkpoints");
  const JobResult straight = run_from_start(request, "straight", unused, request.steps, false);
  const JobResult stopped = run_from_start(request, "stopped", checkpoints, request.checkpoint_at, true);
  const Replay resumed = run_resumed(request, checkpoints);
  std::error_code ignored;
  fs::remove_all(unused, ignored);
  const JobResult& job = resumed.job;
  print_note(fmt::format("{}: {}", request.folder,
                         cost_of(straight.steps_run + stopped.steps_run + job.steps_run,
                                 straight.seconds + stopped.seconds + job.seconds)));
  Verdict verdict = compare(request, "resumed", request.checkpoint_at, request.steps - 1);
  const Verdict before = compare(request, "stopped", 0, request.checkpoint_at - 1);
  const bool comparable = before.outcome == Outcome::identical;
  const auto states = states_of(verdict, request, comparable);
  constexpr int64_t kEnoughSteps = 3;
  if (verdict.outcome == Outcome::identical && request.steps - request.checkpoint_at < kEnoughSteps) {
    verdict.notes.push_back(
        fmt::format("only {} behind the resume: a schedule or a count that was not restored shows later",
                    counted(static_cast<uint64_t>(request.steps - request.checkpoint_at), "step")));
  }
  if (!comparable) {
    take_back(request, before, &verdict);
  } else if (verdict.outcome != Outcome::diverged && job.end == JobEnd::short_of) {
    verdict.outcome = Outcome::incomparable;
    verdict.reason = job.trouble;
  }
  if (job.end == JobEnd::short_of) print_warning(job.trouble + ".");
  print_verdict(verdict, request, states, arguments.has("json"));
  flush_answer();
  return comparable ? exit_code(verdict.outcome) : kTrouble;
}

}  // namespace

const Verb& resume_verb() {
  static const Verb verb{
      .name = "resume",
      .summary = "does a stop and a resume change the training? which state was lost?",
      .usage = "resume --checkpoint-at K --steps N [options] -- CMD [ARG...]",
      .about =
          "Runs CMD three times: N steps straight; K steps, until the checkpoint behind them is whole, and a stop; "
          "from that\n"
          "checkpoint on to step N. Compares the steps from K on, and names the state that was not restored. Both arms "
          "save, so\n"
          "that saving itself is no difference. CMD is told to save behind K steps, and to resume, by placeholders in\n"
          "--save-args and --resume-args or in CMD: {checkpoint_dir}, {step} (K), {checkpoint} (resume only), {run}; "
          "without\n"
          "them by the arguments of a framework that is known. The runs are RUNS/straight, stopped and resumed. Exit "
          "status:\n"
          "0 identical, 1 diverged, 2 trouble or incomparable.",
      .options = {{"checkpoint-at", 0, "K", "steps before the checkpoint and the stop"},
                  {"steps", 0, "N", "steps in all"},
                  {"save-args", 0, "ARGS",
                   "added to CMD where it saves, as in '--out {checkpoint_dir} --every {step}'"},
                  {"resume-args", 0, "ARGS", "added to CMD where it resumes, as in '--from {checkpoint}'"},
                  {"preset", 0, "NAME", "the arguments of minigpt, megatron, hf-trainer, dcp (torchtitan), ..."},
                  {"checkpoint-pattern", 0, "P", "name of a checkpoint, for other layouts: 'ckpt_{step}.pt'"},
                  {"output", 'o', "RUNS", "folder to make (default: runs/resume-YYYYmmdd-HHMMSS)"},
                  {"level", 0, "step|layer|launch", "how fine (default: step)"},
                  kDeterministicOption,
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"timeout", 0, "SECONDS", "how long no step may begin before a job is ended (1800; 0: for ever)"},
                  {"show-output", 0, "", "the jobs' output to stderr instead of job.log of each run"},
                  kJsonOption},
      .examples =
          {{"forkpoint resume --checkpoint-at 4 --steps 8 -- ./minigpt --ranks 4", "a framework that is known"},
           {"forkpoint resume --checkpoint-at 10 --steps 20 --preset hf-trainer -- torchrun --nproc-per-node 8 "
            "train.py",
            "another one, by its name"},
           {"forkpoint resume ... --save-args '--out {checkpoint_dir}' --resume-args '--from {checkpoint}' -- ...",
            "a script of one's own, with --checkpoint-pattern 'ckpt_{step}.pt'"}},
      .takes_command = true,
      .run = resume};
  return verb;
}

}  // namespace forkpoint
