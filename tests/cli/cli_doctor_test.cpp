// forkpoint doctor on jobs, programs and environments whose faults are known.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <set>

#include "cli/doctor_command.h"
#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Words = std::vector<std::string>;
using Json = nlohmann::json;
using Variables = std::map<std::string, std::optional<std::string>>;

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Without what the tests' own environment may have of it.
Variables quiet(Variables more = {}) {
  for (const char* name : {"LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUBLAS_WORKSPACE_CONFIG",
                           "PYTHONHASHSEED", "NCCL_ALGO", "XLA_FLAGS"})
    more.emplace(name, std::nullopt);
  return more;
}

ProgramResult doctor(const TemporaryFolder& folder, const Words& options, const Words& command = {},
                     Variables variables = {}) {
  Words all = words({"doctor", "--json", "-o", folder / "runs"}, options);
  if (!command.empty()) all = words(words(all, {"--"}), command);
  return run_forkpoint(all, {.directory = folder.path(), .environment = quiet(std::move(variables))});
}

// Of that kind, by id.
std::set<std::string> ids(const Json& json, const std::string& kind) {
  std::set<std::string> found;
  for (const Json& finding : json.value("findings", Json::array())) {
    if (finding["kind"] == kind) found.insert(finding["id"]);
  }
  return found;
}

Json finding(const Json& json, const std::string& id) {
  for (const Json& each : json.value("findings", Json::array())) {
    if (each["id"] == id) return each;
  }
  FAIL_CHECK("there is no finding " << id << " in " << json.dump(2));
  return {{"kind", ""}, {"found", ""}, {"fix", ""}};
}

// What this machine has to fix, whatever the job: nothing on most.
std::set<std::string> fixes_of_machine() {
  static const std::set<std::string> found = [] {
    const TemporaryFolder folder;
    return ids(parsed(doctor(folder, {})), "fix");
  }();
  return found;
}

std::set<std::string> without_machine(std::set<std::string> found) {
  for (const std::string& id : fixes_of_machine()) found.erase(id);
  return found;
}

// Exit(7) of 84 + 12 bytes: a program of 32 bits.
void write_32_bit_program(const std::string& path) {
  std::string elf(
      "\x7f"
      "ELF\1\1\1",
      7);
  elf.resize(52);
  elf[16] = 2, elf[18] = 3, elf[20] = 1, elf[40] = 52, elf[42] = 32;
  std::ofstream(path, std::ios::binary) << elf;
  fs::permissions(path, fs::perms::owner_all);
}

void write_script(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
  fs::permissions(path, fs::perms::owner_all);
}

std::string line_of(const Words& words) {
  std::string line;
  for (const std::string& word : words) line += "'" + word + "' ";
  return line;
}

}  // namespace

TEST_CASE("this machine: what was looked at is listed, and the exit status is that of the findings") {
  const TemporaryFolder folder;
  const ProgramResult result = doctor(folder, {});
  const Json json = parsed(result);
  INFO(result.err << result.out);
  CHECK(finding(json, "probe")["kind"] == "ok");
  CHECK(finding(json, "run-folder")["kind"] == "ok");
  CHECK(finding(json, "preload")["kind"] == "ok");
  CHECK(finding(json, "knobs-unset")["kind"] == "note");
  const int expected = !ids(json, "fix").empty() ? 1 : !ids(json, "unknown").empty() ? 2 : 0;
  CHECK(result.status == expected);
  CHECK(json["job_was_run"].is_null());
  CHECK_FALSE(fs::exists(folder / "runs"));
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("a sound job has nothing to fix, and its runs are kept") {
  const TemporaryFolder folder;
  const ProgramResult result = doctor(folder, {}, kMinigpt);
  const Json json = parsed(result);
  INFO(result.err << result.out);
  CHECK(finding(json, "repeats")["kind"] == "ok");
  CHECK(holds(finding(json, "repeats")["found"], "two runs of steps 0 to 1 are identical within coverage ("));
  CHECK(holds(finding(json, "repeats")["found"], "on 4 ranks, level step)"));
  CHECK(finding(json, "data")["kind"] == "ok");
  CHECK(without_machine(ids(json, "fix")).empty());
  if (fixes_of_machine().empty() && ids(json, "unknown").empty()) {
    CHECK(result.status == 0);
    CHECK(holds(json["summary"], "nothing to fix: two runs of steps 0 to 1 are identical"));
  }
  CHECK(json["job_was_run"] == true);
  REQUIRE(json["runs"].size() == 2);
  CHECK(run_forkpoint({"diff", json["runs"][0], json["runs"][1]}, {.directory = folder.path()}).status == 0);
}

TEST_CASE("a fault that comes in the second run only is named by its layer, in text as in JSON") {
  const TemporaryFolder folder;
  const Words faulty = words(kMinigpt, {"--fault", "bitflip@step=1,rank=2,layer=1,target=grad"});
  const std::string script =
      "if mkdir flag 2>/dev/null; then exec " + line_of(kMinigpt) + "; else exec " + line_of(faulty) + "; fi";
  const ProgramResult result = doctor(folder, {}, {"sh", "-c", script});
  const Json json = parsed(result);
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(finding(json, "repeats")["kind"] == "fix");
  CHECK(finding(json, "repeats")["about"] == "repeating");
  CHECK(
      holds(finding(json, "repeats")["found"], "diverged at step 1, rank 2, backward, blocks.1.mlp.fc1: weight.grad"));
  CHECK(finding(json, "program-not-followed")["kind"] == "note");  // it was recorded: the probe got there
  fs::remove_all(folder / "flag");
  const ProgramResult text = run_forkpoint({"doctor", "-o", folder / "again", "--", "sh", "-c", script},
                                           {.directory = folder.path(), .environment = quiet()});
  CHECK(text.status == 1);
  if (fixes_of_machine().empty()) CHECK(text.out.starts_with("1 thing keeps this job from repeating\n"));
  CHECK(holds(text.out,
              "fix     repeats: two runs of steps 0 to 1: diverged at step 1, rank 2, backward, blocks.1.mlp.fc1: "
              "weight.grad"));
  CHECK(holds(text.out, "do: forkpoint bisect "));
}

TEST_CASE("a job that takes its seed from the clock starts from other weights") {
  const TemporaryFolder folder;
  Words command = kMinigpt;
  command.resize(command.size() - 2);  // without --seed
  const ProgramResult result = doctor(folder, {"--steps", "0"},
                                      {"sh", "-c", "exec " + line_of(command) + " --seed $(($(date +%s%N) % 100000))"});
  const Json json = parsed(result);
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(finding(json, "repeats")["kind"] == "fix");
  CHECK(holds(finding(json, "repeats")["found"], "two runs of step 0: diverged before the first step"));
}

TEST_CASE("with --no-run nothing is started, and nothing is said to repeat") {
  const TemporaryFolder folder;
  const ProgramResult result = doctor(folder, {"--no-run"}, kMinigpt);
  const Json json = parsed(result);
  INFO(result.err << result.out);
  CHECK(finding(json, "repeats")["kind"] == "note");
  CHECK(json["job_was_run"] == false);
  CHECK(finding(json, "program")["kind"] == "ok");
  CHECK_FALSE(fs::exists(folder / "runs"));
  if (fixes_of_machine().empty() && ids(json, "unknown").empty())
    CHECK(json["summary"] == "nothing to fix was found; the job was not run");
  // What a shell does cannot be told from its words.
  const Json shell = parsed(doctor(folder, {"--no-run"}, {"sh", "-c", "cd /tmp && ./train"}));
  CHECK(finding(shell, "program-not-followed")["kind"] == "unknown");
}

TEST_CASE("programs that cannot be recorded come out by id") {
  const TemporaryFolder folder;
  write_32_bit_program(folder / "program32");
  std::ofstream(folder / "not_executable") << "#!/bin/sh\n";
  write_script(folder / "script", "#!" + (folder / "program32") + "\n");
  const std::vector<std::pair<Words, std::string>> cases = {
      {{folder / "program32"}, "program-32-bit"},
      {{folder / "script"}, "program-32-bit"},  // its interpreter
      {{"nice", "-n", "5", folder / "program32"}, "program-32-bit"},
      {{"no_such_program_anywhere"}, "program-missing"},
      {{folder / "no_such_file"}, "program-missing"},
      {{folder / "not_executable"}, "program-not-executable"},
      {{"sudo", MINIGPT}, "preload-lost"},
      {{"env", "-i", MINIGPT}, "preload-lost"},
      {{"env", "-u", "LD_PRELOAD", MINIGPT}, "preload-lost"},
      {{"env", "LD_PRELOAD=/x.so", MINIGPT}, "preload-lost"},
      {{"srun", "--export=NONE", MINIGPT}, "preload-lost"},
      {{"env", "CUBLAS_WORKSPACE_CONFIG=:0:0", MINIGPT}, "knob-cublas"},
      {{"python3", "-I", "x.py"}, "python-variables-ignored"},
  };
  for (const auto& [command, id] : cases) {
    const ProgramResult result = doctor(folder, {"--no-run"}, command);
    CAPTURE(id);
    INFO(result.err << result.out);
    CHECK(finding(parsed(result), id)["kind"] == "fix");
    CHECK(result.status == 1);
  }
}

TEST_CASE("a missing program is not run, and a statically linked one leaves no records") {
  const TemporaryFolder folder;
  const ProgramResult missing = doctor(folder, {}, {"no_such_program_anywhere"});
  CHECK(missing.status == 1);
  CHECK(parsed(missing)["job_was_run"] == false);
  CHECK_FALSE(fs::exists(folder / "runs"));
  if (std::string(STATIC_PROGRAM).empty()) {
    MESSAGE("skipped: no static C library is installed");
    return;
  }
  const ProgramResult result = doctor(folder, {}, {STATIC_PROGRAM});
  const Json json = parsed(result);
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(finding(json, "program-static")["kind"] == "fix");
  CHECK(finding(json, "no-records")["kind"] == "fix");
  CHECK(finding(json, "repeats")["kind"] == "unknown");
}

TEST_CASE("a set-uid program of another user drops the probe") {
  const TemporaryFolder folder;
  fs::copy(TINY_TRAINER, folder / "trainer");
  if (geteuid() != 0 || chown((folder / "trainer").c_str(), 65534, 65534) != 0 ||
      chmod((folder / "trainer").c_str(), 04755) != 0) {
    MESSAGE("skipped: only root can make one");
    return;
  }
  CHECK(finding(parsed(doctor(folder, {"--no-run"}, {folder / "trainer"})), "program-set-id")["kind"] == "fix");
}

TEST_CASE("a folder in which no run can be made is said, whoever asks") {
  const TemporaryFolder folder;
  std::ofstream(folder / "file") << "x";
  for (const std::string& place : {folder / "file/runs", std::string("/proc/forkpoint/runs")}) {
    const ProgramResult result = run_forkpoint({"doctor", "--json", "-o", place}, {.environment = quiet()});
    INFO(result.err << result.out);
    CHECK(result.status == 1);
    CHECK(finding(parsed(result), "run-folder")["kind"] == "fix");
  }
  // With a job: it cannot be looked at, and is not said to repeat.
  const ProgramResult job =
      run_forkpoint(words({"doctor", "--json", "-o", folder / "file/runs", "--"}, kMinigpt), {.environment = quiet()});
  CHECK(job.status == 1);
  CHECK(finding(parsed(job), "job")["kind"] == "unknown");
}

TEST_CASE("variables that are in the way come out by id, each with a line that clears it") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "other");
  fs::copy(FORKPOINT_PROBE_FILE, folder / "other/libforkpoint.so");
  const std::vector<std::tuple<std::string, std::string, std::string>> cases = {
      {"CUBLAS_WORKSPACE_CONFIG", ":0:0", "knob-cublas"},
      {"PYTHONHASHSEED", "random", "knob-python-hash"},
      {"NCCL_ALGO", "NVLS", "knob-nccl"},
      {"LD_PRELOAD", "/nowhere/tool.so", "preload"},
      {"LD_PRELOAD", folder / "other/libforkpoint.so", "preload-second-probe"},
      {"CUDA_INJECTION64_PATH", "/nowhere/nsys.so", "cuda-injection"},
      {"NVTX_INJECTION64_PATH", "/nowhere/nsys.so", "nvtx-injection"},
      {"FORKPOINT_TORCH", "0", "torch-left-alone"},
      {"FORKPOINT_CUPTI", "/nowhere/libcupti.so.13", "cupti"},
      {"FORKPOINT_PROBE", "/nowhere/libforkpoint.so", "probe"},
  };
  for (const auto& [name, value, id] : cases) {
    const ProgramResult result = doctor(folder, {}, {}, {{name, value}});
    CAPTURE(name);
    INFO(result.err << result.out);
    const Json found = finding(parsed(result), id);
    CHECK(result.status == 1);
    CHECK(found["kind"] == "fix");
    CHECK(found["fix"].is_string());
  }
}

TEST_CASE("a probe of another version, or of none, is told from ours") {
  const TemporaryFolder folder;
  for (const char* not_a_probe : {MINIGPT, SLOW_CUDA}) {
    const ProgramResult result = doctor(folder, {"--look-timeout", "1"}, {}, {{"FORKPOINT_PROBE", not_a_probe}});
    const std::set<std::string> ok = ids(parsed(result), "ok");
    INFO(result.err << result.out);
    CHECK(result.status != 0);
    CHECK_FALSE(ok.contains("probe"));
  }
}

TEST_CASE("libraries that hang or crash when they are loaded are unknown, and nothing waits for them") {
  const TemporaryFolder folder;
  for (const char* what : {"hang", "crash"}) {
    const auto begin = std::chrono::steady_clock::now();
    const ProgramResult result =
        doctor(folder, {"--look-timeout", "1"}, {},
               {{"LD_LIBRARY_PATH", fs::path(SLOW_CUDA).parent_path().string()}, {"SLOW_LIBRARY", what}});
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const Json json = parsed(result);
    CAPTURE(what);
    INFO(result.err << result.out);
    CHECK(finding(json, "driver")["kind"] == "unknown");
    CHECK(finding(json, "nccl")["kind"] == "unknown");
    CHECK(holds(finding(json, "driver")["found"],
                std::string(what) == "hang" ? "did not end within 1 s (at: loading libcuda.so.1)" : "signal 6"));
    CHECK((result.status == 2 || !fixes_of_machine().empty()));
    CHECK(seconds < 60);
    CHECK(processes_with("SLOW_LIBRARY=" + std::string(what)).empty());
  }
}

TEST_CASE("a driver that does not start is no ok") {
  const TemporaryFolder folder;
  const Variables bad{{"LD_LIBRARY_PATH", BAD_CUDA_FOLDER}, {"BAD_CUDA_INIT", "999"}};
  const Json json = parsed(doctor(folder, {}, {}, bad));
  CHECK(finding(json, "driver")["kind"] == "fix");
  CHECK(holds(finding(json, "driver")["found"], "error 999"));
}

TEST_CASE("a job that fails, ends early or records nothing is not said to repeat") {
  const TemporaryFolder folder;
  const Json nothing = parsed(doctor(folder, {}, {"true"}));
  CHECK(finding(nothing, "no-records")["kind"] == "fix");
  CHECK(finding(nothing, "repeats")["kind"] == "unknown");
  fs::remove_all(folder / "runs");
  const ProgramResult early = doctor(folder, {"--steps", "0:5"}, {TINY_TRAINER, "3"});
  INFO(early.err << early.out);
  CHECK(early.status == 2 - (fixes_of_machine().empty() ? 0 : 1));
  CHECK(finding(parsed(early), "repeats")["kind"] == "unknown");
  CHECK(holds(finding(parsed(early), "repeats")["found"], "before step 5 was over"));
  fs::remove_all(folder / "runs");
  const Json died = parsed(doctor(folder, {"--steps", "0:5"}, {TINY_TRAINER, "30", "--die-at", "3"}));
  CHECK(finding(died, "repeats")["kind"] == "unknown");
  fs::remove_all(folder / "runs");
  const Json failed = parsed(doctor(folder, {}, {"false"}));
  CHECK(finding(failed, "job")["kind"] == "unknown");
  CHECK(ids(failed, "fix") == fixes_of_machine());
  fs::remove_all(folder / "runs");
  // It hangs before its first step.
  const Json hung = parsed(doctor(folder, {"--timeout", "1"}, {"sleep", "1000"}));
  CHECK(finding(hung, "repeats")["kind"] == "unknown");
}

TEST_CASE("options about a command need one, and open steps are refused") {
  CHECK(run_forkpoint({"doctor", "--steps", "0:1"}).status == 2);
  CHECK(run_forkpoint({"doctor", "--no-run"}).status == 2);
  CHECK(holds(run_forkpoint({"doctor", "--steps", "3:", "--", "true"}).err, "where do they end?"));
  CHECK(run_forkpoint({"doctor", "--"}).status == 2);
  CHECK(run_forkpoint({"doctor", "x"}).status == 2);
}

TEST_CASE("a command line is followed through its wrappers as far as its words tell") {
  const auto programs = [](const Words& command) { return read_job_line(command).look.programs; };
  CHECK(programs({"./train", "--x"}) == Words{"./train"});
  CHECK(programs({"env", "A=1", "-u", "B", "./train"}) == Words{"env", "./train"});
  CHECK(programs({"timeout", "-k", "5", "60", "nice", "-n", "3", "./train"}) == Words{"timeout", "nice", "./train"});
  CHECK(programs({"sh", "-c", "A=1 exec ./train --x"}) == Words{"sh", "./train"});
  CHECK(programs({"/usr/bin/env", "-S python3 -u"}) == Words{"/usr/bin/env", "python3"});
  CHECK(programs({"bash", "-lc", "./train"}) == Words{"bash", "./train"});
  CHECK(programs({"mpirun", "-n", "8", "--mca", "a", "b", "./train"}) == Words{"mpirun", "./train"});
  CHECK(programs({"srun", "-n", "8", "--gres=gpu:8", "./train"}) == Words{"srun", "./train"});
  CHECK(programs({"torchrun", "--nproc-per-node", "8", "train.py"}) == Words{"torchrun"});
  CHECK(programs({"torchrun", "--nproc-per-node", "8", "--no-python", "./train"}) == Words{"torchrun", "./train"});
  CHECK(programs({"python3", "-m", "torch.distributed.run", "--no-python", "./train"}) == Words{"python3", "./train"});
  CHECK(programs({"python3", "-u", "train.py"}) == Words{"python3"});
  CHECK(read_job_line({"sh", "-c", "cd x && ./train"}).look.not_followed == "a shell's line");
  CHECK(read_job_line({"env", "A=1", "-u", "B", "./t"}).look.environment.at("A") == "1");
  CHECK_FALSE(read_job_line({"env", "A=1", "-u", "B", "./t"}).look.environment.at("B").has_value());
  CHECK(read_job_line({"docker", "run", "x"}).look.drops_preload == "docker");
  CHECK(read_job_line({"python3", "-uI", "x.py"}).look.ignores_python_variables);
  CHECK_FALSE(read_job_line({"python3", "-u", "x.py", "-I"}).look.ignores_python_variables);
  // Behind a launcher whose options are not all known, a word is a guess.
  CHECK(read_job_line({"mpirun", "--unknown", "value", "./train"}).certain == 1);
}

}  // namespace forkpoint
