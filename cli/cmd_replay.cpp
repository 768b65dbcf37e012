// forkpoint replay: a window of steps again, from a checkpoint, recorded finely, and compared with the run that it is
// from.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/job_command.h"
#include "cli/knob_options.h"
#include "cli/recording_options.h"
#include "cli/replay.h"
#include "cli/report.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace {

constexpr int kTrouble = 2;

void read_window(const Arguments& arguments, ReplayRequest* request) {
  const auto steps = arguments.value("steps");
  if (!steps) throw UsageError("replay: --steps is missing.", "Name the window, as in --steps 4100:4110.");
  const StepRange range = parse_steps(*steps);
  if (!range.first || !range.last) throw UsageError("replay: --steps needs both ends, as in 4100:4110.");
  request->first_step = *range.first;
  request->last_step = *range.last;
}

std::string read_preset(const Arguments& arguments) {
  const std::string preset = arguments.value("preset").value_or("");
  const auto& known = presets();
  if (preset.empty() || std::find(known.begin(), known.end(), preset) != known.end()) return preset;
  throw UsageError(fmt::format("replay: --preset `{}` is not known.", preset), "See `forkpoint replay -h`.");
}

ReplayRequest request_from(const Arguments& arguments, const std::optional<Manifest>& against) {
  ReplayRequest request;
  read_window(arguments, &request);
  request.checkpoint_directory = arguments.value("checkpoint").value_or("");
  if (request.checkpoint_directory.empty())
    throw UsageError("replay: --checkpoint is missing.", "Name the folder with the checkpoints.");
  request.checkpoint_pattern = arguments.value("checkpoint-pattern").value_or("");
  if (const auto folders = arguments.value("only-read")) request.only_read = parse_only_read(*folders);
  request.preset = read_preset(arguments);
  RecordingRequest& recording = request.recording;
  recording.command = arguments.command();
  recording.run_directory = arguments.value("output").value_or("");
  if (recording.run_directory.empty()) recording.run_directory = default_run_directory("replay");
  const auto level = arguments.value("level");
  recording.level = level ? parse_level(*level, "replay") : against ? against->level : Level::step;
  if (const auto ranks = arguments.value("ranks")) recording.ranks = parse_ranks(*ranks);
  recording.step_on = arguments.value("step-on");
  if (recording.step_on) check_step_on(*recording.step_on, "replay");
  recording.inputs = arguments.has("inputs");
  if (recording.inputs && recording.level != Level::launch) throw UsageError("replay: --inputs needs --level launch.");
  if (recording.level == Level::launch) recording.fixed_addresses = fix_addresses();
  if (const auto ops = arguments.value("ops")) recording.ops = parse_ops(*ops, recording.level, "replay");
  recording.knobs = read_knobs(arguments, "replay");
  if (!recording.knobs && against) recording.knobs = knobs_of(*against);
  if (const auto text = arguments.value("timeout"))
    request.patience = std::chrono::seconds(parse_count(*text, "--timeout", 0));
  request.show_output = arguments.has("show-output");
  return request;
}

int report(const Arguments& arguments, const ReplayRequest& request, const Replay& replay) {
  const JobResult& job = replay.job;
  if (job.end == JobEnd::short_of) print_warning(job.trouble + ".");
  print_note(fmt::format("{}: {} replayed", request.recording.run_directory, cost_of(job.steps_run, job.seconds)));
  const auto against = arguments.value("against");
  if (!against) {
    if (job.end == JobEnd::short_of || !replay.opened_checkpoint) return kTrouble;
    print_note(fmt::format("to compare: forkpoint diff --steps {}:{} RUN {}", request.first_step, request.last_step,
                           request.recording.run_directory));
    return 0;
  }
  if (job.recorded.ranks == 0) return kTrouble;  // said above
  const Verdict verdict = compare_window(*against, request, replay);
  if (arguments.has("json")) {
    using Json = nlohmann::ordered_json;
    print_answer(to_json(verdict).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    print_answer(text_report(verdict, Style(stdout), terminal_width(stdout)));
  }
  flush_answer();
  return exit_code(verdict.outcome);
}

int replay(const Arguments& arguments) {
  std::optional<Manifest> against;
  if (const auto path = arguments.value("against")) against = Run::open(*path).manifest();  // before an hour is spent
  const ReplayRequest request = request_from(arguments, against);
  if (against) compare_commands(*against, request);
  const Replay replay = replay_window(request);
  if (replay.job.end == JobEnd::interrupted) {
    print_note(fmt::format("interrupted; {} holds what was recorded until then", request.recording.run_directory));
    exit_interrupted(replay.job);
  }
  return report(arguments, request, replay);
}

}  // namespace

const Verb& replay_verb() {
  static const Verb verb{
      .name = "replay",
      .summary = "run a window of steps again from a checkpoint, and compare it with the run",
      .usage = "replay --checkpoint DIR --steps A:B [options] -- CMD [ARG...]",
      .about =
          "Starts CMD from the newest whole checkpoint of step A or before, records steps A to B, ends the job behind "
          "B (all\n"
          "ranks; also processes that ignore SIGTERM) and compares with --against RUN, in these steps alone. In CMD\n"
          "{checkpoint}, {checkpoint_dir}, {step} and {run} are filled in; without any, the arguments of the framework "
          "that\n"
          "wrote the checkpoint are added. The job gets a copy of the checkpoint in a folder of its own, to save to as "
          "well:\n"
          "DIR is only read, and an argument that names DIR is given that folder. CMD writes to RUN/job.log. Exit "
          "status:\n"
          "0 identical (without --against: recorded), 1 diverged, 2 trouble or incomparable.",
      .options = {{"checkpoint", 0, "DIR", "folder with the checkpoints"},
                  {"checkpoint-pattern", 0, "P", "name of a checkpoint, for other layouts: 'ckpt_{step}.pt'"},
                  {"only-read", 0, "DIR",
                   "another folder of checkpoints that the command reads and does not save to (also DIR,DIR)"},
                  {"preset", 0, "NAME", "megatron, hf-trainer, dcp (torchtitan), lightning, deepspeed or minigpt"},
                  kStepsOption,
                  {"against", 0, "RUN", "the run to compare with"},
                  {"output", 'o', "RUN", "folder to make (default: runs/replay-YYYYmmdd-HHMMSS)"},
                  {"level", 0, "step|layer|launch", "how fine (default: as --against, else step)"},
                  {"ops", 0, "GLOB", "also the framework ops inside the layers that match"},
                  kRanksOption,
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"deterministic", 0, "[=KNOBS]", "make CMD repeat itself, as in `record` (default: as --against)"},
                  {"inputs", 0, "", "launch level: digests right before each launch too"},
                  {"timeout", 0, "SECONDS", "how long no step may begin before the job is ended (1800; 0: for ever)"},
                  {"show-output", 0, "", "the job's output to stderr instead of RUN/job.log"},
                  kJsonOption},
      .examples =
          {{"forkpoint replay --checkpoint ckpts --steps 41:43 --level layer --against runs/bad -- ./minigpt --ranks 4",
            "is it the same again? 1: the fault was a rare one, or the code has changed"},
           {"forkpoint replay --checkpoint out --steps 4100:4110 -- torchrun train.py --from {checkpoint}",
            "a script of one's own"}},
      .takes_command = true,
      .run = replay};
  return verb;
}

}  // namespace forkpoint
