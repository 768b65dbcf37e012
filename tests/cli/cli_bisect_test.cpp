// forkpoint bisect on minigpt (4 ranks), with faults whose place is known: what it says, and by how many windows.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "lib/run.h"
#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Words = std::vector<std::string>;
using Json = nlohmann::json;

constexpr char kSpike[] = "bitflip@step=41,rank=2,layer=1,target=grad";

std::string line_of(const Words& command) {
  std::string line;
  for (const std::string& word : command) line += (line.empty() ? "" : " ") + word;
  return line;
}

// 64 steps with a checkpoint after every 8, and the same with a spike at step 41 and checkpoints of its own; made once.
struct Trained {
  TemporaryFolder folder;
  std::string good = folder / "good", bad = folder / "bad", good_saved = folder / "good-ckpts",
              bad_saved = folder / "bad-ckpts";

  Trained() {
    record(good, {"--checkpoint-dir", good_saved, "--checkpoint-every", "8"});
    record(bad, {"--checkpoint-dir", bad_saved, "--checkpoint-every", "8", "--fault", kSpike});
  }
  static void record(const std::string& path, const Words& more, const Words& options = {}) {
    const Words command =
        words(words(words({"record", "-o", path}, options), {"--"}), words(words(kMinigpt, {"--steps", "64"}), more));
    const ProgramResult result = run_forkpoint(command);
    INFO(result.err);
    REQUIRE(result.status == 0);
  }
};
const Trained& trained() {
  static const Trained made;
  return made;
}

ProgramResult bisect(const TemporaryFolder& folder, const Words& options) {
  return run_forkpoint(words({"bisect", "--json", "-o", folder / "bisect"}, options));
}

// good against bad with `fault`; no checkpoints.
ProgramResult bisect_fault(const TemporaryFolder& folder, const std::string& fault, const Words& options = {}) {
  const std::string good = line_of(kMinigpt) + " --steps 8";
  return bisect(folder, words({"--good", good, "--bad", good + " --fault " + fault, "--steps", "0:7"}, options));
}

void check_first(const ProgramResult& result, int64_t step, const Json& rank, const char* phase, const Json& layer,
                 const char* tensor) {
  INFO(result.err << result.out);
  REQUIRE(result.status == 1);
  const Json first = parsed(result).at("first");
  CHECK(first.at("step") == step);
  CHECK(first.at("rank") == rank);
  CHECK(first.at("phase") == phase);
  CHECK(first.at("layer") == layer);
  CHECK(first.at("tensor") == tensor);
}

void check_spike(const ProgramResult& result, int64_t most_windows) {
  check_first(result, 41, 2, "backward", "blocks.1.mlp.fc1", "weight.grad");
  const Json done = parsed(result).at("bisect");
  CHECK(done.at("windows").get<int64_t>() <= most_windows);
  std::string operands;
  for (const Json& line : done.at("operands")) operands += line.get<std::string>() + "\n";
  CAPTURE(operands);
  CHECK(operands.find("rank 2, backward, blocks.1.mlp.fc1: weight.grad: 1 of 1,024 elements differ") !=
        std::string::npos);
  REQUIRE(done.at("kept").size() == 2);
  for (const Json& folder : done.at("kept")) CHECK(!fs::is_empty(folder.get<std::string>()));
}

// The steps that each rank of a run holds.
std::vector<int64_t> steps_in(const std::string& run_directory) {
  std::vector<int64_t> steps;
  const Run run = Run::open(run_directory);
  for (const StepSummary& step : run.streams().front()->steps()) {
    if (step.step >= 0) steps.push_back(step.step);
  }
  return steps;
}

std::vector<std::string> windows_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE(
    "two recorded runs: their comparison tells the step, and four windows from the checkpoint before it tell the op") {
  const TemporaryFolder folder;
  const ProgramResult result = bisect(folder, {"--checkpoint", trained().good_saved, trained().good, trained().bad});
  check_spike(result, 4);
  CHECK(parsed(result).at("bisect").at("steps_replayed") == 8);  // 40 and 41, of both arms, twice
  CHECK(result.err.find("about") != std::string::npos);          // how long it will take, before the first window
}

TEST_CASE("commands that name their own checkpoints as recorded do not write them again") {
  const TemporaryFolder folder;
  const auto recorded = [&](const std::string& name, const Words& more) {
    Trained::record(
        folder / name,
        words({"--steps", "8", "--checkpoint-every", "2", "--checkpoint-dir", folder / (name + "-ckpts")}, more));
  };
  recorded("good", {});
  recorded("bad", {"--fault", "bitflip@step=5,rank=2,layer=1,target=grad"});
  const auto good = tree_of(folder / "good-ckpts"), bad = tree_of(folder / "bad-ckpts");
  const ProgramResult result = bisect(folder, {folder / "good", folder / "bad"});
  check_first(result, 5, 2, "backward", "blocks.1.mlp.fc1", "weight.grad");
  CHECK(tree_of(folder / "good-ckpts") == good);
  CHECK(tree_of(folder / "bad-ckpts") == bad);
}

TEST_CASE(
    "two commands and the good one's checkpoints: halves in windows of one step, and no more of them than 2 log2(64) + "
    "6") {
  const TemporaryFolder folder;
  const auto before = tree_of(trained().good_saved);
  const std::string good = line_of(kMinigpt);
  const ProgramResult result = bisect(folder, {"--good", good, "--bad", good + " --fault " + kSpike, "--checkpoint",
                                               trained().good_saved, "--steps", "0:63"});
  check_spike(result, 2 * 6 + 6);
  size_t of_one_step = 0;
  for (const std::string& name : windows_in(folder / "bisect")) {
    if (!name.starts_with("step-")) continue;
    ++of_one_step;
    CHECK(steps_in(folder / ("bisect/" + name)).size() == 1);
  }
  CHECK(of_one_step >= 8);
  // Layer level and finer begin at the checkpoint before, not at the start.
  CHECK(result.err.find("which layer: both arms from the checkpoint of 40 steps") != std::string::npos);
  CHECK(tree_of(trained().good_saved) == before);
}

TEST_CASE(
    "checkpoints that differ already at the first step that both have are a fork that was seen: equal replays do not "
    "undo it") {
  const TemporaryFolder folder;
  const std::string good = line_of(kMinigpt);
  for (const auto& [name, fault] :
       {std::pair("good", std::string()),
        std::pair("bad", std::string(" --fault bitflip@step=1,rank=1,layer=0,target=grad"))}) {
    const std::string saving = good + fault + " --steps 8 --checkpoint-every 4 --checkpoint-dir " + (folder / name);
    REQUIRE(std::system((saving + " >/dev/null").c_str()) == 0);
  }
  const ProgramResult result =
      bisect(folder, {"--good", good, "--bad", good, "--checkpoint", folder / "good", "--bad-checkpoint",
                      folder / "bad", "--steps", "0:7", "--level", "step", "--tries", "2"});
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  CHECK(parsed(result).at("verdict") == "incomparable");
  CHECK(parsed(result).at("reason") == "did not fork in 2 replays of steps 0 to 3");
  CHECK(parsed(result).at("notes").dump().find("the two arms' checkpoints of 4 steps are not the same") !=
        std::string::npos);
}

TEST_CASE("recorded runs that their commands do not give again are told so") {
  const TemporaryFolder folder;
  const ProgramResult result =
      bisect(folder, {"--checkpoint", trained().good_saved, "--good", line_of(kMinigpt), "--bad",
                      line_of(kMinigpt) + " --fault bitflip@step=41,rank=0,layer=0,target=grad", trained().good,
                      trained().bad});
  INFO(result.err << result.out);
  CHECK(parsed(result).at("verdict") == "diverged");
  const std::string notes = parsed(result).at("notes").dump();
  CHECK(notes.find("its command, run again, is not " + trained().bad) != std::string::npos);
  CHECK(notes.find("its command, run again, is not " + trained().good) == std::string::npos);
}

TEST_CASE("what a command does before the checkpoint that both arms begin at was not looked at, and that is said") {
  const TemporaryFolder folder;
  const std::string good = line_of(kMinigpt);
  const ProgramResult result = bisect(folder, {"--good", good, "--bad", good + " --fault lr@step=2", "--checkpoint",
                                               trained().good_saved, "--steps", "40:43", "--level", "step"});
  INFO(result.err << result.out);
  CHECK(parsed(result).at("verdict") == "identical");
  CHECK(parsed(result).at("notes").dump().find(
            "both arms begin at the good arm's checkpoint of 40 steps: what the bad one does before it") !=
        std::string::npos);
}

TEST_CASE("checkpoints of both arms tell without a window between which two of them the fork lies") {
  const TemporaryFolder folder;
  const std::string good = line_of(kMinigpt);
  const ProgramResult result =
      bisect(folder, {"--good", good, "--bad", good + " --fault " + kSpike, "--checkpoint", trained().good_saved,
                      "--bad-checkpoint", trained().bad_saved, "--steps", "0:63"});
  check_spike(result, 2 * 2 + 4);
  for (const Json& stage : parsed(result).at("bisect").at("stages")) {
    if (stage.at("name") == "checkpoints") CHECK(stage.at("found") == "the same at 40 steps, other ones at 48");
  }
  CHECK(result.err.find("checkpoints: the same at 40 steps") != std::string::npos);
}

TEST_CASE("runs that hold every fifth step only leave the steps between them open, and windows close them") {
  const TemporaryFolder folder;
  Trained::record(folder / "good", {}, {"--every", "5"});
  Trained::record(folder / "bad", {"--fault", kSpike}, {"--every", "5"});
  const ProgramResult result = bisect(folder, {"--checkpoint", trained().good_saved, folder / "good", folder / "bad"});
  check_spike(result, 10);
  // The runs part at step 45; what was searched begins behind step 40, which both hold.
  CHECK(parsed(result).at("bisect").at("stages").at(0).at("found").get<std::string>().find("step 45") !=
        std::string::npos);
}

TEST_CASE("each planted fault comes out at its place") {
  struct Planted {
    const char* fault;
    Json rank;
    const char* phase;
    Json layer;
    const char* tensor;
  };
  const Json none;
  for (const Planted& planted : std::initializer_list<Planted>{
           {"bitflip@step=5,rank=1,layer=1,target=weight", 1, "forward", "blocks.1.mlp.fc1", "weight"},
           {"bitflip@step=5,rank=1,layer=1,target=activation", 1, "forward", "blocks.1.mlp.fc1", "output"},
           {"bitflip@step=5,rank=3,layer=0,target=grad", 3, "backward", "blocks.0.mlp.fc1", "weight.grad"},
           {"nan@step=5,rank=0,layer=1", 0, "forward", "blocks.1.mlp.fc1", "output"},
           {"reorder@step=5,rank=2,layer=0", 2, "forward", "blocks.0.mlp.fc1", "output"},
           {"reorder@step=5,layer=1", none, "collective", "blocks.1.mlp.fc1", "weight.grad"},
           {"skip-allreduce@step=5,rank=2,layer=1", 2, "collective", "blocks.1.mlp.fc1", "weight.grad"},
           {"data@step=5,rank=1", 1, "data", none, "tokens"},
           {"dropout-seed@step=5,rank=3", 3, "state", none, "dropout.rng"},
           {"lr@step=5", none, "optimizer", none, "lr"}}) {
    CAPTURE(planted.fault);
    const TemporaryFolder folder;
    check_first(bisect_fault(folder, planted.fault), 5, planted.rank, planted.phase, planted.layer, planted.tensor);
  }
}

TEST_CASE("state that a resume loses is named in what is loaded, before any step") {
  const TemporaryFolder folder;
  const std::string good = line_of(kMinigpt);
  const ProgramResult result = bisect(folder, {"--good", good, "--bad", good + " --fault lost-momentum@layer=1,rank=1",
                                               "--checkpoint", trained().good_saved, "--steps", "8:15"});
  INFO(result.err << result.out);
  REQUIRE(result.status == 1);
  const Json first = parsed(result).at("first");
  CHECK(first.at("tensor").get<std::string>().find("exp_avg") != std::string::npos);
  CHECK(first.at("layer").get<std::string>().starts_with("blocks.1."));
  CHECK(first.at("rank") == 1);
}

TEST_CASE("a command against itself is identical, and every step was looked at") {
  for (const bool saved : {false, true}) {
    const TemporaryFolder folder;
    const std::string good = line_of(kMinigpt) + " --steps 16";
    Words options = {"--good", good, "--bad", good, "--steps", "0:9"};
    if (saved) options = words(options, {"--checkpoint", trained().good_saved});
    const ProgramResult result = bisect(folder, options);
    INFO(result.err << result.out);
    CHECK(result.status == 0);
    CHECK(parsed(result).at("verdict") == "identical");
    CHECK(parsed(result).at("coverage").at("steps_compared") == 10);
    CHECK(steps_in(folder / "bisect/all-1-bad").size() == 10);
  }
}

TEST_CASE(
    "a fault that came once and never again is said to be that, with the place where it was seen, and is not "
    "identical") {
  const TemporaryFolder folder;
  const std::string good = line_of(kMinigpt) + " --steps 8";
  std::ofstream(folder / "once.sh") << "#!/bin/sh\nif mkdir " << (folder / "coin") << " 2>/dev/null; then\n  exec "
                                    << good << " --fault bitflip@step=5,rank=2,layer=1,target=grad\nfi\nexec " << good
                                    << "\n";
  const ProgramResult result =
      bisect(folder, {"--good", good, "--bad", "sh " + (folder / "once.sh"), "--steps", "0:7"});
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  const Json verdict = parsed(result);
  CHECK(verdict.at("verdict") == "incomparable");
  CHECK(verdict.at("reason").get<std::string>().starts_with("did not fork in 3 replays of steps 4 to 5"));
  CHECK(verdict.at("bisect").at("seen").at("step") == 5);
  CHECK(verdict.at("bisect").at("windows") == 8);
}

TEST_CASE("of recorded runs that did not fork again, it is said which of them came out again") {
  const TemporaryFolder folder;
  const std::string good = line_of(kMinigpt);
  const ProgramResult result =
      bisect(folder, {"--checkpoint", trained().good_saved, "--bad", good, trained().good, trained().bad});
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  CHECK(parsed(result).at("reason").get<std::string>().starts_with("did not fork in 3 replays"));
  const std::string notes = parsed(result).at("notes").dump();
  CHECK(notes.find("step 41 of " + trained().good + " came out again, bit by bit") != std::string::npos);
  CHECK(notes.find("step 41 of " + trained().bad + " came out otherwise") != std::string::npos);
}

TEST_CASE("the script decides on a window of one step of the bad arm, and 125 passes a step over") {
  const TemporaryFolder folder;
  std::ofstream(folder / "judge.sh") << "echo asked of $2; test -s $1/run.json || exit 130\n"
                                        "[ $2 -eq 3 ] && exit 125\n[ $2 -lt 5 ]\n";
  const std::string script = "sh " + (folder / "judge.sh") + " {run} {step}";
  const ProgramResult result = bisect_fault(folder, "bitflip@step=5,rank=2,layer=1,target=grad", {"--script", script});
  check_first(result, 5, 2, "backward", "blocks.1.mlp.fc1", "weight.grad");
  CHECK(result.err.find("script: step 5 is the first bad one") != std::string::npos);
  CHECK(result.err.find("asked of 7") != std::string::npos);  // its output is no part of the answer
  CHECK(steps_in(folder / "bisect/script-7-bad") == std::vector<int64_t>{7});
}

TEST_CASE("a script that sees the fault late does not hide that the arms part before") {
  const TemporaryFolder folder;
  const ProgramResult result =
      bisect_fault(folder, "bitflip@step=2,rank=2,layer=1,target=grad", {"--script", "test {step} -lt 6"});
  check_first(result, 2, 2, "backward", "blocks.1.mlp.fc1", "weight.grad");
  CHECK(parsed(result).at("notes").dump().find("the script's first bad step is 6") != std::string::npos);
}

TEST_CASE("a script that stops, or finds nothing bad, is no verdict on the arms") {
  for (const char* status : {"126", "127", "130"}) {  // a program of the script's that is not found is no bad step
    const TemporaryFolder folder;
    const ProgramResult stopped =
        bisect_fault(folder, "lr@step=5", {"--script", std::string("sh -c 'exit ") + status + "'"});
    CHECK(stopped.status == 2);
    CHECK(stopped.out.empty());
    CHECK(stopped.err.find(std::string("status ") + status) != std::string::npos);
  }
  for (const auto& [script, reason] : {std::pair("true", "calls step 7 good"),
                                       std::pair("sh -c 'exit 125'", "cannot tell step 7 (exit status 125)")}) {
    const TemporaryFolder folder;
    const ProgramResult result = bisect_fault(folder, "lr@step=5", {"--script", script});
    CHECK(result.status == 2);
    CHECK(parsed(result).at("reason").get<std::string>().find(reason) != std::string::npos);
  }
}

}  // namespace forkpoint
