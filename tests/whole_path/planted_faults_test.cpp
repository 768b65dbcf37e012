// Records minigpt clean and with each planted fault, and holds the verdict against what is known to be true.
// FORKPOINT_TEST_DEVICE (cpu | cuda) and FORKPOINT_TEST_RANKS choose the backend.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

std::string environment(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value ? value : fallback;
}
const std::string kDevice = environment("FORKPOINT_TEST_DEVICE", "cpu");
const int kRanks = std::stoi(environment("FORKPOINT_TEST_RANKS", "4"));
const bool kSumOrderCanShow = kRanks >= 3;  // with two ranks a + b is b + a bit for bit
constexpr int kSteps = 6;

// A folder for this process's runs, removed at exit.
const fs::path& scratch() {
  static const struct Scratch {
    fs::path path;
    Scratch() {
      std::string pattern = (fs::temp_directory_path() / "forkpoint-faults-XXXXXX").string();
      path = mkdtemp(pattern.data());
    }
    ~Scratch() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
  } instance;
  return instance.path;
}

int run_shell(const std::string& command) {
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Records minigpt into scratch()/name and returns the run's path. record_options go to `forkpoint record`.
std::string record(const std::string& name, const std::string& options, const std::string& record_options = "--level layer") {
  const std::string run = (scratch() / name).string();
  const std::string log = run + ".log";
  const std::string command = fmt::format("{0}/forkpoint record {1} -o {2} -- {0}/samples/minigpt --device {3} --ranks {4} --steps {5} --seed 3 {6} >{7} 2>&1",
                                          BUILD_DIRECTORY, record_options, run, kDevice, kRanks, kSteps, options, log);
  const int status = run_shell(command);
  std::ifstream text(log);
  INFO(command << "\n" << std::string(std::istreambuf_iterator<char>(text), {}));
  REQUIRE(status == 0);
  return run;
}

const std::string& clean_run() {
  static const std::string run = record("clean", "");
  return run;
}

struct Diff {
  json verdict;
  int status = -1;
};

Diff diff(const std::string& a, const std::string& b, const std::string& options = "") {
  const std::string output = (scratch() / "verdict.json").string();
  Diff result;
  result.status = run_shell(fmt::format("{}/forkpoint diff {} {} --json {} >{} 2>{}.err", BUILD_DIRECTORY, a, b, options, output, output));
  std::ifstream file(output);
  result.verdict = json::parse(file, nullptr, false);
  REQUIRE_FALSE(result.verdict.is_discarded());
  return result;
}

Diff diff_with_fault(const std::string& name, const std::string& fault) {
  return diff(clean_run(), record(name, "--fault " + fault));
}

bool has(const json& list, const std::string& text) {
  for (const json& entry : list)
    if (entry.is_string() && entry.get<std::string>().find(text) != std::string::npos) return true;
  return false;
}

// rank: a number, or null where all diverge alike.
void check_first(const Diff& d, int step, const json& rank, const std::string& phase, const json& layer, const std::string& tensor) {
  INFO(d.verdict.dump(2));
  CHECK(d.status == 1);
  CHECK(d.verdict.at("verdict") == "diverged");
  REQUIRE(d.verdict.at("first").is_object());
  const json& first = d.verdict.at("first");
  CHECK(first.at("step") == step);
  CHECK(first.at("rank") == rank);
  CHECK(first.at("phase") == phase);
  CHECK(first.at("layer") == layer);
  CHECK(first.at("tensor") == tensor);
  CHECK(d.verdict.at("also_first").empty());
}

void check_class(const Diff& d, const std::string& cls) {
  INFO(d.verdict.at("cause").dump(2));
  CHECK(d.verdict.at("cause").at("class") == cls);
}

void check_one_flipped_bit(const Diff& d) {
  const json& pointing = d.verdict.at("first").at("pointing");
  REQUIRE(pointing.is_object());
  CHECK(pointing.at("bit") == 20);
  CHECK(pointing.at("tensor_index").is_array());
}

}  // namespace

TEST_CASE("two clean runs are identical") {
  const Diff d = diff(clean_run(), record("clean-again", ""));
  INFO(d.verdict.dump(2));
  CHECK(d.status == 0);
  CHECK(d.verdict.at("verdict") == "identical");
  CHECK(d.verdict.at("records_compared").get<uint64_t>() > 1000u * kRanks);
  CHECK(d.verdict.at("first").is_null());
}

TEST_CASE("a flipped bit in a weight is named where the weight is first used") {
  const Diff d = diff_with_fault("weight", "bitflip@step=3,rank=1,layer=2,target=weight");
  check_first(d, 3, 1, "forward", "blocks.2.mlp.fc1", "weight");
  check_one_flipped_bit(d);
  CHECK(has(d.verdict.at("cause").at("class_candidates"), "hardware_or_sporadic"));
  CHECK(has(d.verdict.at("cause").at("class_candidates"), "overwritten_input"));
}

TEST_CASE("a flipped bit in an activation is named at the layer's output") {
  const Diff d = diff_with_fault("activation", "bitflip@step=2,rank=0,layer=1,target=activation");
  check_first(d, 2, 0, "forward", "blocks.1.mlp.fc1", "output");
  check_one_flipped_bit(d);
  CHECK(has(d.verdict.at("cause").at("class_candidates"), "hardware_or_sporadic"));
  CHECK(d.verdict.at("cause").at("class_candidates").size() > 1);  // digests alone never convict the hardware
}

TEST_CASE("a flipped bit in a gradient is named before the all-reduce spreads it") {
  const Diff d = diff_with_fault("gradient", "bitflip@step=4,rank=1,layer=3,target=grad");
  check_first(d, 4, 1, "backward", "blocks.3.mlp.fc1", "weight.grad");
  check_one_flipped_bit(d);
  CHECK(d.verdict.at("ranks_diverged").size() == static_cast<size_t>(kRanks));
}

TEST_CASE("a fault in the first step, the first layer and the last rank is named as well") {
  const Diff d = diff_with_fault("corner", fmt::format("bitflip@step=0,rank={},layer=0,target=grad", kRanks - 1));
  check_first(d, 0, kRanks - 1, "backward", "blocks.0.mlp.fc1", "weight.grad");
}

TEST_CASE("a sum in another order inside one layer is named on its rank") {
  const Diff d = diff_with_fault("reorder-layer", "reorder@step=1,rank=1,layer=0");
  check_first(d, 1, 1, "forward", "blocks.0.mlp.fc1", "output");
  check_class(d, "nondeterministic_op");
  CHECK(has(d.verdict.at("cause").at("class_candidates"), "unordered_accumulation"));
  CHECK(has(d.verdict.at("cause").at("class_candidates"), "algorithm_choice"));
}

TEST_CASE("an all-reduce that sums ranks in another order is named as the collective, on all ranks alike") {
  const Diff d = diff_with_fault("reorder-collective", "reorder@step=2,layer=1");
  if (!kSumOrderCanShow) {
    CHECK(d.status == 0);
    CHECK(d.verdict.at("verdict") == "identical");
    return;
  }
  check_first(d, 2, nullptr, "collective", "blocks.1.mlp.fc1", "weight.grad");
  CHECK(d.verdict.at("first").at("kind") == "collective");
  CHECK(d.verdict.at("first").at("op") == "all_reduce");
  check_class(d, "reduction_order");
}

TEST_CASE("another batch is named in the data phase") {
  const Diff d = diff_with_fault("data", "data@step=3,rank=1");
  check_first(d, 3, 1, "data", nullptr, "tokens");
  check_class(d, "data_order");
}

TEST_CASE("another dropout seed is named as generator state, not as the dropout layer") {
  const Diff d = diff_with_fault("seed", "dropout-seed@step=2,rank=0");
  check_first(d, 2, 0, "state", nullptr, "dropout.rng");
  check_class(d, "rng_state");
}

TEST_CASE("a second cause on a rank that the first one has reached is not lost") {
  const Diff d = diff_with_fault("two-causes", "bitflip@step=1,rank=0,layer=1 --fault lr@step=1,rank=1");
  check_first(d, 1, 0, "backward", "blocks.1.mlp.fc1", "weight.grad");
  CHECK(has(d.verdict.at("cause").at("evidence"), "may be a second cause: rank 1, optimizer: lr"));
}

TEST_CASE("another learning rate is named as a scalar on all ranks") {
  const Diff d = diff_with_fault("lr", "lr@step=3");
  check_first(d, 3, nullptr, "optimizer", nullptr, "lr");
  CHECK(d.verdict.at("first").at("kind") == "scalar");
  check_class(d, "hyperparameter");
}

TEST_CASE("a rank that keeps its own gradient is named at that collective") {
  const Diff d = diff_with_fault("skip", "skip-allreduce@step=2,rank=1,layer=2");
  check_first(d, 2, 1, "collective", "blocks.2.mlp.fc1", "weight.grad");
  CHECK(d.verdict.at("first").at("kind") == "collective");
  check_class(d, "missing_sync");
}

TEST_CASE("a NaN is named where it was born, on its rank") {
  const Diff d = diff_with_fault("nan", "nan@step=2,rank=1,layer=3");
  check_first(d, 2, 1, "forward", "blocks.3.mlp.fc1", "output");
  CHECK(has(d.verdict.at("cause").at("evidence"), "finite"));
}

TEST_CASE("momentum that a resume lost is named at the load") {
  const std::string checkpoints = (scratch() / "checkpoints").string();
  const std::string straight = record("straight", fmt::format("--checkpoint-dir {} --checkpoint-every 3", checkpoints));
  REQUIRE(diff(clean_run(), straight).status == 0);  // saving a checkpoint changes nothing

  // A resumed run goes on from the newest checkpoint and saves its own: each gets a folder that holds that of step 3 alone.
  const auto record_resumed = [&](const std::string& name, const std::string& fault) {
    const fs::path own = scratch() / (name + "-checkpoints");
    fs::copy(checkpoints, own, fs::copy_options::recursive);
    fs::path newest;
    for (const auto& entry : fs::directory_iterator(own)) newest = std::max(newest, entry.path());
    fs::remove_all(newest);
    return record(name, fmt::format("--resume --checkpoint-dir {} {}", own.string(), fault));
  };
  const std::string resumed = record_resumed("resumed", "");
  const Diff exact = diff(straight, resumed, fmt::format("--steps 3:{}", kSteps - 1));
  INFO(exact.verdict.dump(2));
  CHECK(exact.status == 0);

  const Diff d = diff(straight, record_resumed("lost", "--fault lost-momentum@layer=1,rank=1"));
  check_first(d, 3, 1, "load", "blocks.1.mlp.fc1", "weight.exp_avg");
  check_class(d, "state_restore");
  const Diff both_resumed = diff(resumed, record_resumed("lost-again", "--fault lost-momentum@layer=1,rank=1"));
  check_first(both_resumed, 3, 1, "load", "blocks.1.mlp.fc1", "weight.exp_avg");
  check_class(both_resumed, "state_restore");
}

TEST_CASE("at step level a gradient's flipped bit is still named, with its layer") {
  const std::string options = "--level step";
  const std::string clean = record("clean-step-level", "", options);
  const Diff d = diff(clean, record("gradient-step-level", "--fault bitflip@step=4,rank=1,layer=3,target=grad", options));
  check_first(d, 4, 1, "backward", "blocks.3.mlp.fc1", "weight.grad");
}

TEST_CASE("a run that was killed in the middle is never called identical") {
  const std::string run = record("killed", "");
  fs::resize_file(fs::path(run) / "rank-00001.fkp", fs::file_size(fs::path(run) / "rank-00001.fkp") / 2);
  const Diff d = diff(clean_run(), run);
  CHECK(d.status == 2);
  CHECK(d.verdict.at("verdict") == "incomparable");
  CHECK_FALSE(d.verdict.at("gaps").empty());
}
