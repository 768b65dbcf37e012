// forkpoint attach, detach: recording jobs that are running already.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "cli/attaching.h"
#include "cli/machine.h"
#include "cli/recording.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/run.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

constexpr int kOwnFailure = 125, kNotAll = 1, kInterrupted = 130;
constexpr double kDetachMargin_s = 0.2;

volatile std::sig_atomic_t interruptions = 0;

void count_interruptions() {
  struct sigaction action {};
  action.sa_handler = [](int) { interruptions = interruptions + 1; };
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
}

std::vector<std::unique_ptr<Job>> chosen_jobs(const Arguments& arguments, const std::string& verb) {
  const auto name = arguments.value("job");
  const int ways = (arguments.positional().empty() ? 0 : 1) + (name ? 1 : 0) + (arguments.has("all") ? 1 : 0);
  if (ways != 1) throw UsageError(fmt::format("{}: which job? One of PID..., --job NAME and --all is expected.", verb), "`forkpoint ps` lists them.");
  std::vector<std::unique_ptr<Job>> jobs;
  std::set<int64_t> seen;
  for (const std::string& word : arguments.positional()) {
    const int64_t pid = parse_count(word, "PID", 1);
    if (seen.insert(pid).second) jobs.push_back(find_job(pid));
  }
  if (!arguments.positional().empty()) return jobs;
  FoundJobs found = find_jobs();
  for (const std::string& problem : found.problems) print_warning(problem);
  for (auto& job : found.jobs) {
    if (!name || job->status().text("job") == *name) jobs.push_back(std::move(job));
  }
  if (jobs.empty()) {
    throw Error(name ? fmt::format("there is no job `{}` that can be attached.", *name) : "there is no job that can be attached.",
                "Jobs are attached that were started with `forkpoint run` or LD_PRELOAD, on this machine; see `forkpoint ps`.");
  }
  return jobs;
}

int64_t whole_number(const Arguments& arguments, const char* option, int64_t otherwise) {
  const auto text = arguments.value(option);
  return text ? parse_count(*text, std::string("--") + option, 0) : otherwise;
}

AttachRequest request_from(const Arguments& arguments) {
  AttachRequest request;
  const auto level = level_from_name(arguments.value("level").value_or("step"));
  if (!level) throw UsageError(fmt::format("attach: --level `{}` is none of step and layer.", *arguments.value("level")));
  if (*level == Level::launch) {
    throw UsageError("attach: launches cannot be recorded from the middle of a job on: which buffers there are was not seen.",
                     "Use --level layer, or `forkpoint record --level launch` from the start.");
  }
  request.level = *level;
  if (const auto text = arguments.value("from")) request.first = parse_count(*text, "--from", 0);
  const auto to = arguments.value("to");
  const auto steps = arguments.value("steps");
  if (to && (!request.first || steps)) throw UsageError("attach: --to needs --from, and no --steps.");
  if (to && parse_count(*to, "--to", 0) < *request.first) throw UsageError(fmt::format("attach: --to {} is before --from {}.", *to, *request.first));
  if (to) request.steps = parse_count(*to, "--to", 0) - *request.first + 1;
  if (steps && steps->find(':') != steps->npos) {
    const StepRange range = parse_steps(*steps);
    if (!range.first || !range.last || request.first) throw UsageError("attach: --steps A:B needs both ends, and no --from.");
    request.first = range.first;
    request.steps = *range.last - *range.first + 1;
  } else if (steps) {
    request.steps = parse_count(*steps, "--steps", 1);
  }
  request.mask_names = arguments.has("mask-names");
  if (const auto text = arguments.value("max-size")) request.max_size_bytes = parse_size_bytes(*text, "--max-size");
  request.timeout_s = static_cast<int>(std::min<int64_t>(whole_number(arguments, "timeout", request.timeout_s), 1'000'000));
  return request;
}

Manifest manifest_of(const std::vector<std::unique_ptr<Job>>& jobs, const AttachRequest& request) {
  RecordingRequest as_recorded;
  as_recorded.level = request.level;
  as_recorded.mask_names = request.mask_names;
  as_recorded.command = command_of(jobs.front()->pid());
  Manifest manifest = manifest_before(as_recorded);
  if (!request.mask_names) manifest.working_directory = working_directory_of(jobs.front()->pid());
  manifest.environment.clear();
  for (const auto& [variable, value] : environment_of(jobs.front()->pid())) {
    if (is_numeric_environment(variable)) manifest.environment[variable] = value;
  }
  manifest.world_size = static_cast<int>(jobs.front()->status().number("world").value_or(1));
  for (const auto& job : jobs) manifest.ranks.push_back(std::max(job->rank(), 0));
  if (manifest.ranks.size() == static_cast<size_t>(manifest.world_size)) manifest.ranks.clear();
  return manifest;
}

// The job's processes write into it, and we may be root.
void give_to(const std::string& folder, uint32_t uid) {
  if (geteuid() == uid) return;
  struct stat process {};
  const int opened = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (opened >= 0 && fstat(opened, &process) == 0) [[maybe_unused]] const int changed = fchown(opened, uid, static_cast<gid_t>(-1));
  if (opened >= 0) close(opened);
}

// A rank that began, but not in time, has a stream without a step: it must not pass for one that was recorded.
void remove_empty_streams(const std::string& folder, const std::vector<AttachOutcome>& outcomes) {
  for (const AttachOutcome& outcome : outcomes) {
    const std::string path = folder + "/" + stream_file_name(outcome.rank);
    std::error_code ignored;
    if (outcome.recorded || !fs::exists(path, ignored)) continue;
    try {
      if (HashStreamReader::open(path)->steps().empty()) fs::remove(path, ignored);
    } catch (const Error&) {  // it holds no whole header
      fs::remove(path, ignored);
    }
  }
}

struct Finished {
  Recorded recorded;
  bool all = true;
};

Finished finish(const std::string& folder, const Manifest& before, const AttachRequest& request, const Attaching& attaching,
                const std::vector<AttachOutcome>& outcomes) {
  remove_empty_streams(folder, outcomes);
  RecordingRequest as_recorded;
  as_recorded.run_directory = folder;
  as_recorded.level = request.level;
  Finished finished;
  finished.recorded = finish_recording(as_recorded, before, {});
  Manifest manifest = read_manifest(folder);
  const bool one = attaching.first_step() == attaching.last_step();
  manifest.notes.push_back(kAttachedNote +
                           (one ? fmt::format("step {}", attaching.first_step())
                                : fmt::format("steps {} to {}", attaching.first_step(), attaching.last_step())));
  bool any_goes_on = false;
  for (const AttachOutcome& outcome : outcomes) {
    any_goes_on |= !outcome.ended;
    if (outcome.recorded) continue;
    finished.all = false;
    manifest.notes.push_back(fmt::format("{} was not recorded to the end: {}", outcome.who, outcome.why));
  }
  manifest.exit_status = -1;
  manifest.end_reason = !any_goes_on                  ? "the job's processes ended before the window did"
                        : attaching.was_interrupted() ? "detached before the window's end"
                                                      : "detached, the job went on";
  if (!finished.all) manifest.state = RunState::died;
  write_manifest(folder, manifest);
  return finished;
}

int report(const std::string& folder, const Attaching& attaching, const std::vector<AttachOutcome>& outcomes, const Finished& finished) {
  const Recorded& recorded = finished.recorded;
  for (const std::string& problem : recorded.problems) print_warning(problem);
  for (const AttachOutcome& outcome : outcomes) {
    if (!outcome.recorded) print_warning(fmt::format("{} was not recorded to the end: {}.", outcome.who, outcome.why));
  }
  const std::string range = recorded.steps ? fmt::format(" ({} to {})", recorded.first_step, recorded.last_step) : "";
  const auto world = static_cast<size_t>(std::max(read_manifest(folder).world_size, 0));
  const std::string ranks =
      world > outcomes.size() ? fmt::format("{} of {} ranks", recorded.ranks, world) : counted(recorded.ranks, "rank");
  print_note(fmt::format("{}: {}, {}{}, {}, {}", folder, ranks, counted(recorded.steps, "step"), range,
                         counted(recorded.records, "record"), human_size(recorded.size_bytes)));
  if (recorded.records == 0) print_warning("the ranks made no records in these steps.");
  if (attaching.was_interrupted() && interruptions > 0) return kInterrupted;
  return finished.all && recorded.records > 0 ? 0 : kNotAll;
}

// Whatever was seen of the ranks: no stream with a step is there, and no rank is left that may still write one.
bool holds_nothing(const std::string& folder, const std::vector<AttachOutcome>& outcomes) {
  remove_empty_streams(folder, outcomes);
  std::error_code ignored;
  return std::ranges::all_of(outcomes, [&](const AttachOutcome& outcome) {
    return !outcome.recorded && outcome.settled && !fs::exists(folder + "/" + stream_file_name(outcome.rank), ignored);
  });
}

// The folder as it was before.
void empty_folder(const std::string& folder, bool was_there) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) fs::remove_all(entry.path(), ignored);
  if (!was_there) fs::remove(folder, ignored);
}

// No rank came to the window.
int report_nothing(const Attaching& attaching, const std::vector<AttachOutcome>& outcomes) {
  for (const AttachOutcome& outcome : outcomes)
    print_warning(fmt::format("{} was not recorded: {}.", outcome.who, outcome.why));
  print_error(
      Error(fmt::format("no rank began step {}, the window's first.", attaching.first_step()), "Nothing is recorded."));
  return interruptions > 0 ? kInterrupted : kOwnFailure;
}

int attach(const Arguments& arguments) {
  AttachRequest request = request_from(arguments);
  count_interruptions();
  auto jobs = chosen_jobs(arguments, "attach");
  std::string folder = arguments.value("output").value_or("");
  if (arguments.value("output") && folder.empty()) throw UsageError("attach: --output is empty.");
  const auto command = command_of(jobs.front()->pid());
  if (folder.empty()) folder = default_run_directory(command.empty() ? "job" : command.front());
  request.run_directory = fs::absolute(folder).lexically_normal().string();
  const uint32_t uid = jobs.front()->uid();
  Attaching attaching(std::move(jobs), request, [] { return static_cast<int>(interruptions); });
  const bool was_there = fs::exists(folder);
  create_run(folder, manifest_of(attaching.jobs(), request));
  give_to(folder, uid);
  const Manifest manifest = read_manifest(folder);
  try {
    attaching.begin();
  } catch (const Error& error) {
    empty_folder(folder, was_there);
    if (interruptions == 0) throw;
    print_error(error);
    return kInterrupted;
  }
  print_note(fmt::format("recording steps {} to {} of {}", attaching.first_step(), attaching.last_step(), counted(attaching.jobs().size(), "rank")));
  const std::vector<AttachOutcome> outcomes = attaching.wait();
  if (holds_nothing(folder, outcomes)) {
    empty_folder(folder, was_there);
    return report_nothing(attaching, outcomes);
  }
  return report(folder, attaching, outcomes, finish(folder, manifest, request, attaching, outcomes));
}

bool is_attached(const Job& job) {
  return job.state() == "ready" || job.state() == "recording" || job.state() == "armed";
}

using Jobs = std::vector<std::unique_ptr<Job>>;

// By the run that they record into: a window ends on all of its ranks at one step, so that those of this machine that
// were not named belong to it as well. Ranks that are being told of a window know no run yet: each by itself.
std::vector<Jobs> by_run(Jobs jobs) {
  std::map<std::string, Jobs> runs;
  std::set<int64_t> known;
  for (auto& job : jobs) {
    known.insert(job->pid());
    const std::string run = job->status().text("run");
    runs[run.empty() ? fmt::format(" {}", job->pid()) : run].push_back(std::move(job));
  }
  for (auto& job : find_jobs().jobs) {
    const auto run = runs.find(job->status().text("run"));
    if (is_attached(*job) && run != runs.end() && known.insert(job->pid()).second)
      run->second.push_back(std::move(job));
  }
  std::vector<Jobs> out;
  for (auto& [run, ranks] : runs) out.push_back(std::move(ranks));
  return out;
}

bool end_window(const Jobs& jobs) {
  double speed = 0;
  int64_t end = reachable_step(jobs, kDetachMargin_s, &speed) - 2, first = 0;
  for (const auto& job : jobs) first = std::max(first, job->status().number("first").value_or(0));
  const bool is_ahead = end + 1 < first;  // no rank can be in the window yet
  end = is_ahead ? first - 1 : std::max(end, first);
  bool all = true;
  for (const auto& job : jobs) {
    const auto reply = job->ask(control::Message("end_at").set("step", end), 5000);
    if (reply && reply->word == "status") continue;
    // Done since we looked is as good.
    if (job->refresh(5000) && job->state() != "recording") continue;
    print_warning(fmt::format("{} could not be told: {}.", job->who(), reply ? reply->text("why") : "it does not answer"));
    all = false;
  }
  print_note(is_ahead ? fmt::format("{} called off before step {}, the first that was to be recorded.",
                                    counted(jobs.size(), "rank"), first)
                      : fmt::format("{} recorded up to step {} at most.", counted(jobs.size(), "rank"), end));
  return all;
}

// Ranks that are being told of a window take it over one by one, at their next step. Told to end meanwhile, some would
// call it off and others record it: so that is waited for, as long as a long step may take.
void await_agreement(const Jobs& jobs) {
  const auto begun = std::chrono::steady_clock::now();
  const auto deadline = begun + std::chrono::seconds(60);
  // One that only listens may have been left so by an attach that was killed.
  const auto is_told = [&](const Job& job) {
    const bool listens =
        job.state() == "listening" && std::chrono::steady_clock::now() < begun + std::chrono::seconds(3);
    return listens || job.state() == "armed";
  };
  const auto wait = [&](const Jobs& some) {
    for (const auto& job : some) {
      while (is_told(*job) && std::chrono::steady_clock::now() < deadline && job->refresh(5000))
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  wait(jobs);
  wait(find_jobs().jobs);  // ranks of the same window that were not named
  for (const auto& job : jobs) job->refresh(5000);
}

int detach(const Arguments& arguments) {
  auto jobs = chosen_jobs(arguments, "detach");
  await_agreement(jobs);
  std::erase_if(jobs, [](const auto& job) { return !is_attached(*job); });
  if (jobs.empty()) {
    print_note("none of these is attached.");
    return 0;
  }
  bool all = true;
  for (const Jobs& ranks : by_run(std::move(jobs))) all = end_window(ranks) && all;
  return all ? 0 : kNotAll;
}

}  // namespace

const Verb& attach_verb() {
  static const Verb verb{
      .name = "attach",
      .summary = "record some steps of a job that is running",
      .usage = "attach PID... | --job NAME | --all [options]",
      .about =
          "Wakes the sleeping probes of a job's ranks at one step common to all, records from its beginning on into a\n"
          "new run folder, and puts them back to sleep; the job goes on. A rank that cannot make it in time keeps all\n"
          "from recording, and is named. Ctrl-C ends the window early, after a step common to all, or calls it off. "
          "Exit status: 0\n"
          "the window was recorded on all ranks; 1 not on all, or not to its end; 125 nothing was recorded; 130 "
          "Ctrl-C.",
      .options = {{"job", 0, "NAME",
                   "all ranks on this machine of the job of that name (FORKPOINT_JOB, else SLURM_JOB_ID)"},
                  {"all", 0, "", "all ranks on this machine that can be attached"},
                  {"output", 'o', "RUN", "folder to make (default: runs/NAME-YYYYmmdd-HHMMSS); never overwritten"},
                  {"level", 0, "step|layer", "how fine: step (default); layer: every layer too"},
                  {"steps", 0, "N|A:B", "how many steps (default 1), or exactly steps A to B"},
                  {"from", 0, "S", "the first step; on several nodes, give all of them the same"},
                  {"to", 0, "T", "the last step, with --from"},
                  {"max-size", 0, "SIZE", "stop a rank's recording at this size, as in 2G (the run then has a gap)"},
                  {"mask-names", 0, "", "write names as hashes; leave the command and the folder out"},
                  {"timeout", 0, "SECONDS", "how long a rank may take to come to its next step (default 120)"}},
      .examples = {{"forkpoint attach 4711 --steps 3 -o runs/now", "the next three steps of one process"},
                   {"forkpoint attach --job pretrain --level layer --from 41200 --to 41210 -o runs/spike",
                    "ten steps of all ranks on this machine, layer by layer"}},
      .max_positional = 1u << 16,
      .trouble_status = kOwnFailure,
      .run = attach};
  return verb;
}

const Verb& detach_verb() {
  static const Verb verb{.name = "detach",
                         .summary = "end an attach early, at one step on all ranks",
                         .usage = "detach PID... | --job NAME | --all",
                         .about =
                             "Has the ranks end what `forkpoint attach` records of them, after a step common to all, "
                             "on this machine also those of\n"
                             "the run that are not named; the attach then completes its run and ends as after the "
                             "whole window. A window that\n"
                             "lies ahead is called off: nothing is recorded then.",
                         .options = {{"job", 0, "NAME", "all ranks on this machine of the job of that name"},
                                     {"all", 0, "", "all that are attached on this machine"}},
                         .examples = {{"forkpoint detach --all", "everything that is attached here"},
                                      {"forkpoint detach --job pretrain", "all ranks of one job on this machine"}},
                         .max_positional = 1u << 16,
                         .trouble_status = kOwnFailure,
                         .run = detach};
  return verb;
}

}  // namespace forkpoint
