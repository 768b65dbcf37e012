#include "cli/recording.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <limits>
#include <set>
#include <thread>

#include "cli/knob_options.h"
#include "cli/machine.h"
#include "cli/probe_file.h"
#include "lib/cause_facts.h"
#include "lib/probe_contract.h"
#include "lib/retry_report.h"
#include "lib/stream_facts.h"

namespace forkpoint {
namespace fs = std::filesystem;

std::string default_run_directory(const std::string& program) {
  std::string name = fs::path(program).filename().string();
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c) && c != '.' && c != '_'; }, '-');
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char stamp[32];
  std::strftime(stamp, sizeof(stamp), "%Y%m%d-%H%M%S", &parts);
  const std::string base = fmt::format("runs/{}-{}", name.empty() ? "command" : name, stamp);
  std::string path = base;
  for (int i = 2; fs::exists(path); ++i) path = fmt::format("{}-{}", base, i);
  return path;
}

Manifest manifest_before(const RecordingRequest& request) {
  Manifest manifest;
  manifest.forkpoint_version = FORKPOINT_VERSION;
  manifest.command = request.mask_names ? std::vector<std::string>{"(masked)"} : request.command;
  manifest.working_directory = request.mask_names ? "(masked)" : fs::current_path().string();
  manifest.environment = numeric_environment();
  manifest.versions = machine_versions();
  EnvironmentChanges ours = allocator_changes(request);
  if (const auto plan = knob_plan(request)) {
    set_recorded_knobs(recorded_knobs(*plan), &manifest);
    ours.insert(plan->changes.begin(), plan->changes.end());
  }
  for (const auto& [variable, value] : ours) {
    manifest.environment[variable] = *value;
    manifest.versions["set by forkpoint"] +=
        (manifest.versions["set by forkpoint"].empty() ? "" : ", ") + fmt::format("{}={}", variable, *value);
  }
  // For a command that records the same again.
  std::vector<std::string> options;
  if (request.step_on && !request.mask_names) options.insert(options.end(), {"--step-on", *request.step_on});
  if (!request.ops.empty() && !request.mask_names) options.insert(options.end(), {"--ops", request.ops});
  if (request.keep_allocators) options.push_back("--keep-allocators");
  if (request.knobs) options.push_back("--deterministic=" + knob_list(*request.knobs));
  if (!options.empty()) manifest.versions["recorded with"] = shell_words(options);
  if (request.level == Level::launch) manifest.versions["addresses"] = request.fixed_addresses ? "fixed" : "randomised";
  manifest.gpus = gpu_names();
  manifest.level = request.level;
  manifest.ranks = request.ranks;
  manifest.every = request.every;
  manifest.names_masked = request.mask_names;
  manifest.started_at = utc_now();
  manifest.hosts = {host_name()};
  return manifest;
}

EnvironmentChanges allocator_changes(const RecordingRequest& request) {
  EnvironmentChanges changes;
  if (request.level != Level::launch || request.keep_allocators) return changes;
  const auto is_set = [](const char* variable) { return std::getenv(variable) != nullptr; };
  // The old name counts as well: PyTorch reads both.
  if (!is_set("PYTORCH_ALLOC_CONF") && !is_set("PYTORCH_CUDA_ALLOC_CONF") && !is_set("PYTORCH_NO_CUDA_MEMORY_CACHING")) {
    changes["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync";
  }
  if (!is_set("XLA_PYTHON_CLIENT_ALLOCATOR") && !is_set("TF_GPU_ALLOCATOR")) changes["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async";
  return changes;
}

EnvironmentChanges contract_environment(const RecordingRequest& request, const std::string& probe) {
  using namespace contract;
  EnvironmentChanges changes = allocator_changes(request);
  for (const char* variable : {kSteps, kRanks, kEvery, kMaxSizeBytes, kMaskNames, kFirstStep, kInputs, kStepOn, kRetry, kLaunch, kSave,
                               kSequence, kStopAfter, kOps, kWatch, kOnTrigger, kDeterministic}) {
    changes[variable] = std::nullopt;
  }
  if (const auto plan = knob_plan(request)) {
    for (const auto& [variable, value] : plan->changes) changes[variable] = value;
    if (const std::string names = plan->in_force(); !names.empty()) changes[kDeterministic] = names;
  }
  changes[kRun] = fs::absolute(request.run_directory).lexically_normal().string();
  changes[kLevel] = std::string(name(request.level));
  if (request.steps) {
    const auto [first, last] = *request.steps;
    changes[kSteps] = fmt::format("{}:{}", first.value_or(0), last.value_or(std::numeric_limits<int64_t>::max()));
  }
  if (!request.ranks.empty()) changes[kRanks] = fmt::format("{}", fmt::join(request.ranks, ","));
  if (request.every != 1) changes[kEvery] = std::to_string(request.every);
  if (request.max_size_bytes) changes[kMaxSizeBytes] = std::to_string(*request.max_size_bytes);
  if (request.mask_names) changes[kMaskNames] = "1";
  if (request.first_step) changes[kFirstStep] = std::to_string(*request.first_step);
  if (request.step_on) changes[kStepOn] = *request.step_on;
  if (!request.ops.empty()) changes[kOps] = request.ops;
  if (request.inputs) changes[kInputs] = "1";
  if (request.sequence) changes[kSequence] = "1";
  if (request.watch.any()) {
    changes[kWatch] = request.watch.names();
    changes[kOnTrigger] = std::string(name(request.watch.on_trigger));
    // Behind which step is said when something was found.
    if (request.watch.on_trigger == OnTrigger::stop) changes[kStopAfter] = std::to_string(std::numeric_limits<int64_t>::max() - 1);
  }
  if (request.retry > 0) changes[kRetry] = std::to_string(request.retry);
  if (request.retry_launch) changes[kLaunch] = *request.retry_launch;
  if (request.save) changes[kSave] = *request.save;
  changes["LD_PRELOAD"] = preload_with(probe, std::getenv("LD_PRELOAD"));
  return changes;
}

namespace {

// Processes that outlive the command's first one (a launcher that does not wait) are given this long to end.
constexpr auto kGrace = std::chrono::seconds(2);
constexpr size_t kMostDistinctValues = 4;

bool any_writing(const Run& run) {
  const auto& streams = run.streams();
  return std::any_of(streams.begin(), streams.end(),
                     [](const auto& stream) { return stream->state() == StreamState::recording; });
}

// Nothing when there is no stream that can be read.
std::optional<Run> open_after_end(const std::string& directory, std::vector<std::string>* problems) {
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  try {
    Run run = Run::open(directory);
    while (any_writing(run) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      run = Run::open(directory);
    }
    return run;
  } catch (const Error& error) {
    for (const auto& entry : fs::directory_iterator(directory)) {
      if (entry.path().extension() != ".fkp") continue;  // no stream at all is said in plainer words by the caller
      problems->push_back(error.what());
      break;
    }
    return std::nullopt;
  }
}

// Facts that all ranks share are versions; those with a value a rank (tp_rank) stay in the streams.
void gather_facts(const Run& run, Manifest* manifest) {
  std::map<std::string, std::set<std::string>> values;
  for (const auto& stream : run.streams()) {
    for (const auto& [key, value] : stream->header().facts) values[key].insert(value);
  }
  for (const auto& [key, distinct] : values) {
    if (key.ends_with("_rank") || key == kFirstBegunFact || distinct.size() > kMostDistinctValues) continue;
    std::string joined;
    for (const std::string& value : distinct) joined += (joined.empty() ? "" : " | ") + value;
    manifest->versions[key] = joined;
  }
}

void gather_headers(const Run& run, Manifest* manifest) {
  std::set<std::string> hosts;
  std::vector<std::string> devices;
  for (const auto& stream : run.streams()) {
    const StreamHeader& header = stream->header();
    manifest->world_size = std::max(manifest->world_size, header.world_size);
    if (manifest->step_base.empty()) manifest->step_base = header.step_base;
    if (!header.host.empty()) hosts.insert(header.host);
    if (!header.device.empty() && header.device != "cpu") devices.push_back(header.device);
  }
  // --ranks 0-7 of a world of 4 asks for 4 streams.
  std::erase_if(manifest->ranks, [&](int rank) { return rank >= manifest->world_size; });
  if (!hosts.empty()) manifest->hosts.assign(hosts.begin(), hosts.end());
  if (manifest->gpus.empty()) manifest->gpus = devices;
}

void count(const Run& run, Recorded* recorded) {
  std::set<int64_t> steps;
  for (const auto& stream : run.streams()) {
    recorded->size_bytes += stream->size_bytes();
    for (const StepSummary& step : stream->steps()) {
      recorded->records += step.records;
      recorded->launches += step.launches;
      if (step.step != kPrologueStep) steps.insert(step.step);
    }
    if (stream->state() == StreamState::recording) recorded->writing_ranks.push_back(stream->header().rank);
    if (stream->state() == StreamState::died) recorded->died_ranks.push_back(stream->header().rank);
  }
  std::set<std::string> not_deterministic;
  for (const auto& stream : run.streams()) {
    for (const CoverageLimit& limit : stream->coverage_limits()) {
      if (limit.what.starts_with(kNotDeterministic) || limit.what.starts_with(kDeterministicMode)) not_deterministic.insert(limit.what);
    }
  }
  recorded->not_deterministic.assign(not_deterministic.begin(), not_deterministic.end());
  recorded->ranks = run.streams().size();
  recorded->steps = steps.size();
  if (!steps.empty()) recorded->first_step = *steps.begin(), recorded->last_step = *steps.rbegin();
}

void report_retry(const RecordingRequest& request, const std::optional<Run>& run, Recorded* recorded) {
  const std::string& launch = *request.retry_launch;  // checked by parse_launch
  RetryReport report;
  if (run) {
    const int64_t step = launch.starts_with("-1:") ? kPrologueStep : std::stoll(launch);
    report = forkpoint::report_retry(*run, step, std::stoull(launch.substr(launch.rfind(':') + 1)), request.retry);
  } else {
    report.sentences = {fmt::format("launch {} did not come: nothing was recorded", launch)};
  }
  recorded->retry = report.sentences;
  recorded->retry_failed = !report.repeated;
}

RunState judge(const Recorded& recorded, const TargetEnd& end) {
  if (!recorded.writing_ranks.empty()) return RunState::recording;
  if (recorded.ranks == 0 || !recorded.died_ranks.empty() || !recorded.problems.empty()) return RunState::died;
  // A rank of another machine has its own folder, but one that is missing after a failure never got that far.
  if (!recorded.missing_ranks.empty() && end.exit_status != 0) return RunState::died;
  return RunState::whole;
}

}  // namespace

Recorded finish_recording(const RecordingRequest& request, Manifest manifest, const TargetEnd& end,
                          const std::vector<std::string>& notes) {
  Recorded recorded;
  const auto run = open_after_end(request.run_directory, &recorded.problems);
  if (run) {
    recorded.problems = run->problems();
    gather_headers(*run, &manifest);
    gather_facts(*run, &manifest);
    count(*run, &recorded);
    recorded.missing_ranks = run->missing_ranks();
    std::erase_if(recorded.missing_ranks, [&](int rank) { return rank >= manifest.world_size; });
  }
  if (request.retry_launch) report_retry(request, run, &recorded);
  manifest.notes = request.notes;
  manifest.notes.insert(manifest.notes.end(), recorded.retry.begin(), recorded.retry.end());
  manifest.notes.insert(manifest.notes.end(), notes.begin(), notes.end());
  manifest.ended_at = utc_now();
  manifest.exit_status = end.exit_status;
  manifest.end_reason = end.reason();
  manifest.state = judge(recorded, end);
  write_manifest(request.run_directory, manifest);
  return recorded;
}

}  // namespace forkpoint
