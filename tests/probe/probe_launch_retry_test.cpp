// `forkpoint record --launch STEP:INDEX --retry N`, as a user runs it, on the fake libcuda: what came of it is said.
#include <doctest/doctest.h>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

struct Retried {
  TempFolder folder;
  probe_test::Outcome outcome;

  explicit Retried(const std::string& launch, const std::string& scenario = "steps") {
    outcome = run_program({FORKPOINT_PROGRAM, "record", "-o", folder.run(), "--level", "launch", "--launch", launch, "--retry", "5", "--",
                           client_path("launch_client"), client_path("libcuda.so.1"), scenario},
                          {{"FORKPOINT_CUPTI", client_path("libcupti.so.13")}, {"FORKPOINT_PROBE", probe_path()}});
    INFO(outcome.err);
    CHECK(outcome.status == 0);
  }
  bool says(const std::string& part) const {
    INFO(outcome.err);
    return outcome.err.find(part) != std::string::npos;
  }
  std::vector<std::string> notes() const { return read_manifest(folder.run()).notes; }
};

}  // namespace

TEST_CASE("the result of the repetitions is said at the end of the recording, and kept in the run") {
  const Retried retried("2:0");
  const std::string result = "launch 2:0 scale: 1 output in 5 runs, the recorded one";
  CHECK(retried.says("forkpoint: " + result + "\n"));
  CHECK(retried.notes() == std::vector<std::string>{result});
  const probe_test::Outcome shown = run_program({FORKPOINT_PROGRAM, "show", "--launches", "2", retried.folder.run()});
  CHECK(shown.err.find(result) != std::string::npos);
  const Retried other("2:0");
  const probe_test::Outcome compared = run_program({FORKPOINT_PROGRAM, "diff", retried.folder.run(), other.folder.run()});
  CHECK(compared.out.find("run B: " + result) != std::string::npos);
}

TEST_CASE("a launch that cannot be repeated, or never came, is a warning and not silence") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"2:1", "warning: launch 2:1 is the record of a tensor: nothing to run again\n"},
      {"2:99", "warning: launch 2:99 did not come: step 2 had only "},
      {"9:0", "warning: launch 9:0 did not come: there was no step 9; steps 0 to 3 were recorded\n"},
      {"-1:0", "warning: launch -1:0 is an allocation: nothing to run again\n"}};
  for (const auto& [launch, expected] : cases) {
    CAPTURE(launch);
    const Retried retried(launch);
    CHECK(retried.says(expected));
    REQUIRE(retried.notes().size() == 1);
    CHECK(retried.outcome.err.find(retried.notes()[0]) != std::string::npos);
  }
}

TEST_CASE("a node of a graph is not run again, and is named as such") {
  bool node = false, graph = false;
  for (int index = 0; index < 12 && !(node && graph); ++index) {
    const Retried retried("-1:" + std::to_string(index), "graph");
    REQUIRE(retried.notes().size() == 1);
    node |= retried.says("is a node of a CUDA graph");
    graph |= retried.says("is the launch of a CUDA graph");
  }
  CHECK(node);
  CHECK(graph);
}
