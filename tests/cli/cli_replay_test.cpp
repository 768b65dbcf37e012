// forkpoint replay on minigpt (4 ranks) and on jobs that do not want to end.
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

// A recorded training of 14 steps with a checkpoint after every 4, made once.
struct Original {
  TemporaryFolder folder;
  std::string checkpoints = folder / "ckpts", run = folder / "run", faulty = folder / "faulty";

  Original() {
    record(run, {"--checkpoint-dir", checkpoints, "--checkpoint-every", "4"});
    record(faulty, {"--fault", "bitflip@step=10,rank=2,layer=1,target=grad"});
  }
  static void record(const std::string& path, const Words& more) {
    const Words command = words(words({"record", "-o", path, "--level", "layer", "--"}, kMinigpt), words({"--steps", "14"}, more));
    const ProgramResult result = run_forkpoint(command);
    INFO(result.err);
    REQUIRE(result.status == 0);
  }
};
const Original& original() {
  static const Original made;
  return made;
}

ProgramResult replay(const Words& options, const Words& command) {
  return run_forkpoint(words(words({"replay"}, options), words({"--"}, command)));
}

Words window(const TemporaryFolder& folder, const std::string& steps, const Words& more = {}) {
  return words({"--checkpoint", original().checkpoints, "--steps", steps, "-o", folder / "replay"}, more);
}

void check_nothing_left(const TemporaryFolder& folder) {
  const auto left = processes_with("FORKPOINT_RUN=" + (folder / "replay"));
  CAPTURE(left);
  CHECK(left.empty());
  CHECK_FALSE(fs::exists(folder / "replay.checkpoint"));
  for (const auto& entry : fs::directory_iterator(folder / "replay")) {
    CHECK_MESSAGE(!entry.path().filename().string().starts_with("stop-"), entry.path());
  }
}

}  // namespace

TEST_CASE(
    "a window that was recorded of a run from the start is replayed from a checkpoint right at it, and before it") {
  for (const char* steps : {"8:10", "9:10"}) {
    const TemporaryFolder folder;
    const Words command =
        words(words({"record", "-o", folder / "window", "--steps", steps, "--"}, kMinigpt), {"--steps", "14"});
    REQUIRE(run_forkpoint(command).status == 0);
    const ProgramResult result = replay(window(folder, steps, {"--against", folder / "window"}), kMinigpt);
    INFO(result.err << result.out);
    CHECK(result.status == 0);
    CHECK(result.out.starts_with("identical"));
    // Without --steps nothing says that what came before was the same.
    const ProgramResult whole = run_forkpoint({"diff", folder / "window", folder / "replay"});
    CHECK(whole.status == 2);
  }
}

TEST_CASE("a window between two checkpoints is replayed and is the same, with no step after it") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "9:11", {"--against", original().run}), kMinigpt);
  INFO(result.err << result.out);
  CHECK(result.status == 0);
  CHECK(result.out.starts_with("identical"));
  CHECK(result.err.find("step-000008 (minigpt, step 8)") != std::string::npos);
  CHECK(result.err.find("4 steps in") != std::string::npos);  // 8 to 11
  const Run run = Run::open(folder / "replay");
  CHECK(run.state() == RunState::whole);
  REQUIRE(run.streams().size() == 4);
  for (const auto& stream : run.streams()) {
    std::vector<int64_t> steps;
    for (const StepSummary& step : stream->steps()) {
      if (step.step >= 0) steps.push_back(step.step);
      if (step.step >= 0) CHECK(step.complete);
    }
    CHECK(steps == std::vector<int64_t>{9, 10, 11});
  }
  CHECK(run.manifest().end_reason == "stopped by forkpoint behind step 11");
  CHECK(run.manifest().exit_status == 0);
  check_nothing_left(folder);
  // The program's own lines: it did begin step 12 at most, and was not let further.
  CHECK(file_content(folder / "replay/job.log").find("step     13") == std::string::npos);
}

TEST_CASE("a window that begins at its checkpoint holds what was loaded against the run as well") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "8:9", {"--against", original().run, "--json"}), kMinigpt);
  INFO(result.err << result.out);
  CHECK(result.status == 0);
  CHECK(parsed(result).at("verdict") == "identical");
  CHECK(parsed(result).dump().find("loaded") != std::string::npos);
}

TEST_CASE("a fault that the recorded run had and the replay has not is named at its step, rank and layer") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "9:11", {"--against", original().faulty, "--json"}), kMinigpt);
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  const auto first = parsed(result).at("first");
  CHECK(first.at("step") == 10);
  CHECK(first.at("rank") == 2);
  CHECK(first.at("layer") == "blocks.1.mlp.fc1");
  CHECK(result.err.find("--against was recorded with more in its command: ") != std::string::npos);
  CHECK(result.err.find("bitflip@step=10") != std::string::npos);
}

TEST_CASE("the user's checkpoints are as they were, although the job saves new ones") {
  const TemporaryFolder folder;
  const auto before = tree_of(original().checkpoints);
  REQUIRE(before.size() > 10);
  // Its folder is named in the command, as a user would paste it.
  const Words command = words(kMinigpt, {"--checkpoint-dir", original().checkpoints, "--checkpoint-every", "1"});
  const ProgramResult result = replay(window(folder, "9:11", {"--against", original().run}), command);
  INFO(result.err);
  CHECK(result.status == 0);
  CHECK(file_content(folder / "replay/job.log").find("checkpoint of 10 steps") != std::string::npos);
  CHECK(tree_of(original().checkpoints) == before);
  CHECK(result.err.find("was changed") == std::string::npos);
}

TEST_CASE("a checkpoint that is still being written is passed over, and said") {
  const TemporaryFolder folder;
  fs::copy(original().checkpoints, folder / "ckpts", fs::copy_options::recursive);
  fs::remove(folder / "ckpts/step-000008/COMPLETE");
  const ProgramResult result =
      replay({"--checkpoint", folder / "ckpts", "--steps", "9:9", "-o", folder / "replay", "--against", original().run}, kMinigpt);
  INFO(result.err << result.out);
  CHECK(result.status == 0);
  CHECK(result.err.find("step-000008 is passed over") != std::string::npos);
  CHECK(result.err.find("(minigpt, step 4)") != std::string::npos);
}

TEST_CASE("without a checkpoint at or before the window nothing is started, and what is there is named") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "2:3"), kMinigpt);
  CHECK(result.status == 2);
  CHECK(result.err.find("no whole checkpoint of step 2 or before") != std::string::npos);
  CHECK(result.err.find("4, 8, 12, 14") != std::string::npos);
  CHECK_FALSE(fs::exists(folder / "replay"));
}

TEST_CASE("a job that ends before the window does is trouble, with the step that it came to, never identical") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "9:13", {"--against", original().run}), words(kMinigpt, {"--steps", "11"}));
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  CHECK(result.out.starts_with("incomparable"));
  CHECK(result.err.find("step 10") != std::string::npos);
  check_nothing_left(folder);
}

TEST_CASE("a job whose own end is the end of the window is whole") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "9:10", {"--against", original().run}), words(kMinigpt, {"--steps", "11"}));
  INFO(result.err << result.out);
  CHECK(result.status == 0);
}

TEST_CASE("a command that begins no step is given up after --timeout, one that cannot be started leaves no folder") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "9:10", {"--timeout", "1"}), {"sh", "-c", "sleep 60 # {checkpoint}"});
  CHECK(result.status == 2);
  CHECK(result.err.find("began no step for 1 s") != std::string::npos);
  check_nothing_left(folder);
  const ProgramResult missing =
      replay({"--checkpoint", original().checkpoints, "--steps", "9:10", "-o", folder / "none"}, {"no-such-program", "{step}"});
  CHECK(missing.status == 2);
  CHECK(missing.err.find("cannot run `no-such-program`") != std::string::npos);
  CHECK_FALSE(fs::exists(folder / "none"));
}

TEST_CASE("a job that begins with another step than the checkpoint's has not loaded it") {
  const TemporaryFolder folder;
  const ProgramResult result = replay(window(folder, "9:10", {"--against", original().run}), {TINY_TRAINER, "2000", "--ignored", "{step}"});
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  CHECK(result.err.find("began with step 0, not with step 8") != std::string::npos);
}

TEST_CASE("a job that opens no file of its checkpoint began anew, whatever its steps are called: nothing is compared") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "ckpts");
  std::ofstream(folder / "ckpts/ckpt_4.raw") << "data";
  REQUIRE(run_forkpoint({"record", "-o", folder / "run", "--", TINY_TRAINER, "8"}).status == 0);
  const auto from_4 = [&](const std::string& name, const Words& command) {
    return replay({"--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.raw", "--steps", "4:5",
                   "--against", folder / "run", "-o", folder / name},
                  command);
  };
  const ProgramResult anew = from_4("anew", {TINY_TRAINER, "8", "--begin-at", "{step}", "--different-at", "4"});
  INFO(anew.err << anew.out);
  CHECK(anew.status == 2);
  CHECK(anew.out.starts_with("incomparable"));
  CHECK(anew.out.find("its job opened no file of the checkpoint that it was given") != std::string::npos);
  CHECK(anew.err.find("Say where the command takes it") != std::string::npos);
  CHECK(run_forkpoint({"diff", folder / "run", folder / "anew"}).out.starts_with("incomparable"));
  const std::string line = "cat {checkpoint} && exec " TINY_TRAINER " 8 --begin-at {step}";
  const ProgramResult loaded = from_4("loaded", {"sh", "-c", line});
  INFO(loaded.err << loaded.out);
  CHECK(loaded.status == 0);
  CHECK(from_4("other", {"sh", "-c", line + " --different-at 4"}).status == 1);
  // To save over the copy is not to load it; to load the original, which the command may name itself, is.
  const std::string saving = "echo more > {checkpoint} && exec " TINY_TRAINER " 8 --begin-at {step}";
  CHECK(from_4("saving", {"sh", "-c", saving}).status == 2);
  const std::string original = "cat " + (folder / "ckpts/ckpt_4.raw") + " && exec " TINY_TRAINER " 8 --begin-at {step}";
  CHECK(from_4("original", {"sh", "-c", original}).status == 0);
}

TEST_CASE("another folder of checkpoints that the command names is not saved to, unless it is said to be read alone") {
  const TemporaryFolder folder;
  for (const char* name : {"ckpts", "other"}) {
    fs::create_directory(folder / name);
    std::ofstream(folder / name + "/ckpt_4.raw") << "data";
  }
  std::ofstream(folder / "job.sh") << "cat $1 > /dev/null; echo more > $3/ckpt_4.raw; exec " TINY_TRAINER
                                      " 8 --begin-at 4\n";
  const auto from_4 = [&](const std::string& name, const Words& more, const std::string& option = "--output_dir") {
    return replay(words({"--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.raw", "--steps", "4:5",
                         "-o", folder / name},
                        more),
                  {"sh", folder / "job.sh", "{checkpoint}", option, folder / "other"});
  };
  const ProgramResult kept = from_4("kept", {});
  INFO(kept.err);
  CHECK(kept.status == 0);
  CHECK(kept.err.find((folder / "other") + " holds checkpoints: the job gets") != std::string::npos);
  CHECK(file_content(folder / "other/ckpt_4.raw") == "data");
  for (const char* read : {"--teacher", "--ckpt", "--pretrained_checkpoint_dir"})
    CHECK(from_4(std::string("kept") + read, {}, read).err.find("holds checkpoints") == std::string::npos);
  CHECK(from_4("read", {"--only-read", folder / "other"}).status == 0);
  CHECK(file_content(folder / "other/ckpt_4.raw") == "more\n");
}

TEST_CASE("a command that is not told its checkpoint is refused before it is started") {
  const TemporaryFolder folder;
  const ProgramResult result =
      replay({"--checkpoint", original().checkpoints, "--steps", "9:10", "-o", folder / "replay"}, {"sh", "-c", "echo started"});
  CHECK(result.status == 2);
  CHECK(result.err.find("begin anew") != std::string::npos);
  CHECK_FALSE(fs::exists(folder / "replay"));
  CHECK_FALSE(fs::exists(folder / "replay.checkpoint"));
}

TEST_CASE("an option of a preset is found with '-' and with '_' in it, and the user's folder behind any NAME=") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "ckpts");
  std::ofstream(folder / "ckpts/ckpt_4.raw") << "data";
  const ProgramResult result = run_forkpoint({"replay", "--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.raw", "--preset",
                                              "hf-trainer", "--steps", "4:5", "--timeout", "5", "-o", folder / "run", "--", "/bin/true",
                                              "--output-dir", folder / "other", "--resume-from-checkpoint=old", "dir=" + (folder / "ckpts")});
  INFO(result.err);
  CHECK(result.err.find("--output-dir " + (folder / "run.checkpoint")) != std::string::npos);
  CHECK(result.err.find("--resume-from-checkpoint=" + (folder / "run.checkpoint/ckpt_4.raw")) != std::string::npos);
  CHECK(result.err.find("dir=" + (folder / "run.checkpoint\n")) != std::string::npos);
  CHECK(result.err.find("--resume_from_checkpoint") == std::string::npos);
}

TEST_CASE("processes that ignore SIGTERM, go to other sessions and start their ranks again are ended") {
  const std::string line = [] {
    std::string text;
    for (const std::string& word : kMinigpt) text += word + " ";
    return text + "--resume --checkpoint-dir {checkpoint_dir}";
  }();
  SUBCASE("a shell script") {
    const TemporaryFolder folder;
    const ProgramResult result = replay(window(folder, "9:11", {"--against", original().run}),
                                        {"sh", "-c", "trap '' TERM INT HUP; (setsid sleep 600 &) ; while :; do " + line + "; done"});
    INFO(result.err << result.out);
    CHECK(result.status == 0);
    CHECK(result.out.starts_with("identical"));
    check_nothing_left(folder);
  }
  SUBCASE("a program") {
    const TemporaryFolder folder;
    const ProgramResult result =
        replay(window(folder, "9:11", {"--against", original().run}), words({STUBBORN_TRAINER, "sh", "-c"}, {line}));
    INFO(result.err << result.out);
    CHECK(result.status == 0);
    CHECK(result.out.starts_with("identical"));
    check_nothing_left(folder);
  }
}

TEST_CASE("a rank that dies within the window ends the replay, and the verdict is not identical") {
  const TemporaryFolder folder;
  const std::string script = "RANK=0 WORLD_SIZE=2 " TINY_TRAINER " 2000 --pause 5 & RANK=1 WORLD_SIZE=2 " TINY_TRAINER
                             " 2000 --pause 5 --die-at 3; wait; : {checkpoint}";
  fs::create_directories(folder / "ckpts");
  std::ofstream(folder / "ckpts/ckpt_0.dat") << "x";
  const ProgramResult result = run_forkpoint({"replay", "--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.dat", "--steps",
                                              "0:400", "-o", folder / "replay", "--", "sh", "-c", script});
  INFO(result.err);
  CHECK(result.status == 2);
  CHECK(result.err.find("rank 1") != std::string::npos);
  check_nothing_left(folder);
}

TEST_CASE("Ctrl-C ends the job behind its step on all ranks: a whole run, and no process is left") {
  const TemporaryFolder folder;
  const std::string run = folder / "replay";
  const Words command = words(words({FORKPOINT_PROGRAM}, words({"replay"}, window(folder, "9:4000000"))),
                              words({"--"}, words(kMinigpt, {"--steps", "5000000"})));
  const pid_t child = fork();
  if (child == 0) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    if (!std::freopen((folder / "err").c_str(), "w", stderr)) _exit(99);
    execv(arguments[0], arguments.data());
    _exit(98);
  }
  for (int i = 0; i < 1000 && file_content(run + "/job.log").find("step     12") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(kill(child, SIGINT) == 0);
  int status = 0;
  waitpid(child, &status, 0);
  INFO(file_content(folder / "err"));
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGINT);
  check_nothing_left(folder);
  const Run left = Run::open(run);
  CHECK(left.state() == RunState::whole);
  REQUIRE(left.streams().size() == 4);
  for (const auto& stream : left.streams()) {
    CHECK(stream->state() == StreamState::whole);
    CHECK(stream->steps().back().step == left.streams()[0]->steps().back().step);
    CHECK(stream->steps().back().complete);
  }
  CHECK(left.manifest().exit_status == 130);
}

}  // namespace forkpoint
