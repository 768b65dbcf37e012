#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "lib/run.h"
#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

ProgramResult record(const TemporaryFolder& folder, std::vector<std::string> command,
                     std::vector<std::string> options = {}, ProgramOptions how = {}) {
  options.insert(options.begin(), {"record", "-o", "run"});
  options.push_back("--");
  options.insert(options.end(), command.begin(), command.end());
  how.directory = folder.path();
  return run_forkpoint(options, how);
}

}  // namespace

TEST_CASE("the command's exit status is passed on") {
  const std::vector<std::pair<std::vector<std::string>, int>> cases{{{"true"}, 0},
                                                                    {{"false"}, 1},
                                                                    {{"sh", "-c", "exit 7"}, 7},
                                                                    {{"sh", "-c", "kill -9 $$"}, 137},
                                                                    {{"sh", "-c", "kill -TERM $$"}, 143}};
  for (const auto& [command, status] : cases) {
    CAPTURE(command);
    const TemporaryFolder folder;
    CHECK(record(folder, command).status == status);
    CHECK(read_manifest(folder / "run").exit_status == status);
  }
}

TEST_CASE("a command that cannot be run gives 127 or 126 and leaves no folder behind") {
  const TemporaryFolder folder;
  std::ofstream(folder / "plain") << "echo not executable\n";
  std::ofstream(folder / "bad") << "#!/no/such/interpreter\n";
  fs::permissions(folder / "bad", fs::perms::owner_all);
  for (const auto& [command, status] : std::vector<std::pair<std::string, int>>{
           {"no-such-command-anywhere", 127}, {"./no-such-file", 127}, {"./plain", 126}, {"/", 126}, {"./bad", 127}}) {
    CAPTURE(command);
    const ProgramResult result = record(folder, {command});
    CHECK(result.status == status);
    CHECK(contains(result.err, "cannot run `" + command + "`"));
    CHECK_FALSE(fs::exists(folder / "run"));
    const ProgramResult by_default = run_forkpoint({"record", "--", command}, {.directory = folder.path()});
    CHECK(by_default.status == status);
    CHECK_FALSE(fs::exists(folder / "runs"));
  }
}

TEST_CASE("an empty folder that was there before is there afterwards, and empty, when the command cannot be run") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "run");
  CHECK(record(folder, {"no-such-command-anywhere"}).status == 127);
  CHECK(fs::is_empty(folder / "run"));
}

TEST_CASE("standard input, output and error belong to the command") {
  const TemporaryFolder folder;
  const std::string bytes("a\0b\r\n\xff last line without an end", 33);
  const ProgramResult result = record(folder, {"sh", "-c", "cat; echo oops >&2"}, {}, {.input = bytes});
  CHECK(result.out == bytes);
  CHECK(result.err.starts_with("oops\n"));
}

TEST_CASE("the user's own preloads are kept, first, and the probe is added once") {
  const TemporaryFolder folder;
  const std::string probe = FORKPOINT_PROBE_FILE;
  for (const std::string& before : {std::string("libm.so.6"), "libm.so.6:" + probe, probe + " libm.so.6"}) {
    CAPTURE(before);
    fs::remove_all(folder / "run");
    const ProgramResult result =
        record(folder, {"sh", "-c", "echo $LD_PRELOAD"}, {}, {.environment = {{"LD_PRELOAD", before}}});
    CHECK(result.out == "libm.so.6:" + probe + "\n");
  }
}

TEST_CASE("the command line decides the contract's variables, whatever the environment held") {
  const TemporaryFolder folder;
  const ProgramResult result =
      record(folder, {"sh", "-c", "env | grep ^FORKPOINT_ | sort"},
             {"--level", "layer", "--ranks", "2,0-1", "--every", "5", "--max-size", "2M", "--mask-names"},
             {.environment = {{"FORKPOINT_STEPS", "1:2"}, {"FORKPOINT_RING_SLOTS", "1024"}, {"FORKPOINT_TORCH_PYTHON", std::nullopt}}});
  CHECK(result.out ==
        "FORKPOINT_EVERY=5\nFORKPOINT_LEVEL=layer\nFORKPOINT_MASK_NAMES=1\nFORKPOINT_MAX_SIZE_BYTES=2097152\n"
        "FORKPOINT_RANKS=0,1,2\nFORKPOINT_RING_SLOTS=1024\nFORKPOINT_RUN=" +
            fs::canonical(folder / "run").string() + "\n");
  fs::remove_all(folder / "run");
  const ProgramResult open = record(folder, {"sh", "-c", "echo $FORKPOINT_STEPS $FORKPOINT_FIRST_STEP"},
                                    {"--steps", "3:", "--first-step", "9"});
  CHECK(open.out == "3:9223372036854775807 9\n");
}

TEST_CASE("a folder that holds something is never overwritten, and the command does not run") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "run");
  std::ofstream(folder / "run/precious") << "x";
  const ProgramResult result = record(folder, {"touch", "ran"});
  CHECK(result.status == 125);
  CHECK(contains(result.err, "run"));
  CHECK(fs::exists(folder / "run/precious"));
  CHECK_FALSE(fs::exists(folder / "ran"));
}

TEST_CASE("an output that cannot be made is forkpoint's own failure") {
  const TemporaryFolder folder;
  std::ofstream(folder / "file") << "x";
  const ProgramResult result =
      run_forkpoint({"record", "-o", folder / "file/run", "--", "touch", folder / "ran"}, {.directory = folder.path()});
  CHECK(result.status == 125);
  CHECK(contains(result.err, "file/run"));
  CHECK_FALSE(fs::exists(folder / "ran"));
}

TEST_CASE("mistakes on record's own command line are 125, since 1 and 2 could be the command's") {
  const TemporaryFolder folder;
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"record"},
                                             {"record", "--"},
                                             {"record", "true"},
                                             {"record", "--inputs", "--", "true"},
                                             {"record", "--level", "layer", "--certify", "--", "true"},
                                             {"record", "--level", "launch", "--retry", "3", "--", "true"},
                                             {"record", "--level", "launch", "--launch", "3:1", "--", "true"},
                                             {"record", "--level", "launch", "--retry", "3", "--launch", "3", "--", "true"},
                                             {"record", "--level", "fine", "--", "true"},
                                             {"record", "--step-on", "(", "--", "true"},
                                             {"record", "--step-on", "", "--", "true"},
                                             {"record", "--ops", "*", "--", "true"},
                                             {"record", "--level", "layer", "--ops", ",", "--", "true"},
                                             {"record", "--level", "launch", "--retry", "999999", "--launch", "3:1", "--", "true"},
                                             {"record", "--every", "0", "--", "true"},
                                             {"record", "--max-size", "big", "--", "true"},
                                             {"record", "--ranks", "x", "--", "true"},
                                             {"record", "-o", "", "--", "true"},
                                             {"record", "--colour", "--", "true"}}) {
    CAPTURE(words);
    const ProgramResult result = run_forkpoint(words, {.directory = folder.path()});
    CHECK(result.status == 125);
    CHECK(result.err.starts_with("forkpoint: record: ") != result.err.starts_with("forkpoint: --"));
    CHECK(fs::is_empty(folder.path()));
  }
  const ProgramResult inputs = run_forkpoint({"record", "--inputs", "--", "true"});
  CHECK(contains(inputs.err, "--inputs needs --level launch, and the level is step"));
  const ProgramResult ops = run_forkpoint({"record", "--ops", "*", "--", "true"});
  CHECK(contains(ops.err, "--ops needs the layers, and the level is step"));
}

TEST_CASE("--certify gives both runs the same stdin, from where it stands in its file") {
  const TemporaryFolder folder;
  std::ofstream(folder / "input") << "first\nsecond\n";
  run_shell("{ read line; \"$FORKPOINT\" record -o run --level launch --certify -- sh -c 'echo \"($(cat))\" >> seen'; } < input",
            {.directory = folder.path()});
  std::ifstream seen(folder / "seen");
  CHECK(std::string(std::istreambuf_iterator<char>(seen), {}) == "(second)\n(second)\n");
}

TEST_CASE("--certify refuses a pipe with data, which only one of its two runs could read") {
  const TemporaryFolder folder;
  const ProgramResult result = run_shell(
      "echo data | \"$FORKPOINT\" record -o run --level launch --certify -- sh -c 'cat >> seen'", {.directory = folder.path()});
  CHECK(result.status == 125);
  CHECK(contains(result.err, "--certify runs the command twice, and its stdin is a pipe"));
  CHECK_FALSE(fs::exists(folder / "seen"));
  CHECK_FALSE(fs::exists(folder / "run-unhashed"));
  run_shell(": | \"$FORKPOINT\" record -o run --level launch --certify -- sh -c 'echo \"($(cat))\" >> seen'",
            {.directory = folder.path()});
  std::ifstream seen(folder / "seen");
  CHECK(std::string(std::istreambuf_iterator<char>(seen), {}) == "()\n()\n");
}

TEST_CASE("options after `--` are the command's") {
  const TemporaryFolder folder;
  CHECK(record(folder, {"echo", "-o", "x", "--level", "--", "-h"}).out == "-o x --level -- -h\n");
}

TEST_CASE("a probe that is missing is said before anything is made") {
  const TemporaryFolder folder;
  const ProgramResult result =
      record(folder, {"touch", "ran"}, {}, {.environment = {{"FORKPOINT_PROBE", "/no/such/probe.so"}}});
  CHECK(result.status == 125);
  CHECK(contains(result.err, "/no/such/probe.so"));
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("a command that reports nothing is said to have made no records") {
  const TemporaryFolder folder;
  const ProgramResult result = record(folder, {"true"});
  CHECK(contains(result.err, "warning: the command made no records"));
  CHECK(read_manifest(folder / "run").state == RunState::died);
}

TEST_CASE("the default folder is named after the command and the time") {
  const TemporaryFolder folder;
  CHECK(run_forkpoint({"record", "--", "/bin/true"}, {.directory = folder.path()}).status == 0);
  REQUIRE(fs::exists(folder / "runs"));
  const std::string name = fs::directory_iterator(folder / "runs")->path().filename().string();
  CHECK(name.starts_with("true-20"));
  CHECK(name.size() == std::string("true-YYYYmmdd-HHMMSS").size());
}

TEST_CASE("a recorded command leaves a whole run with a complete manifest") {
  const TemporaryFolder folder;
  const ProgramResult result =
      record(folder, {TINY_TRAINER, "4"}, {"--level", "layer"}, {.environment = {{"OMP_NUM_THREADS", "3"}}});
  CHECK(result.status == 0);
  CHECK(result.out.empty());
  CHECK(contains(result.err, "forkpoint: run: 1 rank, 4 steps (0 to 3), "));
  CHECK_FALSE(contains(result.err, "warning"));
  const Run run = Run::open(folder / "run");
  CHECK(run.state() == RunState::whole);
  const Manifest& manifest = run.manifest();
  CHECK(manifest.command == std::vector<std::string>{TINY_TRAINER, "4"});
  CHECK(fs::equivalent(manifest.working_directory, folder.path()));
  CHECK(manifest.environment.at("OMP_NUM_THREADS") == "3");
  CHECK_FALSE(manifest.environment.contains("HOME"));
  CHECK(manifest.world_size == 1);
  CHECK(manifest.level == Level::layer);
  CHECK(manifest.exit_status == 0);
  CHECK(manifest.end_reason == "exited with status 0");
  CHECK(manifest.hosts.size() == 1);
  CHECK(manifest.versions.contains("libc"));
  CHECK(manifest.started_at.size() == std::string("2025-01-31T12:00:00Z").size());
  CHECK(manifest.ended_at >= manifest.started_at);
}

TEST_CASE("two recordings of the same command are identical, and one with another value is not") {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& name, std::vector<std::string> more) {
    std::vector<std::string> words{"record", "-o", folder / name, "--", TINY_TRAINER, "5"};
    words.insert(words.end(), more.begin(), more.end());
    REQUIRE(run_forkpoint(words).status == 0);
  };
  make("a", {}), make("b", {}), make("c", {"--different-at", "3"});
  CHECK(run_forkpoint({"diff", folder / "a", folder / "b"}).status == 0);
  const ProgramResult diverged = run_forkpoint({"diff", folder / "a", folder / "c"});
  CHECK(diverged.status == 1);
  CHECK(diverged.out.starts_with("diverged at step 3, rank 0, optimizer, layer.0: weight\n"));
}

TEST_CASE("a rank killed within a step leaves a run that says so and can be read") {
  const TemporaryFolder folder;
  const ProgramResult result = record(folder, {TINY_TRAINER, "9", "--die-at", "4"});
  CHECK(result.status == 137);
  CHECK(contains(result.err, "rank 0 did not end its stream (the command was killed by signal 9 (Killed))"));
  const Run run = Run::open(folder / "run");
  CHECK(run.state() == RunState::died);
  CHECK(run.manifest().end_reason == "killed by signal 9 (Killed)");
  CHECK(run.streams().front()->steps().size() >= 1);
}

TEST_CASE("a rank that left no stream is named, unless it was not asked for") {
  const std::string script = std::string("RANK=0 WORLD_SIZE=3 ") + TINY_TRAINER + " 2";
  {
    const TemporaryFolder folder;
    CHECK(contains(record(folder, {"sh", "-c", script}).err, "ranks 1, 2 left no stream"));
    CHECK(read_manifest(folder / "run").world_size == 3);
  }
  {
    const TemporaryFolder folder;
    CHECK_FALSE(contains(record(folder, {"sh", "-c", script}, {"--ranks", "0"}).err, "warning"));
    CHECK(Run::open(folder / "run").state() == RunState::whole);
  }
}

TEST_CASE("a process that outlives the command keeps the run from being called whole") {
  const TemporaryFolder folder;
  const std::string script = std::string(TINY_TRAINER) + " 1000 --pause 50 > /dev/null 2>&1 & echo $! > pid; sleep 0.4";
  const ProgramResult result = record(folder, {"sh", "-c", script});
  CHECK(result.status == 0);
  CHECK(contains(result.err, "rank 0 still writes"));
  CHECK(read_manifest(folder / "run").state == RunState::recording);
  CHECK(Run::open(folder / "run").state() == RunState::recording);
  run_shell("kill -9 $(cat " + (folder / "pid") + ")");
}

}  // namespace forkpoint
