#include "cli/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "cli/checkpoint_reads.h"
#include "cli/checkpoint_view.h"
#include "cli/job_command.h"
#include "cli/machine.h"
#include "cli/terminal.h"
#include "lib/cause_facts.h"
#include "lib/diff.h"
#include "lib/diff_notes.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

std::string preset_for(const ReplayRequest& request, const Checkpoint& checkpoint) {
  if (!request.preset.empty()) return request.preset;
  return checkpoint.kind == "pattern" ? preset_of_program(request.recording.command) : checkpoint.kind;
}

CommandValues values_of(const ReplayRequest& request, const Checkpoint& checkpoint, const CheckpointView& view) {
  CommandValues values;
  values.checkpoint = view.checkpoint();
  values.checkpoint_dir = view.directory();
  values.step = checkpoint.step;
  values.run = fs::absolute(request.recording.run_directory).lexically_normal().string();
  values.user_directory = request.checkpoint_directory;
  return values;
}

std::vector<std::string> command_for(const ReplayRequest& request, const Checkpoint& checkpoint,
                                     const CommandValues& values) {
  const std::vector<std::string>& command = request.recording.command;
  const std::string preset = preset_for(request, checkpoint);
  if (!request.preset_besides_placeholders || !has_placeholder(command)) return resuming(command, preset, values);
  const auto filled = fill_in(command, values);
  const auto& known = presets();
  const bool can_add = std::find(known.begin(), known.end(), preset) != known.end() && !is_shell_line(command);
  return can_add ? resuming(filled, preset, values) : filled;
}

void make_parent(const std::string& path) {
  std::error_code error;
  const fs::path parent = fs::absolute(path).lexically_normal().parent_path();
  fs::create_directories(parent, error);
  if (error) throw Error(fmt::format("{}: cannot be made: {}.", parent.string(), error.message()));
}

// What ran on another machine may have opened it there, unseen.
bool ran_here(const std::string& run_directory) {
  const Run run = Run::open(run_directory);
  return std::all_of(run.streams().begin(), run.streams().end(),
                     [](const auto& stream) { return stream->header().host == host_name(); });
}

void note_unopened(const std::string& run_directory, const Checkpoint& checkpoint) {
  Manifest manifest = read_manifest(run_directory);
  manifest.notes.emplace_back(kUnopenedCheckpoint);
  write_manifest(run_directory, manifest);
  print_warning(
      fmt::format("the job opened no file of its copy of {}: it began anew, and its steps are not those of the "
                  "checkpoint. Say where the command takes it: {{checkpoint}} or {{checkpoint_dir}} in a word.",
                  checkpoint.path));
}

std::string in_words(const std::vector<std::string>& values) { return fmt::format("{}", fmt::join(values, ", ")); }

}  // namespace

Checkpoint choose_checkpoint(const std::string& directory, const std::string& pattern, int64_t first_step) {
  const std::vector<Checkpoint> all = find_checkpoints(directory, pattern);
  const auto chosen = newest_checkpoint(all, first_step);
  std::vector<std::string> later;
  for (const Checkpoint& checkpoint : all) {
    if (checkpoint.whole && checkpoint.step > first_step) later.push_back(std::to_string(checkpoint.step));
    if (checkpoint.whole || checkpoint.step > first_step || (chosen && checkpoint.step <= chosen->step)) continue;
    print_warning(fmt::format("{} is passed over: {}", checkpoint.path, checkpoint.why_not));
  }
  if (chosen) return *chosen;
  if (later.size() > 8) later.resize(8), later.push_back("...");
  throw Error(
      fmt::format("{}: there is no whole checkpoint of step {} or before.", directory, first_step),
      later.empty()
          ? "No checkpoint in it is whole. For a layout that is not known: --checkpoint-pattern 'ckpt_{step}.pt'."
          : fmt::format("Those that are there are of {} steps: replay from one of these on.", in_words(later)));
}

void keep_users_checkpoints(const std::string& pattern, const std::vector<std::string>& only_read,
                            const std::string& own, std::vector<std::string>* command) {
  const auto is_users = [&](const std::string& path, const std::string& option) {
    const auto is_it = [&](const std::string& folder) { return is_same_folder(path, folder); };
    const bool ours = path == own || path.starts_with(own + "/");
    if (path.empty() || ours || !is_saving_option(option) || std::any_of(only_read.begin(), only_read.end(), is_it))
      return false;
    return holds_checkpoints(path, pattern);
  };
  for (const std::string& folder : redirect(is_users, own, command)) {
    print_note(
        fmt::format("{} holds checkpoints: the job gets {} in its place, so that it saves nothing there (if it reads "
                    "from it: --only-read {})",
                    folder, own, folder));
  }
}

std::vector<std::string> parse_only_read(const std::string& text) {
  std::vector<std::string> folders;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    folders.push_back(fs::absolute(text.substr(begin, end - begin)).lexically_normal().string());
    if (!fs::is_directory(folders.back()))
      throw UsageError(fmt::format("--only-read: {}: there is no such folder.", text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return folders;
}

Replay replay_window(const ReplayRequest& wanted) {
  Replay replay;
  replay.checkpoint = choose_checkpoint(wanted.checkpoint_directory, wanted.checkpoint_pattern,
                                        std::min(wanted.first_step, wanted.start_at_most));
  JobRequest& job = replay.request;
  job.recording = wanted.recording;
  job.environment = wanted.environment;
  job.patience = wanted.patience;
  job.show_output = wanted.show_output;
  make_parent(job.recording.run_directory);
  const CheckpointView view(replay.checkpoint, job.recording.run_directory + ".checkpoint");
  job.recording.command = command_for(wanted, replay.checkpoint, values_of(wanted, replay.checkpoint, view));
  if (wanted.keep_users_checkpoints)
    keep_users_checkpoints(wanted.checkpoint_pattern, wanted.only_read, view.directory(), &job.recording.command);
  job.recording.steps = StepRange{wanted.first_step, wanted.last_step};
  job.recording.first_step = replay.checkpoint.step;
  job.recording.notes.push_back(fmt::format("replayed from {} ({} steps done)",
                                            fs::absolute(replay.checkpoint.path).string(), replay.checkpoint.step));
  job.stop_after = wanted.last_step;
  job.begins_with = replay.checkpoint.step;
  print_note(fmt::format("steps {} to {} from {} ({}, step {}): {}", wanted.first_step, wanted.last_step,
                         replay.checkpoint.path, replay.checkpoint.kind, replay.checkpoint.step,
                         shell_words(job.recording.command)));
  const CheckpointReads reads({view.checkpoint(), replay.checkpoint.path});
  replay.job = run_job(job);
  report_job(job, replay.job);
  const bool unopened = reads.opened() == Opened::no;
  if (unopened && replay.job.recorded.ranks > 0 && ran_here(job.recording.run_directory)) {
    replay.opened_checkpoint = false;
    note_unopened(job.recording.run_directory, replay.checkpoint);
  }
  for (const std::string& path : view.changed()) {
    print_warning(
        fmt::format("{} was changed while the job ran: by the job through a link, or by somebody else.", path));
  }
  return replay;
}

Verdict compare_window(const std::string& against, const ReplayRequest& request, const Replay& replay) {
  const Run a = Run::open(against), b = Run::open(replay.request.recording.run_directory);
  if (a.world_size() != b.world_size()) {
    print_warning(fmt::format("{} has {} ranks, the replay {}.", against, a.world_size(), b.world_size()));
  }
  DiffOptions options;
  options.first_step = request.first_step;
  options.last_step = request.last_step;
  options.ranks = request.recording.ranks;
  // Where the window begins later than the job does, what was loaded is the state of an earlier step than the one
  // before it.
  options.loads = replay.checkpoint.step == request.first_step;
  Progress progress(fmt::format("comparing {} and the replay:", printable(against)));
  options.progress = [&](uint64_t done, uint64_t total) { progress.update(done, total); };
  Verdict verdict = diff(a, b, options);
  progress.clear();
  const bool whole = replay.job.end == JobEnd::stopped || replay.job.end == JobEnd::by_itself;
  if (!whole && verdict.outcome == Outcome::identical) {
    verdict.outcome = Outcome::incomparable;
    verdict.cause = Cause{};
    verdict.reason = replay.job.trouble.empty() ? "the replay was interrupted" : replay.job.trouble;
  }
  return verdict;
}

void compare_commands(const Manifest& against, const ReplayRequest& request) {
  const std::vector<std::string>& now = request.recording.command;
  std::multiset<std::string> known(now.begin(), now.end());
  std::vector<std::string> missing;
  for (const std::string& word : against.command) {
    const auto found = known.find(word);
    if (found == known.end())
      missing.push_back(word);
    else
      known.erase(found);
  }
  if (against.names_masked || is_attached(against) || missing.empty()) return;
  print_note(fmt::format("--against was recorded with more in its command: {}", shell_words(missing)));
}

}  // namespace forkpoint
