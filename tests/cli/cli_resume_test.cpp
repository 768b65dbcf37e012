// forkpoint resume on minigpt: a clean resume, and resumes that lose momentum, generator and sampler.
#include <doctest/doctest.h>

#include "lib/run.h"
#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace {

using Words = std::vector<std::string>;

ProgramResult resume(const TemporaryFolder& folder, const Words& options, const Words& command = kMinigpt) {
  return run_forkpoint(words(words({"resume", "--checkpoint-at", "4", "--steps", "8", "-o", folder / "runs"}, options), words({"--"}, command)));
}

ProgramResult resume_with_fault(const TemporaryFolder& folder, const std::string& fault, const Words& more = {}) {
  return resume(folder, words({"--resume-args", "--resume --checkpoint-dir {checkpoint_dir} --fault " + fault}, more));
}

void check_state(const ProgramResult& result, const std::string& state, const std::string& cls) {
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  const auto verdict = parsed(result);
  REQUIRE(verdict.is_object());
  CHECK(verdict.at("cause").at("class") == cls);
  REQUIRE(verdict.at("resume").at("state").size() == 1);
  CHECK(verdict.at("resume").at("state")[0].get<std::string>().starts_with(state));
}

}  // namespace

TEST_CASE("a clean resume is the same training: three runs, a stop that is one") {
  const TemporaryFolder folder;
  const ProgramResult result = resume(folder, {});
  INFO(result.err << result.out);
  CHECK(result.status == 0);
  CHECK(result.out.starts_with("identical"));
  CHECK(result.err.find("16 steps in") != std::string::npos);
  const Run stopped = Run::open(folder / "runs/stopped"), resumed = Run::open(folder / "runs/resumed");
  CHECK(stopped.state() == RunState::whole);
  CHECK(stopped.streams()[0]->steps().back().step == 3);
  CHECK(resumed.streams()[0]->steps().back().step == 7);
  CHECK(stopped.streams()[0]->header().pid != resumed.streams()[0]->header().pid);
  CHECK(processes_with("FORKPOINT_RUN=" + (folder / "runs")).empty());
}

TEST_CASE("lost momentum is named, with the layer that lost it") {
  const TemporaryFolder folder;
  const ProgramResult result = resume_with_fault(folder, "lost-momentum@layer=1");
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(result.out.find("not as it was after the resume: momentum (weight.exp_avg of blocks.1.mlp.fc1)") != std::string::npos);
  CHECK(result.out.find("state_restore") != std::string::npos);
}

TEST_CASE("a generator that is not restored is named") {
  const TemporaryFolder folder;
  check_state(resume_with_fault(folder, "dropout-seed@step=4,rank=1", {"--json"}), "random-number generator", "state_restore");
}

TEST_CASE("a sampler that begins anew is named") {
  const TemporaryFolder folder;
  check_state(resume_with_fault(folder, "lost-sampler", {"--json"}), "position in the data", "state_restore");
}

TEST_CASE("a fault behind the resume is diverged, and no state of the checkpoint is blamed") {
  const TemporaryFolder folder;
  const ProgramResult result = resume_with_fault(folder, "bitflip@step=6,rank=0,layer=0,target=grad", {"--json"});
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(parsed(result).at("first").at("step") == 6);
  CHECK(parsed(result).at("resume").at("state").empty());
}

TEST_CASE("a command that does not repeat itself even before the stop is no case for a verdict on its resume") {
  const TemporaryFolder folder;
  // Two different seeds, by who runs it.
  const std::string line = "case $FORKPOINT_RUN in *straight) seed=5;; *) seed=6;; esac; exec " MINIGPT
                           " --ranks 2 --layers 1 --dim 16 --heads 2 --seq 16 --batch 2 --seed $seed --checkpoint-dir {checkpoint_dir} "
                           "--checkpoint-every 4 $(case $FORKPOINT_RUN in *resumed) echo --resume;; esac) # {checkpoint}";
  const ProgramResult result = resume(folder, {}, {"sh", "-c", line});
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  CHECK(result.out.starts_with("incomparable: the command does not repeat itself before the stop: diverged"));
  CHECK(result.out.find("state_restore") == std::string::npos);
}

TEST_CASE("a command that saves no checkpoint is said to, and one that cannot be told is refused") {
  const TemporaryFolder folder;
  const ProgramResult never = resume(folder, {"--timeout", "2"}, words(kMinigpt, {"--steps", "{step}0"}));
  INFO(never.err);
  CHECK(never.status == 2);
  const TemporaryFolder other;
  const ProgramResult refused = resume(other, {}, {TINY_TRAINER, "20"});
  CHECK(refused.status == 2);
  CHECK(refused.err.find("--save-args") != std::string::npos);
}

}  // namespace forkpoint
