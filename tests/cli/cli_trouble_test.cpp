// Replay, bisect and check where the machine does not play along: a disk that fills, a job that does not want to end.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mount.h>
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

// A file system of its own; is_there is false where none can be mounted.
class SmallDisk {
 public:
  SmallDisk(const std::string& path, const std::string& size) : path_(path) {
    fs::create_directory(path);
    is_there = mount("none", path.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
    if (!is_there) MESSAGE("not run: a small file system can be mounted by root only");
  }
  ~SmallDisk() {
    if (is_there) umount2(path_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  void grow(const std::string& size) const {
    REQUIRE(mount("none", path_.c_str(), "tmpfs", MS_REMOUNT, ("size=" + size).c_str()) == 0);
  }
  bool is_there = false;

 private:
  std::string path_;
};

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::string joined(const Words& command) {
  std::string line;
  for (const std::string& word : command) line += (line.empty() ? "" : " ") + word;
  return line;
}

}  // namespace

TEST_CASE("a recording that fills its disk lets the job end well, is said, and is never identical to a whole one") {
  const TemporaryFolder folder;
  const SmallDisk disk(folder / "disk", "96k");
  if (!disk.is_there) return;
  const Words command = words({"--level", "layer", "--"}, words(kMinigpt, {"--steps", "12"}));
  REQUIRE(run_forkpoint(words({"record", "-o", folder / "whole"}, command)).status == 0);
  const ProgramResult result = run_forkpoint(words({"record", "-o", folder / "disk/run"}, command));
  INFO(result.err);
  CHECK(result.status == 0);
  CHECK(has(result.out, "step     11"));
  CHECK(has(result.err, "No space left on device"));
  CHECK(Run::open(folder / "disk/run").state() != RunState::whole);
  const ProgramResult compared = run_forkpoint({"diff", folder / "whole", folder / "disk/run"});
  CHECK(compared.status == 2);
  CHECK(compared.out.starts_with("incomparable: "));
}

TEST_CASE("a bisection that fills its disk is trouble, and goes on to the right answer when there is room again") {
  const TemporaryFolder folder;
  const SmallDisk disk(folder / "disk", "200k");
  if (!disk.is_there) return;
  const std::string good = joined(words(kMinigpt, {"--steps", "12"})), bad = good + " --fault lr@step=7";
  const ProgramResult full =
      run_forkpoint({"bisect", "--good", good, "--bad", bad, "--steps", "0:11", "-o", folder / "disk/found"});
  INFO(full.err);
  CHECK(full.status == 2);
  CHECK(full.out.empty());
  CHECK(has(full.err, "No space left on device"));
  CHECK(has(full.err, "forkpoint bisect --resume"));
  disk.grow("100m");
  const ProgramResult resumed = run_forkpoint({"bisect", "--resume", "-o", folder / "disk/found"});
  INFO(resumed.err);
  CHECK(resumed.status == 1);
  CHECK(resumed.out.starts_with("diverged at step 7, "));
}

TEST_CASE("a replay and a reference for which there is no room leave what was there as it was") {
  const TemporaryFolder folder;
  const SmallDisk disk(folder / "disk", "32k");
  if (!disk.is_there) return;
  const std::string checkpoints = folder / "ckpts";
  const Words trainer = words(kMinigpt, {"--steps", "6", "--checkpoint-dir", checkpoints, "--checkpoint-every", "4"});
  REQUIRE(run_forkpoint(words({"record", "-o", folder / "run", "--"}, trainer)).status == 0);
  const auto before = tree_of(checkpoints);
  const ProgramResult replayed = run_forkpoint(words(
      {"replay", "--checkpoint", checkpoints, "--steps", "4:5", "-o", folder / "disk/replay", "--"}, kMinigpt));
  INFO(replayed.err);
  CHECK(replayed.status == 2);
  CHECK(has(replayed.err, "No space left on device"));
  CHECK(tree_of(checkpoints) == before);
  CHECK_FALSE(fs::exists(folder / "disk/replay.checkpoint"));

  std::ofstream(folder / "disk/ref.json") << std::string(30'000, ' ');
  const ProgramResult checked = run_forkpoint(words({"check", "--reference", folder / "disk/ref.json", "--steps", "2",
                                                     "--update", "-o", folder / "checked", "--"}, kMinigpt));
  INFO(checked.err);
  CHECK(checked.status == 2);
  CHECK(file_content(folder / "disk/ref.json") == std::string(30'000, ' '));
}

TEST_CASE("a second Ctrl-C ends a job at once that takes no notice of the first") {
  const TemporaryFolder folder;
  const std::string script = "trap '' INT TERM; echo up; while :; do sleep 0.1; done; : {checkpoint}";
  const Words command = {FORKPOINT_PROGRAM, "replay", "--checkpoint", folder / "ckpts", "--steps", "4:9", "-o",
                         folder / "replay", "--", "sh", "-c", script};
  const Words trainer = words(kMinigpt, {"--steps", "4", "--checkpoint-dir", folder / "ckpts", "--checkpoint-every", "4"});
  REQUIRE(run_forkpoint(words({"record", "-o", folder / "run", "--"}, trainer)).status == 0);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    if (!std::freopen((folder / "err").c_str(), "w", stderr)) _exit(99);
    execv(arguments[0], arguments.data());
    _exit(98);
  }
  const auto wait_for = [&](const std::string& path, std::string_view text) {
    for (int i = 0; i < 1000 && !has(file_content(path), text); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return has(file_content(path), text);
  };
  CHECK(wait_for(folder / "replay/job.log", "up"));
  CHECK(kill(child, SIGINT) == 0);
  CHECK(wait_for(folder / "err", "once more to end it at once"));
  int status = 0;
  CHECK(waitpid(child, &status, WNOHANG) == 0);  // it waits for the step's end, which does not come
  CHECK(kill(child, SIGINT) == 0);
  const auto asked = std::chrono::steady_clock::now();
  CHECK(waitpid(child, &status, 0) == child);
  INFO(file_content(folder / "err"));
  CHECK(std::chrono::steady_clock::now() - asked < std::chrono::seconds(5));
  CHECK(WIFSIGNALED(status));
  CHECK(processes_with("FORKPOINT_RUN=" + (folder / "replay")).empty());
}

}  // namespace forkpoint
