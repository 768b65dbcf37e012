// forkpoint bisect that is killed, and goes on by its log; and what it refuses.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Words = std::vector<std::string>;
using Json = nlohmann::json;

std::string command_line(const std::string& more = "") {
  std::string line;
  for (const std::string& word : kMinigpt) line += word + " ";
  return line + "--steps 8" + more;
}

Words request(const std::string& folder) {
  return {"bisect",  "--json",       "-o",    folder,
          "--good",  command_line(), "--bad", command_line(" --fault bitflip@step=5,rank=2,layer=1,target=grad"),
          "--steps", "0:7"};
}

size_t lines_of(const std::string& path) {
  const std::string content = file_content(path);
  return static_cast<size_t>(std::count(content.begin(), content.end(), '\n'));
}

// Kills it when its log has `lines`; at once (between two windows), or `later` (in the midst of one).
void run_and_kill(const std::string& folder, size_t lines, std::chrono::milliseconds later) {
  const Words arguments = request(folder);
  const pid_t pid = fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    const int nowhere = open("/dev/null", O_RDWR);
    for (int file : {0, 1, 2}) dup2(nowhere, file);
    std::vector<char*> raw = {const_cast<char*>(FORKPOINT_PROGRAM)};
    for (const std::string& word : arguments) raw.push_back(const_cast<char*>(word.c_str()));
    raw.push_back(nullptr);
    execv(FORKPOINT_PROGRAM, raw.data());
    _exit(127);
  }
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (lines_of(folder + "/bisect.jsonl") < lines && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(later);
  kill(pid, SIGKILL);
  int status = 0;
  waitpid(pid, &status, 0);
  REQUIRE(WIFSIGNALED(status));
}

// What stands under "key" in the log, line by line.
Words keys_of(const std::string& content) {
  Words keys;
  for (size_t at = 0, end; (end = content.find('\n', at)) != std::string::npos; at = end + 1) {
    const Json line = Json::parse(content.substr(at, end - at), nullptr, false);
    if (line.contains("key")) keys.push_back(line["key"]);
  }
  return keys;
}

}  // namespace

TEST_CASE("killed between two windows or in the midst of one, it goes on without repeating what was finished") {
  for (const auto& [lines, later_ms] : {std::pair{1, 150}, std::pair{2, 0}, std::pair{3, 200}, std::pair{5, 100}}) {
    CAPTURE(lines);
    CAPTURE(later_ms);
    const TemporaryFolder folder;
    const std::string place = folder / "bisect";
    run_and_kill(place, static_cast<size_t>(lines), std::chrono::milliseconds(later_ms));
    const std::string log = file_content(place + "/bisect.jsonl");
    const Words finished = keys_of(log);
    std::map<std::string, std::string> manifests;
    for (const std::string& key : finished) manifests[key] = file_content(place + "/" + key + "/run.json");
    const ProgramResult result = run_forkpoint({"bisect", "--json", "--resume", "-o", place});
    INFO(result.err << result.out);
    REQUIRE(result.status == 1);
    CHECK(parsed(result).at("first").at("step") == 5);
    CHECK(parsed(result).at("first").at("layer") == "blocks.1.mlp.fc1");
    CHECK(parsed(result).at("bisect").at("windows") == 6);
    for (const auto& [key, manifest] : manifests) {
      CAPTURE(key);
      REQUIRE(!manifest.empty());
      CHECK(file_content(place + "/" + key + "/run.json") == manifest);  // with its time and pid: it was not run again
    }
    const Words all = keys_of(file_content(place + "/bisect.jsonl"));
    CHECK(all.size() == 6);
    CHECK(std::equal(finished.begin(), finished.end(), all.begin()));
    CHECK(processes_with("FORKPOINT_RUN=" + place).empty());
  }
}

TEST_CASE("a finished bisect says the same again, and runs nothing") {
  const TemporaryFolder folder;
  const std::string place = folder / "bisect";
  const ProgramResult first = run_forkpoint(request(place));
  INFO(first.err);
  REQUIRE(first.status == 1);
  const auto before = tree_of(place);
  const ProgramResult again = run_forkpoint({"bisect", "--json", "--resume", "--log", place + "/bisect.jsonl"});
  CHECK(again.status == 1);
  CHECK(again.out == first.out);
  CHECK(tree_of(place) == before);
  // A window that is in the log and gone from the disk is not made up.
  fs::remove_all(place + "/layer-1-bad");
  const ProgramResult gone = run_forkpoint({"bisect", "--resume", "-o", place});
  CHECK(gone.status == 2);
  CHECK(gone.err.find("layer-1-bad") != std::string::npos);
}

TEST_CASE("the text begins with the verdict's sentence and ends with what each stage cost") {
  const TemporaryFolder folder;
  Words words = request(folder / "bisect");
  words.erase(words.begin() + 1);  // --json
  const ProgramResult result = run_forkpoint(words);
  INFO(result.err);
  CHECK(result.status == 1);
  CHECK(result.out.starts_with("diverged at step 5, rank 2, backward, blocks.1.mlp.fc1: weight.grad\n"));
  CHECK(result.out.find("operands (good against bad):\n  rank 2, backward, blocks.1.mlp.fc1: weight.grad: 1 of") !=
        std::string::npos);
  CHECK(result.out.find("bisected by 6 windows and 40 steps in ") != std::string::npos);
}

TEST_CASE("an arm that crashes is trouble with its log's name, never a verdict, and what was done is kept") {
  const TemporaryFolder folder;
  const ProgramResult result = run_forkpoint({"bisect", "-o", folder / "bisect", "--good", command_line(), "--bad",
                                              "sh -c 'echo no such weights; exit 3'", "--steps", "0:7"});
  CHECK(result.status == 2);
  CHECK(result.out.empty());
  CHECK(result.err.find("the bad arm did not do steps 0 to 7") != std::string::npos);
  CHECK(result.err.find("no such weights") != std::string::npos);
  CHECK(result.err.find("--resume") != std::string::npos);
  CHECK(keys_of(file_content(folder / "bisect/bisect.jsonl")) == Words{"all-1-good"});
}

TEST_CASE("what cannot be meant is refused before anything is run") {
  const TemporaryFolder folder;
  const auto refused = [&](const Words& more, const std::string& text) {
    const ProgramResult result = run_forkpoint(words({"bisect", "-o", folder / "bisect"}, more));
    INFO(result.err);
    CHECK(result.status == 2);
    CHECK(result.err.find(text) != std::string::npos);
    CHECK(result.out.empty());
    fs::remove_all(folder / "bisect");
  };
  refused({}, "--good is missing");
  refused({"--good", "true"}, "--bad is missing");
  refused({"--good", "true", "--bad", "true"}, "--steps A:B is missing");
  refused({"one"}, "two runs");
  refused({"none", "none"}, "none");
  refused({"--good", "true", "--bad", "A=1", "--steps", "0:3"}, "no command");
  refused({"--good", "true", "--bad", "true", "--steps", "0:3", "--bad-checkpoint", folder.path()}, "--checkpoint");
  fs::create_directory(folder / "unknown");
  std::ofstream(folder / "unknown/model_8.pt") << "data";
  refused({"--good", "true", "--bad", "true", "--steps", "0:3", "--checkpoint", folder / "unknown"},
          "nothing in it is named as a checkpoint");
  refused({"--good", "t {checkpoint}", "--bad", "true", "--steps", "0:3"}, "given a checkpoint");
  refused({"--resume", "--steps", "0:3"}, "goes without --steps");
  refused({"--resume"}, "bisect.jsonl");
}

TEST_CASE("commands that may save over something are warned of, and those that only read there are not") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "saved");
  std::ofstream(folder / "saved/model_8.pt") << "data";
  const std::string command = "true " + (folder / "saved");
  const auto warned = [&](const std::string& name, const Words& more) {
    const Words all =
        words({"bisect", "-o", folder / name, "--good", command, "--bad", command, "--steps", "0:1"}, more);
    const std::string err = run_forkpoint(all).err;
    INFO(err);
    return err.find("may save over what lies in " + (folder / "saved")) != std::string::npos;
  };
  CHECK(warned("plain", {}));
  CHECK_FALSE(warned("read", {"--only-read", folder / "saved"}));
  CHECK_FALSE(warned("two", {"--only-read", folder.path() + "," + (folder / "saved")}));
}

TEST_CASE("an arm that opens no file of its checkpoint is trouble: it began anew, and says nothing of these steps") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "ckpts");
  std::ofstream(folder / "ckpts/ckpt_4.raw") << "data";
  const auto bisected = [&](const std::string& name, const std::string& command) {
    return run_forkpoint({"bisect", "-o", folder / name, "--good", command, "--bad", command, "--steps", "4:6",
                          "--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.raw"});
  };
  const ProgramResult anew = bisected("anew", TINY_TRAINER " 8 --begin-at {step}");
  INFO(anew.err << anew.out);
  CHECK(anew.status == 2);
  CHECK(anew.err.find("its job opened no file of it: it began anew") != std::string::npos);
  CHECK(anew.out.empty());
  const ProgramResult loaded = bisected("loaded", "cat {checkpoint} && " TINY_TRAINER " 8 --begin-at {step}");
  INFO(loaded.err << loaded.out);
  CHECK(loaded.status == 0);
}

}  // namespace forkpoint
