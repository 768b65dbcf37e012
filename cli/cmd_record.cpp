// forkpoint record: runs a command with the probe loaded and keeps what it leaves as a run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "cli/certify.h"
#include "cli/fresh_folders.h"
#include "cli/knob_options.h"
#include "cli/probe_file.h"
#include "cli/recording.h"
#include "cli/recording_options.h"
#include "cli/target.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "cli/watcher.h"
#include "lib/probe_contract.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

constexpr int kOwnFailure = 125;

// What only makes sense where launches are recorded is refused elsewhere: it would be ignored in silence.
void read_launch_options(const Arguments& arguments, RecordingRequest* request) {
  for (const char* option : {"inputs", "retry", "launch", "certify", "keep-allocators"}) {
    if (request->level == Level::launch || (!arguments.has(option) && !arguments.value(option))) continue;
    throw UsageError(fmt::format("record: --{} needs --level launch, and the level is {}.", option, name(request->level)),
                     "Add --level launch, or leave it out.");
  }
  request->inputs = arguments.has("inputs");
  request->keep_allocators = arguments.has("keep-allocators");
  constexpr int64_t kMostRetries = 100'000;  // as the probe takes it
  if (const auto text = arguments.value("retry")) request->retry = parse_count(*text, "--retry", 1);
  if (request->retry > kMostRetries) {
    throw UsageError(fmt::format("record: --retry {} is more than {}.", request->retry, kMostRetries));
  }
  if (const auto text = arguments.value("launch")) request->retry_launch = parse_launch(*text);
  if ((request->retry > 0) != request->retry_launch.has_value()) {
    throw UsageError("record: --retry N and --launch STEP:INDEX belong together: which launch, and how often.",
                     "`forkpoint show --launches STEP RUN` gives the index of each launch.");
  }
}

RecordingRequest request_from(const Arguments& arguments) {
  RecordingRequest request;
  request.level = parse_level(arguments.value("level").value_or("step"), "record");
  if (const auto text = arguments.value("steps")) request.steps = parse_steps(*text);
  if (const auto text = arguments.value("ranks")) request.ranks = parse_ranks(*text);
  if (const auto text = arguments.value("every")) request.every = parse_count(*text, "--every", 1);
  if (const auto text = arguments.value("max-size")) request.max_size_bytes = parse_size_bytes(*text, "--max-size");
  if (const auto text = arguments.value("first-step")) request.first_step = parse_count(*text, "--first-step", 0);
  request.mask_names = arguments.has("mask-names");
  request.step_on = arguments.value("step-on");
  if (request.step_on) check_step_on(*request.step_on, "record");
  if (const auto text = arguments.value("ops")) request.ops = parse_ops(*text, request.level, "record");
  request.knobs = read_knobs(arguments, "record");
  read_launch_options(arguments, &request);
  if (const auto text = arguments.value("save-operands")) request.save = parse_operands(*text, "--save-operands");
  if (request.save && request.mask_names) {
    throw UsageError("record: --save-operands and --mask-names exclude each other: values would leave with the run.");
  }
  request.watch = read_watch(arguments, request);
  request.command = arguments.command();
  request.run_directory = arguments.value("output").value_or("");
  if (arguments.has("output") && request.run_directory.empty()) throw UsageError("record: --output is empty.");
  return request;
}

std::string some_ranks(const std::vector<int>& ranks) {
  constexpr size_t kMost = 8;
  const std::vector<int> shown(ranks.begin(), ranks.begin() + std::min(kMost, ranks.size()));
  const std::string more = ranks.size() > kMost ? fmt::format(" and {} more", ranks.size() - kMost) : "";
  return fmt::format("{} {}{}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(shown, ", "), more);
}

void report_no_records(const RecordingRequest& request, const TargetEnd& end) {
  print_note(fmt::format("{}: no records.", request.run_directory));
  if (end.exit_status != 0) {
    return print_warning(
        fmt::format("{} before anything of it was written; the folder {} can be removed.", end.sentence(), request.run_directory));
  }
  const char* bridge = getenv(contract::kTorch);
  if (bridge && std::string_view(bridge) == "0") {
    print_warning(
        "FORKPOINT_TORCH=0 is set: of PyTorch nothing but launches (--level launch) and calls of NCCL is recorded.");
  }
  print_warning(
      request.level == Level::launch
          ? "the command made no records: it launched nothing on a CUDA device and does not call forkpoint.h, or it is "
            "statically linked, 32-bit or set-uid, so that the probe could not be loaded into it."
          : "the command made no records: it does not call forkpoint.h, or it is statically linked, 32-bit or set-uid, so "
            "that the probe could not be loaded into it. With --level launch, CUDA programs are seen without it.");
}

// Which of the things that we set may be why it failed.
void report_failure(const RecordingRequest& request, const TargetEnd& end) {
  if (end.exit_status == 0 || end.interrupted || allocator_changes(request).empty()) return;
  print_warning(
      fmt::format("{}. PyTorch and JAX had other allocators than usual, which do not work with everything (CUDA graphs of "
                  "Triton kernels, memory pools, CUDA IPC): if it does not fail by itself, try --keep-allocators.",
                  end.sentence()));
}

void report(const RecordingRequest& request, const Recorded& recorded, const TargetEnd& end) {
  report_failure(request, end);
  for (const std::string& problem : recorded.problems) print_warning(problem);
  if (recorded.ranks == 0) return report_no_records(request, end);
  const std::string range = recorded.steps ? fmt::format(" ({} to {})", recorded.first_step, recorded.last_step) : "";
  const std::string launches = request.level == Level::launch ? counted(recorded.launches, "launch row") + ", " : "";
  print_note(fmt::format("{}: {}, {}{}, {}, {}{}", request.run_directory, counted(recorded.ranks, "rank"),
                         counted(recorded.steps, "step"), range, counted(recorded.records, "record"), launches,
                         human_size(recorded.size_bytes)));
  say_not_deterministic(recorded);
  if (!recorded.writing_ranks.empty()) {
    print_warning(fmt::format("the command has ended, but {} still {}: the run is not whole before that ends.",
                              some_ranks(recorded.writing_ranks), recorded.writing_ranks.size() == 1 ? "writes" : "write"));
  }
  if (!recorded.died_ranks.empty()) {
    const std::string_view whose = recorded.died_ranks.size() == 1 ? "its stream" : "their streams";
    print_warning(fmt::format("{} did not end {} ({}); what was written until then can be read.",
                              some_ranks(recorded.died_ranks), whose, end.sentence()));
  }
  if (!recorded.missing_ranks.empty()) {
    print_warning(
        fmt::format("{} left no stream. Of ranks on another machine, join the folders with `forkpoint merge`.",
                    some_ranks(recorded.missing_ranks)));
  }
}

// The command ran, so its status is passed on, whatever became of the recording: a disk that fills is no failure of the job.
int finish(const RecordingRequest& request, const Manifest& manifest, const TargetEnd& end,
           const std::vector<std::string>& notes) {
  try {
    const Recorded recorded = finish_recording(request, manifest, end, notes);
    report(request, recorded, end);
    for (const std::string& text : recorded.retry) recorded.retry_failed ? print_warning(text) : print_note(text);
    return end.exit_status;
  } catch (const std::exception& error) {
    print_error(Error(fmt::format("{}: the recording could not be completed: {}", request.run_directory, error.what()),
                      fmt::format("By itself, {}.", end.sentence())));
    return end.exit_status;
  }
}

TargetEnd run_watched(const RecordingRequest& request, const Manifest& manifest, const std::string& probe, Watched* watched) {
  if (!request.watch.any()) return run_target(request.command, contract_environment(request, probe));
  Watcher watcher(request, manifest);
  TargetEnd end = run_target(request.command, contract_environment(request, probe), [&] { watcher.start(); });
  *watched = watcher.finish();
  if (watched->stopped) end.stopped = fmt::format("stopped by the watch ({}): {}", watched->first_finding, end.reason());
  return end;
}

int record(const Arguments& arguments) {
  RecordingRequest request = request_from(arguments);
  const std::string probe = find_probe();
  if (request.run_directory.empty()) request.run_directory = default_run_directory(request.command.front());
  if (request.level == Level::launch) request.fixed_addresses = fix_addresses();
  say_knobs(request);
  const FreshFolders fresh(request.run_directory);
  const std::string plain = arguments.has("certify") ? record_plain(request, probe) : "";
  create_run(request.run_directory, manifest_before(request));
  const Manifest manifest = read_manifest(request.run_directory);  // with what create_run added: who we are
  TargetEnd end;
  Watched watched;
  try {
    end = run_watched(request, manifest, probe, &watched);
  } catch (const CannotRun& error) {
    fresh.remove(request.run_directory);
    print_error(error);
    return error.exit_status();
  } catch (const Error&) {
    fresh.remove(request.run_directory);
    throw;
  }
  end.exit_status = finish(request, manifest, end, watched.notes);
  // How it ended after it was told to says nothing; a finding at the very end is one all the same.
  if (request.watch.on_trigger == OnTrigger::stop && !watched.first_finding.empty()) {
    end.exit_status = kStoppedStatus, end.interrupted = false;
  }
  if (!plain.empty() && !certify(request.run_directory, plain) && end.exit_status == 0) end.exit_status = kOwnFailure;
  exit_like(end);
}

}  // namespace

const Verb& record_verb() {
  static const Verb verb{
      .name = "record",
      .summary = "run a command and keep a run: one hash stream a rank",
      .usage = "record [-o RUN] [options] -- CMD [ARG...]",
      .about =
          "Runs CMD with the probe loaded (LD_PRELOAD) and writes what the ranks report through forkpoint.h\n"
          "to a new run folder. CMD keeps its stdin, stdout and stderr; its exit status is passed on\n"
          "(128+n: signal n; 124: ended by --on-trigger stop; 125: forkpoint itself failed; 126: not\n"
          "executable; 127: not found).",
      .options = {{"output", 'o', "RUN", "folder to make (default: runs/NAME-YYYYmmdd-HHMMSS); never overwritten"},
                  {"level", 0, "step|layer|launch",
                   "how fine: step (default); layer: every layer too; launch: every CUDA kernel's buffers too"},
                  kStepsOption,
                  kRanksOption,
                  {"every", 0, "N", "only every N-th step"},
                  {"max-size", 0, "SIZE", "stop a rank's recording at this size, as in 2G (the run then has a gap)"},
                  {"mask-names", 0, "", "write names as hashes; leave the command and the folder out"},
                  {"first-step", 0, "N", "number of the first step, where the program does not say"},
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"ops", 0, "GLOBS",
                   "layer level and up: PyTorch's ops inside of these layers too, forward and backward ('*': all)"},
                  kDeterministicOption,
                  {"watch", 0, "WHAT", "nan,replicas: look while CMD runs: values that become non-finite; ranks that no longer agree"},
                  {"on-trigger", 0, "warn|stop|deepen",
                   "what is done then: say it (default); end CMD, exit status 124; record the next steps by layer"},
                  {"deepen-steps", 0, "N", "how many steps deepen records by layer (default 5)"},
                  {"inputs", 0, "", "launch level: digests right before each launch too"},
                  {"launch", 0, "STEP:INDEX", "launch level: the launch that --retry repeats (STEP -1: before the first)"},
                  {"retry", 0, "N", "launch level: run that launch N more times from the same inputs"},
                  {"save-operands", 0, "WHAT",
                   "keep the values of one op's tensors in RUN/operands: step=N;phase=P;layer=L;op=O, or step=N;launch=INDEX"},
                  {"keep-allocators", 0, "",
                   "launch level: leave PyTorch's and JAX's allocators as they are"},
                  {"certify", 0, "", "launch level: run CMD unhashed as well; did recording change anything?"}},
      .examples = {{"forkpoint record -- ./train --steps 100", "records every step to runs/train-..."},
                   {"forkpoint record -o runs/good --level layer -- mpirun -n 8 ./train",
                    "a named run, fine enough to name a layer; RANK or its like tells the ranks apart"},
                   {"forkpoint record -o runs/fine --level launch --step-on optimizer -- python train.py",
                   "every kernel launch of a script that nobody edited; a step begins with each range named optimizer"},
                   {"forkpoint record --deterministic --watch nan,replicas --on-trigger stop -- "
                    "torchrun --nproc-per-node 8 train.py",
                    "with all that makes a job repeat itself; ends it at the first NaN, or when its replicas come apart"}},
      .takes_command = true,
      .trouble_status = kOwnFailure,
      .run = record};
  return verb;
}

}  // namespace forkpoint
