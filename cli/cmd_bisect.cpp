// forkpoint bisect: which step, which layer, which op, which operands: coarse to fine, by running the commands again.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "cli/bisect.h"
#include "cli/report.h"
#include "cli/terminal.h"
#include "cli/verbs.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Json = BisectLog::Json;

constexpr char kLogName[] = "bisect.jsonl";

std::string log_of(const Arguments& arguments, const std::string& folder) {
  const auto log = arguments.value("log");
  if (log && log->empty()) throw UsageError("bisect: --log is empty.");
  if (log) return fs::absolute(*log).lexically_normal().string();
  if (folder.empty())
    throw UsageError("bisect: --resume: of which one?", "Name its folder with -o, or its log with --log.");
  return folder + "/" + kLogName;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error(fmt::format("{}: cannot be made: {}.", folder, error.message()));
  if (!fs::is_empty(folder))
    throw Error(fmt::format("{}: expected a new or empty folder.", folder),
                "Name another one with -o, or go on with it by --resume.");
}

void check_alone(const Arguments& arguments) {
  for (const char* option :
       {"good", "bad", "checkpoint", "bad-checkpoint", "checkpoint-pattern", "only-read", "preset", "steps", "script",
        "level", "tries", "deterministic", "step-on", "timeout", "show-output"}) {
    if (arguments.has(option))
      throw UsageError(fmt::format("bisect: --resume goes without --{}: the log says it.", option));
  }
  if (!arguments.positional().empty()) throw UsageError("bisect: --resume goes without runs: the log says them.");
}

std::pair<BisectRequest, BisectLog> begin(const Arguments& arguments) {
  if (arguments.has("resume")) {
    check_alone(arguments);
    const std::string folder = arguments.value("output").value_or("");
    BisectLog log =
        BisectLog::resume(log_of(arguments, folder.empty() ? "" : fs::absolute(folder).lexically_normal().string()));
    BisectRequest request = bisect_request_from(log.request());
    return {std::move(request), std::move(log)};
  }
  BisectRequest request = read_bisect_request(arguments);
  make_folder(request.folder);
  BisectLog log = BisectLog::create(log_of(arguments, request.folder), to_json(request));
  return {std::move(request), std::move(log)};
}

int bisect(const Arguments& arguments) {
  auto [request, log] = begin(arguments);
  const BisectResult result = run_bisect(request, &log);
  print_answer(arguments.has("json") ? bisect_json(request, result) : bisect_text(request, result));
  flush_answer();
  return exit_code(result.verdict.outcome);
}

}  // namespace

std::string bisect_text(const BisectRequest& request, const BisectResult& result) {
  std::string text = text_report(result.verdict, Style(stdout), terminal_width(stdout));
  const auto list = [&](const char* title, const std::vector<std::string>& lines) {
    if (lines.empty()) return;
    text += fmt::format("\n{}\n", title);
    for (const std::string& line : lines) text += fmt::format("  {}\n", printable(line));
  };
  list("operands (good against bad):", result.operands);
  list("the launch again:", result.retry);
  list("kept in:", result.kept);
  text += fmt::format("\nbisected by {} {} and {} {} in {:.1f} s:\n", result.windows,
                      result.windows == 1 ? "window" : "windows", result.steps, result.steps == 1 ? "step" : "steps",
                      result.seconds);
  for (const BisectStage& stage : result.stages) {
    text += fmt::format("  {:<14} {:>3} windows {:>5} steps {:>8.1f} s   {}\n", stage.name, stage.windows, stage.steps,
                        stage.seconds, printable(stage.found));
  }
  return text + fmt::format("  all of it is in {}\n", request.folder);
}

std::string bisect_json(const BisectRequest& request, const BisectResult& result) {
  Json stages = Json::array();
  for (const BisectStage& stage : result.stages) {
    stages.push_back({{"name", stage.name},
                      {"found", stage.found},
                      {"windows", stage.windows},
                      {"steps", stage.steps},
                      {"seconds", stage.seconds}});
  }
  Json object = to_json(result.verdict);
  Json seen;
  if (result.seen) {
    Verdict verdict;
    verdict.outcome = Outcome::diverged;
    verdict.first = result.seen;
    seen = to_json(verdict)["first"];
  }
  object["bisect"] = {{"folder", request.folder},  {"windows", result.windows}, {"steps_replayed", result.steps},
                      {"seconds", result.seconds}, {"stages", stages},          {"operands", result.operands},
                      {"retry", result.retry},     {"kept", result.kept},       {"seen", seen}};
  return object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

const Verb& bisect_verb() {
  static const Verb verb{
      .name = "bisect",
      .summary = "run two commands (or runs) again, coarse to fine, until the op that differs is in hand",
      .usage = "bisect [options] RUN_A RUN_B | --good 'CMD' --bad 'CMD' --steps A:B | --resume -o DIR",
      .about =
          "Looks for the step behind which the state differs, then for the layer in that step, then for the op or "
          "launch,\n"
          "and keeps and compares that op's operands. Recorded runs tell the step without running anything. Two "
          "commands are\n"
          "compared by halves, in windows of one step; both arms always begin at one and the same state: the newest "
          "checkpoint\n"
          "up to which nothing differs, or the start. CMD is split into words as a shell does (NAME=VALUE before it "
          "are\n"
          "variables; what needs a shell goes to sh -c), and is told of its checkpoint as by `forkpoint replay`. The "
          "same command\n"
          "twice is right for faults that come and go. A fork that does not come again is said: did not fork in N "
          "replays.\n"
          "--script decides instead of a comparison which step is the first bad one, as git bisect run does: it is "
          "called on\n"
          "windows of the bad arm, {run} being the folder with that one step recorded (and job.log) and {step} its "
          "number;\n"
          "exit status 0: good, 125: cannot tell, 126 and more: stop, others: bad. The rest then looks for where the "
          "arms\n"
          "part up to there. Each window is a run in DIR, and a line in DIR/bisect.jsonl; nothing finished is done "
          "again.\n"
          "Exit status: 0 identical, 1 diverged, 2 trouble, incomparable or did not fork again.",
      .options = {{"good", 0, "CMD", "the command that is right (default: RUN_A's)"},
                  {"bad", 0, "CMD", "the command that is not (default: RUN_B's)"},
                  {"checkpoint", 0, "DIR", "the good arm's checkpoints (default: windows begin at the start)"},
                  {"bad-checkpoint", 0, "DIR", "the bad arm's own checkpoints, where it has any"},
                  {"checkpoint-pattern", 0, "P", "name of a checkpoint, for other layouts: 'ckpt_{step}.pt'"},
                  {"only-read", 0, "DIR",
                   "another folder of checkpoints that the command reads and does not save to (also DIR,DIR)"},
                  {"preset", 0, "NAME", "megatron, hf-trainer, dcp (torchtitan), lightning, deepspeed or minigpt"},
                  kStepsOption,
                  {"script", 0, "CMD", "says of {run} and {step} whether it is good"},
                  {"level", 0, "step|layer|launch",
                   "the finest to go to (default: launch where there is a GPU, else layer)"},
                  {"tries", 0, "N", "how often a fork may fail to come again (3)"},
                  {"output", 'o', "DIR", "folder to make (default: runs/bisect-YYYYmmdd-HHMMSS)"},
                  {"log", 0, "FILE", "the log (default: DIR/bisect.jsonl)"},
                  {"resume", 0, "", "go on with a bisect that was cut short, by its log"},
                  {"deterministic", 0, "[=KNOBS]",
                   "make both commands repeat themselves, as in `record` (default: as the runs were recorded)"},
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"timeout", 0, "SECONDS", "how long no step may begin before a job is ended (1800; 0: for ever)"},
                  {"show-output", 0, "", "the jobs' output to stderr instead of job.log of each run"},
                  kJsonOption},
      .examples = {{"forkpoint bisect --checkpoint ckpts runs/good runs/bad",
                    "two recorded runs, from the newest checkpoint before the fork"},
                   {"forkpoint bisect --good './train --ranks 4' --bad './train --ranks 4' --steps 0:200",
                    "is it the same twice? if not, where not?"},
                   {"forkpoint bisect --good ... --bad ... --checkpoint ckpts --steps 0:63 --script './loss_is_sane "
                    "{run}/job.log'",
                    "a judge of one's own"},
                   {"forkpoint bisect --resume -o runs/bisect-20250131-120000", "after Ctrl-C or a reboot"}},
      .max_positional = 2,
      .run = bisect};
  return verb;
}

}  // namespace forkpoint
