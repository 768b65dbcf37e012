// record --watch on minigpt with four ranks and planted faults: what is said, when, and what is done.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "lib/hash_stream_file.h"
#include "lib/run.h"
#include "tests/cli/program.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Steps of a few milliseconds.
const std::vector<std::string> kSmall{"--device", "cpu",     "--seed", "3",     "--layers", "1",       "--dim",
                                      "16",       "--heads", "1",      "--seq", "8",        "--batch", "2"};
constexpr char kSmallWords[] =
    " --device cpu --seed 3 --layers 1 --dim 16 --heads 1 --seq 8 --batch 2 --ranks 2 --steps 100000 ";

struct Trained {
  ProgramResult result;
  std::string directory;
  Manifest manifest() const { return read_manifest(directory); }
};

// minigpt with four ranks; fault: of its --fault, or empty.
Trained train(const TemporaryFolder& folder, const std::string& name, std::vector<std::string> options, int steps,
              const std::string& fault, const std::vector<std::string>& more = {}) {
  options.insert(options.begin(), {"record", "-o", name});
  options.insert(options.end(), {"--", MINIGPT, "--ranks", "4", "--steps", std::to_string(steps)});
  options.insert(options.end(), kSmall.begin(), kSmall.end());
  if (!fault.empty()) options.insert(options.end(), {"--fault", fault});
  options.insert(options.end(), more.begin(), more.end());
  return {run_forkpoint(options, {.directory = folder.path()}), folder / name};
}

// Steps of a rank that hold a layer's own inputs and outputs.
std::vector<int64_t> steps_by_layer(const std::string& directory, int rank) {
  const Run run = Run::open(directory);
  const HashStreamReader& stream = *run.stream_of(rank);
  std::vector<int64_t> steps;
  StepColumns columns;
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    stream.read_step(i, &columns);
    for (const uint32_t site : columns.site) {
      const Site& at = stream.sites()[site];
      if (at.kind == Kind::collective || at.role != Role::output) continue;
      steps.push_back(stream.steps()[i].step);
      break;
    }
  }
  return steps;
}

// That all ranks have ended; -1: it is another on another rank, or not whole, or something was lost.
int64_t last_step(const std::string& directory) {
  const Run run = Run::open(directory);
  int64_t last = -1;
  for (const auto& stream : run.streams()) {
    const StepSummary& step = stream->steps().back();
    if (!step.complete || !stream->gaps().empty() || (last >= 0 && step.step != last)) return -1;
    last = step.step;
  }
  return last;
}

// What a stopped job leaves: nobody that runs, and no board.
bool is_left_clean(const std::string& directory) {
  const Run run = Run::open(directory);
  const bool alive = std::any_of(run.streams().begin(), run.streams().end(),
                                 [](const auto& stream) { return process_is_alive(stream->header()).value(); });
  const bool boards = std::any_of(fs::directory_iterator(directory), fs::directory_iterator(), [](const auto& entry) {
    const std::string name = entry.path().filename().string();
    return name.starts_with("stop-") || name.starts_with("watch-");
  });
  return !alive && !boards;
}

}  // namespace

TEST_CASE("a NaN is said while the job runs, once, with step, rank and place; the job goes on") {
  const TemporaryFolder folder;
  const Trained run = train(folder, "run", {"--watch", "nan"}, 30, "nan@step=7,rank=2");
  CAPTURE(run.result.err);
  CHECK(run.result.status == 0);
  CHECK(count_of(run.result.err, "warning: ") == 1);
  CHECK(contains(run.result.err, "warning: step 7, rank 2, "));
  CHECK(contains(run.result.err, "not finite after that: "));
  CHECK(run.manifest().state == RunState::whole);
  CHECK(last_step(run.directory) == 29);
  REQUIRE_FALSE(run.manifest().notes.empty());
  CHECK(run.manifest().notes[0].starts_with("watch: step 7, rank 2, "));
}

TEST_CASE("a job in order gives the watch nothing to say") {
  const TemporaryFolder folder;
  const Trained run = train(folder, "run", {"--watch", "nan,replicas", "--on-trigger", "stop"}, 200, "");
  CAPTURE(run.result.err);
  CHECK(run.result.status == 0);
  CHECK_FALSE(contains(run.result.err, "warning"));
  CHECK_FALSE(contains(run.result.err, "watch"));
  CHECK(run.manifest().notes.empty());
  CHECK_FALSE(fs::exists(run.directory + "/watch-control"));
}

TEST_CASE("the rank that left out its part of a reduction is named") {
  const TemporaryFolder folder;
  const Trained run = train(folder, "run", {"--watch", "replicas"}, 30, "skip-allreduce@step=7,rank=2");
  CAPTURE(run.result.err);
  CHECK(run.result.status == 0);
  CHECK(contains(run.result.err, "warning: step 7, rank 2, "));
  CHECK(contains(run.result.err, "not what ranks 0, 1, 3 hold"));
  CHECK(count_of(run.result.err, "warning: step") == 1);
}

TEST_CASE(
    "stop ends the job behind one step on all ranks, keeps the run whole, and the exit status and the manifest say "
    "why") {
  const TemporaryFolder folder;
  const Trained run = train(folder, "run", {"--watch", "nan", "--on-trigger", "stop"}, 100'000, "nan@step=7,rank=2");
  CAPTURE(run.result.err);
  CHECK(run.result.status == 124);
  CHECK(contains(run.result.err, "warning: step 7, rank 2, "));
  CHECK(contains(run.result.err, "the command is stopped: SIGTERM to"));
  const Manifest manifest = run.manifest();
  CHECK(manifest.end_reason.starts_with("stopped by the watch (step 7, rank 2, "));
  CHECK(manifest.state == RunState::whole);
  CHECK(last_step(run.directory) >= 7);
  CHECK(last_step(run.directory) < 2'000);
  CHECK(is_left_clean(run.directory));
}

TEST_CASE("stop finds ranks that have gone to another session") {
  const TemporaryFolder folder;
  std::ofstream(folder / "job.sh") << "setsid " << MINIGPT << kSmallWords << "--fault nan@step=7,rank=1 &\nwait\n";
  const ProgramResult result =
      run_forkpoint({"record", "-o", "run", "--watch", "nan", "--on-trigger", "stop", "--", "sh", "job.sh"},
                    {.directory = folder.path()});
  CAPTURE(result.err);
  CHECK(result.status == 124);
  CHECK(last_step(folder / "run") >= 7);
  CHECK(is_left_clean(folder / "run"));
}

TEST_CASE("stop also ends a command that ignores SIGTERM") {
  const TemporaryFolder folder;
  std::ofstream(folder / "job.sh") << "trap '' TERM\n"
                                   << MINIGPT << kSmallWords << "--fault nan@step=7,rank=1\n"
                                   << "while :; do sleep 0.2; done\n";
  const ProgramResult result =
      run_forkpoint({"record", "-o", "run", "--watch", "nan", "--on-trigger", "stop", "--", "sh", "job.sh"},
                    {.directory = folder.path()});
  CAPTURE(result.err);
  CHECK(result.status == 124);
  CHECK(contains(result.err, "SIGKILL to"));
  CHECK(Run::open(folder / "run").state() == RunState::whole);
  CHECK(is_left_clean(folder / "run"));
}

TEST_CASE("deepen records the steps after a finding by layer, on every rank the same, and only those") {
  const TemporaryFolder folder;
  const Trained run = train(folder, "run", {"--watch", "replicas", "--on-trigger", "deepen", "--deepen-steps", "3"},
                            2000, "skip-allreduce@step=7,rank=2");
  CAPTURE(run.result.err);
  CHECK(run.result.status == 0);
  std::smatch said;
  REQUIRE(std::regex_search(run.result.err, said, std::regex("steps (\\d+) to (\\d+) are recorded by layer")));
  const int64_t first = std::stoll(said[1]);
  CHECK(first > 7);
  CHECK(std::stoll(said[2]) == first + 2);
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(steps_by_layer(run.directory, rank) == std::vector<int64_t>{first, first + 1, first + 2});
  }
  CHECK(run.manifest().state == RunState::whole);

  // The level of some steps is no difference.
  const Trained same = train(folder, "same", {}, 2000, "skip-allreduce@step=7,rank=2");
  const ProgramResult diff = run_forkpoint({"diff", run.directory, same.directory, "--json"});
  const nlohmann::json verdict = nlohmann::json::parse(diff.out);
  CHECK(verdict["verdict"] == "identical");
  CHECK(contains(verdict["coverage"]["limits"].dump(), "recorded by layer as well"));
}

TEST_CASE("an exit status of the command's own is passed on where nothing is found") {
  const TemporaryFolder folder;
  for (const std::string action : {"warn", "stop", "deepen"}) {
    const ProgramResult result =
        run_forkpoint({"record", "-o", action, "--watch", "nan", "--on-trigger", action, "--", "sh", "-c", "exit 7"},
                      {.directory = folder.path()});
    CHECK(result.status == 7);
  }
}

TEST_CASE("options that would be ignored, or could not work, are refused before anything runs") {
  const TemporaryFolder folder;
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"--on-trigger", "stop"}, "--on-trigger needs --watch"},
      {{"--deepen-steps", "3"}, "--deepen-steps needs --watch"},
      {{"--watch", "nan", "--deepen-steps", "3"}, "--deepen-steps needs --on-trigger deepen"},
      {{"--watch", "nans"}, "is not nan, replicas or both"},
      {{"--watch", ""}, "is not nan, replicas or both"},
      {{"--watch", "nan", "--on-trigger", "halt"}, "none of warn, stop and deepen"},
      {{"--watch", "replicas", "--ranks", "2"}, "--ranks names one"},
      {{"--watch", "nan", "--mask-names"}, "--mask-names hides"},
      {{"--watch", "nan", "--on-trigger", "deepen", "--level", "layer"}, "the level is layer"},
      {{"--watch", "nan", "--on-trigger", "deepen", "--deepen-steps", "0"}, "at least 1"}};
  for (const auto& [options, words] : cases) {
    std::vector<std::string> line{"record", "-o", "run"};
    line.insert(line.end(), options.begin(), options.end());
    line.insert(line.end(), {"--", "touch", "ran"});
    const ProgramResult result = run_forkpoint(line, {.directory = folder.path()});
    CAPTURE(words);
    CAPTURE(result.err);
    CHECK(result.status == 125);
    CHECK(contains(result.err, words));
    CHECK_FALSE(fs::exists(folder / "ran"));
    CHECK_FALSE(fs::exists(folder / "run"));
  }
}

}  // namespace forkpoint
