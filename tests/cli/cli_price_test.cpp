// forkpoint price on jobs of which it is known what they need and what that costs.
#include <doctest/doctest.h>

#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Words = std::vector<std::string>;

constexpr char kFour[] = "--deterministic=cublas,nvte,python-hash,nccl";
const Words kTrainer = {TINY_TRAINER, "50", "--pause", "2"};

// None of the knobs' variables is set by whoever runs the tests.
ProgramOptions plain() {
  ProgramOptions options;
  for (const char* name : {"CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "PYTHONHASHSEED", "NCCL_ALGO", "NCCL_NVLS_ENABLE"}) {
    options.environment[name] = std::nullopt;
  }
  return options;
}

ProgramResult price(const std::string& folder, const Words& options, const Words& command, const ProgramOptions& how = plain()) {
  return run_forkpoint(words(words({"price", "-o", folder, "--steps", "2:6"}, options), words({"--"}, command)), how);
}

nlohmann::json arm(const nlohmann::json& priced, const std::string& name) {
  for (const auto& one : priced["arms"]) {
    if (one["arm"] == name) return one;
  }
  return {};
}

}  // namespace

TEST_CASE("the knobs that a job needs are found, and what one costs is seen") {
  const TemporaryFolder folder;
  const Words job = words(kTrainer, {"--repeats-with", "CUBLAS_WORKSPACE_CONFIG,PYTHONHASHSEED", "--slowed-by", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"});
  const ProgramResult result = price(folder / "runs", {kFour, "--json", "--html", folder / "price.html"}, job);
  INFO(result.err << result.out);
  REQUIRE(result.status == 0);
  const nlohmann::json priced = parsed(result);
  CHECK(priced["cheapest"]["knobs"] == nlohmann::json{"cublas", "python-hash"});
  CHECK(priced["cheapest"]["repeats"] == true);
  CHECK(priced["headline"].get<std::string>().starts_with("repeats with 2 of 4 knobs, at "));
  CHECK(priced["repeats_without"] == false);
  CHECK(priced["repeats_with_all"] == true);
  CHECK(arm(priced, "fast")["difference"].get<std::string>().find("layer.0") != std::string::npos);
  CHECK(arm(priced, "cublas")["repeats"] == false);  // one of two is not enough
  // A step of at least 2 ms against one of at least 42.
  CHECK(arm(priced, "nvte")["difference_measured"] == true);
  CHECK(arm(priced, "nvte")["step_ms"] >= 42);
  CHECK(arm(priced, "all")["step_ms"] >= 42);
  CHECK(arm(priced, "fast")["step_ms"] >= 2);
  CHECK(arm(priced, "fast")["step_ms"] < arm(priced, "nvte")["step_ms"]);
  const std::string page = file_content(folder / "price.html");
  CHECK(page.find("<svg") != std::string::npos);
  CHECK(page.find("<script") == std::string::npos);
  CHECK(page.find("repeats with 2 of 4 knobs") != std::string::npos);
  CHECK(fs::exists(folder / "runs/fast-3/run.json"));
}

TEST_CASE("a job that repeats by itself needs no knob") {
  const TemporaryFolder folder;
  const ProgramResult result = price(folder / "runs", {"--deterministic=cublas,nvte", "--skip-alone"}, kTrainer);
  INFO(result.err << result.out);
  CHECK(result.status == 0);
  CHECK(result.out.starts_with("repeats without any knob (3 runs); "));
  CHECK(result.out.find("equal runs are no proof") != std::string::npos);
}

TEST_CASE("a job that no knob mends is said to repeat with none, and where it differs") {
  const TemporaryFolder folder;
  const ProgramResult result = price(folder / "runs", {"--deterministic=cublas,nvte"}, words(kTrainer, {"--repeats-with", "NO_SUCH_VARIABLE"}));
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(result.out.starts_with("does not repeat, not even with 2 knobs: diverged at step 6"));
}

TEST_CASE("a knob that repeats alone is found, though what another knob sets undoes it") {
  const TemporaryFolder folder;
  const ProgramResult result =
      price(folder / "runs", {"--deterministic=cublas,nvte", "--json"},
            words(kTrainer, {"--repeats-with", "CUBLAS_WORKSPACE_CONFIG", "--undone-by", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"}));
  INFO(result.err << result.out);
  CHECK(result.status == 0);
  const nlohmann::json priced = parsed(result);
  CHECK(priced["repeats_with_all"] == false);
  CHECK(priced["cheapest"]["knobs"] == nlohmann::json{"cublas"});
  CHECK(priced["headline"].get<std::string>().find("repeats with 1 of 2 knobs") == 0);
  CHECK(priced["headline"].get<std::string>().find("though not with all of them") != std::string::npos);
}

TEST_CASE("what the user has set is kept, and a knob that does not get its way is not priced") {
  const TemporaryFolder folder;
  ProgramOptions how = plain();
  how.environment["CUBLAS_WORKSPACE_CONFIG"] = ":0:0";
  const ProgramResult result = price(folder / "runs", {"--deterministic=cublas,nvte", "--skip-alone", "--json"}, kTrainer, how);
  INFO(result.err << result.out);
  const nlohmann::json priced = parsed(result);
  CHECK(arm(priced, "all")["knobs"] == nlohmann::json{"nvte"});
  REQUIRE(priced["not_in_force"].size() == 1);
  CHECK(priced["not_in_force"][0].get<std::string>().starts_with("The knob cublas is not in force: CUBLAS_WORKSPACE_CONFIG=:0:0"));
}

TEST_CASE("a job that does not get there is trouble, and so are steps that leave nothing to time") {
  const TemporaryFolder folder;
  const ProgramResult result = price(folder / "runs", {kFour}, {TINY_TRAINER, "4"});
  INFO(result.err << result.out);
  CHECK(result.status == 2);
  CHECK(result.err.find("without any knob the job did not do steps 2 to 6") != std::string::npos);
  CHECK(run_forkpoint({"price", "--steps", "5:5", "--", "true"}).err.find("leaves nothing to be timed") != std::string::npos);
  CHECK(run_forkpoint({"price", "--rounds", "1", "--", "true"}).status == 2);
  CHECK(run_forkpoint({"price", "--deterministic=none", "--", "true"}).status == 2);
}

TEST_CASE("minigpt with a sum in no fixed order needs the knob of the library that has the order") {
  const TemporaryFolder folder;
  const ProgramResult result = run_forkpoint(
      words({"price", "-o", folder / "runs", "--steps", "4:30", "--rounds", "2", "--json", "--deterministic=cublas,nvte,python-hash", "--"},
            words(kMinigpt, {"--fault", "unordered@rank=1,layer=1"})),
      plain());
  INFO(result.err << result.out);
  REQUIRE(result.status == 0);
  const nlohmann::json priced = parsed(result);
  CHECK(priced["repeats_without"] == false);
  CHECK(priced["cheapest"]["knobs"] == nlohmann::json{"cublas"});
  CHECK(arm(priced, "nvte")["repeats"] == false);
}

}  // namespace forkpoint
