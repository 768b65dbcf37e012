#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
auto lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

struct Runs {
  TemporaryFolder folder;
  std::string small = folder / "small", large = folder / "large";
  Runs() {
    make_run(small, {});
    make_run(large, {.ranks = 40, .steps = 2, .layers = 96});
  }
};
const Runs& runs() {
  static const Runs made;
  return made;
}

nlohmann::json json_of(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"show", "--json"});
  return nlohmann::json::parse(run_forkpoint(arguments).out);
}

}  // namespace

TEST_CASE("without filters a run is shown on one screen, however large") {
  for (const std::string& run : {runs().small, runs().large}) {
    const ProgramResult result = run_forkpoint({"show", run});
    CHECK(result.status == 0);
    CHECK(result.out.starts_with(run + "\n"));
    CHECK(lines(result.out) <= 40);
    CHECK(contains(result.out, "state     whole; command: exited with status 0"));
    CHECK(contains(result.out, "./train --steps"));
  }
  const std::string small = run_forkpoint({"show", runs().small}).out;
  CHECK(contains(small, "6 (0 to 5), all complete"));
  CHECK(contains(small, "2 of 2: ranks 0, 1"));
  CHECK(contains(small, "blocks.*.mlp.fc1"));
}

TEST_CASE("a filter lists the records that match, with form, digest and statistics") {
  const ProgramResult result = run_forkpoint(
      {"show", runs().small, "--steps", "2", "--ranks", "1", "--phase", "backward", "--layer", "blocks.1.*"});
  CHECK(result.status == 0);
  CHECK(lines(result.out) == 3);
  CHECK(result.out.starts_with("rank 1, step 2\n"));
  CHECK(contains(result.out, "backward   blocks.1.mlp.fc1: weight.grad"));
  CHECK(contains(result.out, "f32[64, 32]"));
  CHECK(contains(result.out, "absmax "));
  const ProgramResult scalars =
      run_forkpoint({"show", runs().small, "--tensor", "l[ro]*", "--steps", "0:1", "--ranks", "0"});
  CHECK(contains(scalars.out, "loss  scalar  value 4"));
  CHECK(contains(scalars.out, "value 0.001"));
}

TEST_CASE("--records lists everything and --summary a line a step and rank") {
  CHECK(lines(run_forkpoint({"show", runs().small, "--records"}).out) > 200);
  const ProgramResult result = run_forkpoint({"show", runs().small, "--summary", "--ranks", "0", "--steps", "1:3"});
  CHECK(lines(result.out) == 3);
  CHECK(contains(result.out, "step 2"));
  CHECK(run_forkpoint({"show", runs().small, "--summary", "--layer", "x"}).status == 2);
}

TEST_CASE("--json is one object with the same fields whatever was asked for") {
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{}, {"--records"}, {"--summary"}, {"--steps", "99"}}) {
    std::vector<std::string> arguments{runs().small};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto json = json_of(arguments);
    for (const char* key : {"run", "state", "manifest", "ranks", "missing_ranks", "step_count", "first_step",
                            "last_step", "incomplete_steps", "record_count", "bytes_hashed", "size_bytes", "layers",
                            "gaps", "coverage_limits", "steps", "records", "problems"}) {
      CHECK_MESSAGE(json.contains(key), key);
    }
  }
  const auto json = json_of({runs().small, "--steps", "4", "--ranks", "0", "--tensor", "loss"});
  REQUIRE(json["records"].size() == 1);
  const auto& record = json["records"][0];
  for (const char* key : {"step",          "rank",   "micro_step", "call",         "phase", "layer", "op",
                          "tensor",        "kind",   "role",       "communicator", "dtype", "shape", "global_shape",
                          "global_offset", "digest", "absmax",     "nonfinite",    "value", "eval",  "recompute"}) {
    CHECK_MESSAGE(record.contains(key), key);
  }
  CHECK(record["value"] == 4.0 / std::sqrt(5.0));
  CHECK(record["digest"].get<std::string>().size() == 32);
  CHECK(json["manifest"]["command"][0] == "./train");
  CHECK(json_of({runs().small, "--steps", "99"})["records"].empty());
}

TEST_CASE("nothing that matches is said on stderr") {
  const ProgramResult result = run_forkpoint({"show", runs().small, "--layer", "no.such.layer"});
  CHECK(result.status == 0);
  CHECK(result.out.empty());
  CHECK(contains(result.err, "nothing in it matches"));
  CHECK(contains(run_forkpoint({"show", runs().small, "--phase", "sideways"}).err, "backward"));
}

TEST_CASE("a broken run shows what can be read, and what is wrong") {
  const TemporaryFolder folder;
  make_run(folder / "run", {.ranks = 3, .leave_out = {2}});
  std::ofstream(folder / "run/rank-00001.fkp") << "this is no stream";
  fs::resize_file(folder / "run/rank-00000.fkp", fs::file_size(folder / "run/rank-00000.fkp") * 2 / 3);
  const ProgramResult result = run_forkpoint({"show", folder / "run"});
  CHECK(result.status == 0);
  CHECK(contains(result.out, "state     died"));
  CHECK(contains(result.out, "1 of 3: rank 0; missing: ranks 1, 2"));
  CHECK(contains(result.out, "  problem   "));
  CHECK(contains(result.out, "rank-00001.fkp"));
  CHECK(contains(result.out, "  gap       rank 0"));
}

TEST_CASE("of a run without a readable stream the manifest is shown, and that it is trouble") {
  const TemporaryFolder folder;
  make_run(folder / "run", {.leave_out = {0, 1}});
  const ProgramResult result = run_forkpoint({"show", folder / "run"});
  CHECK(result.status == 2);
  CHECK(contains(result.out, "./train"));
  CHECK(contains(result.out, "  problem   "));
  CHECK(json_of({folder / "run"})["problems"].size() == 1);
  CHECK(run_forkpoint({"show", folder / "absent"}).status == 2);
}

TEST_CASE("`| head` is quiet") {
  const ProgramResult result =
      run_shell("$FORKPOINT show --records " + runs().large + " | head -n 1; echo ${PIPESTATUS[0]}");
  CHECK(result.out.ends_with("\n0\n"));
  CHECK(result.err.empty());
}

}  // namespace forkpoint
