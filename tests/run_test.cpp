#include "lib/run.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "lib/error.h"
#include "tests/support/run_generator.h"
#include "tests/support/sample_stream.h"
#include "tests/support/stream_exercise.h"

using namespace forkpoint;

namespace {

GeneratorOptions small(int ranks = 3) {
  GeneratorOptions options;
  options.ranks = ranks;
  options.steps = 2;
  options.records_per_step = 60;
  return options;
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::string read_text(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

Manifest full_manifest() {
  Manifest manifest;
  manifest.state = RunState::whole;
  manifest.forkpoint_version = "0.1.0";
  manifest.command = {"torchrun", "--nproc-per-node", "8", "train.py \"quoted\""};
  manifest.working_directory = "/home/user";
  manifest.environment = {{"NCCL_ALGO", "Ring"}, {"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}};
  manifest.versions = {{"torch", "2.11"}, {"nccl", "2.28.9"}};
  manifest.gpus = {"NVIDIA H200"};
  manifest.world_size = 8;
  manifest.ranks = {0, 3};
  manifest.level = Level::layer;
  manifest.step_base = "checkpoint";
  manifest.every = 5;
  manifest.names_masked = true;
  manifest.started_at = "2025-01-01T00:00:00Z";
  manifest.ended_at = "2025-01-01T01:00:00Z";
  manifest.hosts = {"node1", "node2"};
  manifest.exit_status = 137;
  manifest.end_reason = "killed by signal 9";
  manifest.merged_from = {"runs/a", "runs/b"};
  manifest.notes = {"launch 2:13 gemm: 20 outputs in 20 runs"};
  manifest.recorder = {"node1", 77, "boot", 99, 5};
  return manifest;
}

// The run of one node: some ranks of a world of four.
std::string node_run(
    const TemporaryFolder& folder, const std::string& name, const std::vector<int>& ranks,
    const std::function<void(Manifest*)>& change = [](Manifest*) {}) {
  Manifest manifest;
  manifest.command = {"train"};
  manifest.world_size = 4;
  manifest.hosts = {name};
  manifest.versions = {{"torch", "2.11"}};
  manifest.started_at = "2025-01-01T00:00:00Z";
  change(&manifest);
  create_run(folder / name, manifest);
  GeneratorOptions options = small(4);
  for (int rank : ranks) generate_stream((folder / name) + "/" + stream_file_name(rank), rank, options);
  manifest.state = RunState::whole;
  manifest.exit_status = 0;
  write_manifest(folder / name, manifest);
  return folder / name;
}

}  // namespace

TEST_CASE("every field of the manifest survives a write and a read") {
  const TemporaryFolder folder;
  const Manifest want = full_manifest();
  write_manifest(folder.path(), want);
  const Manifest got = read_manifest(folder.path());
  CHECK(got.state == want.state);
  CHECK(got.forkpoint_version == want.forkpoint_version);
  CHECK(got.command == want.command);
  CHECK(got.working_directory == want.working_directory);
  CHECK(got.environment == want.environment);
  CHECK(got.versions == want.versions);
  CHECK(got.gpus == want.gpus);
  CHECK(got.world_size == want.world_size);
  CHECK(got.ranks == want.ranks);
  CHECK(got.level == want.level);
  CHECK(got.step_base == want.step_base);
  CHECK(got.every == want.every);
  CHECK(got.names_masked == want.names_masked);
  CHECK(got.started_at == want.started_at);
  CHECK(got.ended_at == want.ended_at);
  CHECK(got.hosts == want.hosts);
  CHECK(got.exit_status == want.exit_status);
  CHECK(got.end_reason == want.end_reason);
  CHECK(got.merged_from == want.merged_from);
  CHECK(got.notes == want.notes);
  CHECK(got.recorder.host == want.recorder.host);
  CHECK(got.recorder.pid == want.recorder.pid);
  CHECK(got.recorder.boot_id == want.recorder.boot_id);
  CHECK(got.recorder.pid_start_ticks == want.recorder.pid_start_ticks);
  CHECK(got.recorder.pid_namespace == want.recorder.pid_namespace);
}

TEST_CASE("fields of a later version survive a read and a write") {
  const TemporaryFolder folder;
  write_text(folder / "run.json", R"({"format": 1, "state": "whole", "window": {"from": [1, 2]}, "note": "x"})");
  Manifest manifest = read_manifest(folder.path());
  manifest.exit_status = 3;
  write_manifest(folder.path(), manifest);
  const std::string text = read_text(folder / "run.json");
  CHECK(text.find("\"window\"") != std::string::npos);
  CHECK(text.find("\"note\": \"x\"") != std::string::npos);
  CHECK(read_manifest(folder.path()).exit_status == 3);
}

TEST_CASE("bytes that are not UTF-8 in a command do not stop a manifest") {
  const TemporaryFolder folder;
  Manifest manifest;
  manifest.command = {"train", "\xff\xfe"};
  write_manifest(folder.path(), manifest);
  CHECK(read_manifest(folder.path()).command.size() == 2);
}

TEST_CASE("a manifest that is none is refused in words") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& text, const char* expected) {
    write_text(folder / "run.json", text);
    CHECK_THROWS_WITH_AS(read_manifest(folder.path()), doctest::Contains(expected), Error);
  };
  refused("", "run.json: not valid JSON at byte");
  refused("{\"format\": 1", "not valid JSON at byte");
  refused("[1, 2]", "expected one JSON object");
  refused(std::string(100'000, '['), "run.json");
  refused("{\"a\": " + std::string(1000, '[') + std::string(1000, ']') + "}", "levels deep");
  refused(R"({"format": 2})", "manifest format 2; this forkpoint reads format 1");
  refused(R"({"format": 1, "state": "ended"})", "state is \"ended\"");
  refused(R"({"format": 1, "level": "tensor"})", "level is \"tensor\"");
  refused(R"({"format": 1, "world_size": "eight"})", "field \"world_size\" is of type string");
  refused(R"({"format": 1, "world_size": -1})", "world_size is -1");
  refused(R"({"format": 1, "world_size": 1e300})", "field \"world_size\" is of type number");
  refused(R"({"format": 1, "exit_status": 99999999999})", "field \"exit_status\" is of type number");
  refused(R"({"format": 1, "ranks": [0, 1.5]})", "field \"ranks\" is of type array");
  refused(R"({"format": 1, "command": "train"})", "field \"command\" is of type string");
  CHECK_THROWS_WITH_AS(read_manifest(folder / "none"), doctest::Contains("no such run"), Error);
  CHECK_THROWS_WITH_AS(read_manifest(folder / "run.json"), doctest::Contains("it is not a folder"), Error);
  std::filesystem::create_directory(folder / "empty");
  CHECK_THROWS_WITH_AS(Run::open(folder / "empty"), doctest::Contains("there is no run.json"), Error);
}

TEST_CASE("a new run is made with the folders above it, and never over another one") {
  const TemporaryFolder folder;
  create_run(folder / "runs/today/a", {});
  const Manifest manifest = read_manifest(folder / "runs/today/a");
  CHECK(manifest.state == RunState::recording);
  CHECK(manifest.recorder.pid == getpid());
  CHECK(manifest.recorder.boot_id != "");
  CHECK_THROWS_WITH_AS(create_run(folder / "runs/today/a", {}), doctest::Contains("not empty"), Error);
  CHECK_THROWS_WITH_AS(create_run((folder / "runs/today/a") + "/run.json", {}), doctest::Contains("cannot be made"),
                       Error);
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "runs/today/a"))
    left.insert(entry.path().filename());
  CHECK(left == std::set<std::string>{"run.json"});
}

TEST_CASE("of many processes that make one run at once, one succeeds") {
  const TemporaryFolder folder;
  int made = 0;
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      try {
        create_run(folder / "run", {});
        _exit(0);
      } catch (const Error&) {
        _exit(1);
      }
    }
    children.push_back(pid);
  }
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    made += WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  CHECK(made == 1);
  CHECK(read_manifest(folder / "run").state == RunState::recording);
}

TEST_CASE("a run opens with its streams by ascending rank") {
  const TemporaryFolder folder;
  generate_run(folder / "run", small(12));
  const Run run = Run::open(folder / "run");
  CHECK(run.state() == RunState::whole);
  CHECK(run.problems().empty());
  CHECK(run.missing_ranks().empty());
  CHECK(run.world_size() == 12);
  REQUIRE(run.streams().size() == 12);
  for (int rank = 0; rank < 12; ++rank) {
    CHECK(run.streams()[static_cast<size_t>(rank)]->header().rank == rank);
    CHECK(run.stream_of(rank) == run.streams()[static_cast<size_t>(rank)].get());
  }
  CHECK(run.stream_of(12) == nullptr);
  CHECK(stream_file_name(3) == "rank-00003.fkp");
}

TEST_CASE("a missing rank is named and the run is not whole, unless it was left out on purpose") {
  const TemporaryFolder folder;
  generate_run(folder / "run", small());
  std::filesystem::remove(folder / "run/rank-00001.fkp");
  const Run run = Run::open(folder / "run");
  CHECK(run.state() == RunState::died);
  CHECK(run.missing_ranks() == std::vector<int>{1});
  Manifest manifest = read_manifest(folder / "run");
  manifest.ranks = {0, 2};
  write_manifest(folder / "run", manifest);
  CHECK(Run::open(folder / "run").state() == RunState::whole);
}

TEST_CASE("a stream that cannot be read is a problem of the run, not the end of it") {
  const TemporaryFolder folder;
  generate_run(folder / "run", small());
  write_text(folder / "run/rank-00002.fkp", "garbage");
  const Run run = Run::open(folder / "run");
  CHECK(run.streams().size() == 2);
  CHECK(run.state() == RunState::died);
  REQUIRE(run.problems().size() == 1);
  CHECK(run.problems()[0].find("rank-00002.fkp: not a hash stream") != std::string::npos);
  CHECK(run.missing_ranks() == std::vector<int>{2});
  for (int rank : {0, 1}) write_text((folder / "run/") + stream_file_name(rank), "");
  CHECK_THROWS_WITH_AS(Run::open(folder / "run"), doctest::Contains("none of the run's 3 streams can be read"), Error);
}

TEST_CASE("a stream under another rank's name is left out and said to be") {
  const TemporaryFolder folder;
  generate_run(folder / "run", small());
  std::filesystem::copy_file(folder / "run/rank-00000.fkp", folder / "run/rank-00007.fkp");
  const Run run = Run::open(folder / "run");
  CHECK(run.streams().size() == 3);
  REQUIRE(run.problems().size() == 1);
  CHECK(run.problems()[0].find("named for rank 7, but holds rank 0") != std::string::npos);
  CHECK(run.state() == RunState::died);
}

TEST_CASE("a run of streams that died is not whole, whatever the manifest says") {
  const TemporaryFolder folder;
  GeneratorOptions options = small();
  options.finish = false;
  generate_run(folder / "run", options);
  CHECK(Run::open(folder / "run").state() == RunState::died);
  Manifest manifest = read_manifest(folder / "run");
  manifest.state = RunState::whole;
  write_manifest(folder / "run", manifest);
  CHECK(Run::open(folder / "run").state() == RunState::died);
}

TEST_CASE("a recording run reads as such while its recorder lives, then as died") {
  const TemporaryFolder folder;
  generate_run(folder / "run", small());
  Manifest manifest = read_manifest(folder / "run");
  const std::string path = folder / "new";
  create_run(path, manifest);  // by this process
  for (const auto& entry : std::filesystem::directory_iterator(folder / "run")) {
    if (entry.path().extension() == ".fkp")
      std::filesystem::copy_file(entry.path(), path + "/" + entry.path().filename().string());
  }
  CHECK(Run::open(path).state() == RunState::recording);
  Manifest orphan = read_manifest(path);
  orphan.recorder.pid_start_ticks += 1;  // the id was given to another process since
  write_manifest(path, orphan);
  CHECK(Run::open(path).state() == RunState::died);
  CHECK(Run::open(path).manifest().state == RunState::recording);
}

TEST_CASE("an empty run says whether it may still fill") {
  const TemporaryFolder folder;
  create_run(folder / "run", {});
  CHECK_THROWS_WITH_AS(Run::open(folder / "run"), doctest::Contains("no rank has written anything yet"), Error);
  Manifest manifest = read_manifest(folder / "run");
  manifest.state = RunState::died;
  write_manifest(folder / "run", manifest);
  CHECK_THROWS_WITH_AS(Run::open(folder / "run"), doctest::Contains("the run is empty"), Error);
}

TEST_CASE("the folders of two nodes become one run, and stay as they are") {
  const TemporaryFolder folder;
  const std::string a = node_run(folder, "node1", {0, 1}, [](Manifest* m) { m->versions["cuda_driver"] = "580"; });
  const std::string b = node_run(folder, "node2", {2, 3}, [](Manifest* m) { m->versions["cuda_driver"] = "575"; });
  CHECK(Run::open(a).state() == RunState::died);  // half of the ranks
  merge_runs({b, a}, folder / "merged");
  const Run merged = Run::open(folder / "merged");
  CHECK(merged.state() == RunState::whole);
  CHECK(merged.streams().size() == 4);
  CHECK(merged.manifest().hosts == std::vector<std::string>{"node2", "node1"});
  CHECK(merged.manifest().versions.at("torch") == "2.11");
  CHECK(merged.manifest().versions.at("cuda_driver") == "575 | 580");
  CHECK(merged.manifest().merged_from == std::vector<std::string>{b, a});
  for (int rank : {0, 1}) {
    const std::string file = "/" + stream_file_name(rank);
    CHECK(read_bytes(a + file) == read_bytes((folder / "merged") + file));
  }
}

TEST_CASE("runs that are not parts of one job are not merged, and nothing is left behind") {
  const TemporaryFolder folder;
  const std::string a = node_run(folder, "a", {0, 1});
  const std::string same_rank = node_run(folder, "b", {1, 2});
  const std::string other_command = node_run(folder, "c", {2}, [](Manifest* m) { m->command = {"other"}; });
  const std::string other_world = node_run(folder, "d", {2}, [](Manifest* m) { m->world_size = 8; });
  const std::string other_level = node_run(folder, "e", {2}, [](Manifest* m) { m->level = Level::launch; });
  const auto refused = [&](const std::vector<std::string>& runs, const char* expected) {
    CHECK_THROWS_WITH_AS(merge_runs(runs, folder / "out"), doctest::Contains(expected), Error);
    CHECK_FALSE(std::filesystem::exists(folder / "out"));
  };
  refused({a, same_rank}, "both hold rank 1");
  refused({a, other_command}, "the command is `other`, but in");
  refused({a, other_level}, "the level is launch");
  refused({a, other_world}, "rank 2 of a world of 4; the run has a world of 8");
  refused({}, "No run to merge");
  refused({a, folder / "none"}, "no such run");
  CHECK_THROWS_WITH_AS(merge_runs({a}, same_rank), doctest::Contains("not empty"), Error);
  Manifest manifest = read_manifest(a);
  manifest.state = RunState::recording;
  manifest.recorder = {};
  create_run(folder / "live", manifest);
  std::filesystem::copy_file(a + "/rank-00000.fkp", folder / "live/rank-00000.fkp");
  refused({folder / "live"}, "still being recorded");
}

TEST_CASE("the variables that can change numbers are kept, the rest is private") {
  for (const char* variable :
       {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF",
        "TORCH_BLAS_PREFER_CUBLASLT", "NVTE_FLASH_ATTN", "XLA_FLAGS", "JAX_ENABLE_X64", "TF_DETERMINISTIC_OPS",
        "OMP_NUM_THREADS", "MKL_CBWR", "OPENBLAS_CORETYPE", "PYTHONHASHSEED", "TRITON_CACHE_DIR", "CUDNN_LOGLEVEL_DBG",
        "MALLOC_PERTURB_"}) {
    CAPTURE(variable);
    CHECK(is_numeric_environment(variable));
  }
  for (const char* variable :
       {"HOME", "PATH", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "USER", "", "TF_VAR_db",
        "TF_TOKEN_app_terraform_io", "JAX_API_KEY", "TORCH_HUB_PASSWORD", "MY_NCCL_ALGO", "PYTHONPATH"}) {
    CAPTURE(variable);
    CHECK_FALSE(is_numeric_environment(variable));
  }
}
