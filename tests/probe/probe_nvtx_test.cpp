// NVTX ranges of programs that know nothing of the probe: as layers, and as steps.
#include <doctest/doctest.h>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

struct Recorded {
  TempFolder folder;
  Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<Row> rows;

  explicit Recorded(const std::string& scenario, const Environment& more = {}) {
    outcome = run_program({client_path("nvtx_client"), scenario}, under_probe(folder.run(), more));
    INFO(outcome.err);
    REQUIRE(outcome.status == 0);
    stream = open_stream(folder.run());
    CHECK(stream->state() == StreamState::whole);
    rows = all_rows(*stream);
  }
  std::string layer_of(const std::string& tensor) const {
    const std::vector<Row> found = rows_of(rows, tensor);
    INFO(tensor);
    REQUIRE(found.size() == 1);
    return found[0].site.layer;
  }
};

std::vector<int64_t> steps_of(const std::vector<Row>& rows, const std::string& tensor) {
  std::vector<int64_t> steps;
  for (const Row& row : rows_of(rows, tensor)) steps.push_back(row.step);
  return steps;
}

}  // namespace

TEST_CASE("nested ranges are a layer path, in any of NVTX's forms of text") {
  const Recorded recorded("nested");
  CHECK(recorded.outcome.err == "");
  CHECK(recorded.layer_of("a") == "forward");
  CHECK(recorded.layer_of("b") == "forward.blöcke.0 ☃𝄞");
  CHECK(recorded.layer_of("c") == "forward.blöcke.0 ☃𝄞.fc1");
  CHECK(recorded.layer_of("d") == "forward.blöcke.0 ☃𝄞");
  CHECK(recorded.layer_of("e") == "");
  // What the calls return is what they return without a tool.
  CHECK(recorded.outcome.out == run_program({client_path("nvtx_client"), "nested"}).out);
}

TEST_CASE("ranges of several domains may cross, and NCCL's own are no layers") {
  const Recorded recorded("domains");
  CHECK(recorded.layer_of("both") == "block.call");
  CHECK(recorded.layer_of("crossed") == "block.call");
  CHECK(recorded.layer_of("none") == "");
}

TEST_CASE("ranges stand below the layer that the program gives, without the numbers that PyTorch puts in") {
  const Recorded recorded("with_layers");
  CHECK(recorded.layer_of("of the program") == "blocks.0");
  CHECK(recorded.layer_of("below it") == "blocks.0.aten::mm");
  CHECK(recorded.layer_of("outer again") == "outer");
  CHECK(recorded.layer_of("another thread") == "");
  CHECK(rows_of(recorded.rows, "below it")[0].site.phase == Phase::backward);
}

TEST_CASE("FORKPOINT_STEP_ON makes steps of ranges and marks, counted from 0 or from --first-step") {
  for (const int64_t first : {0, 40}) {
    Environment more = {{"FORKPOINT_STEP_ON", "^step [0-9]+$"}};
    if (first != 0) more["FORKPOINT_FIRST_STEP"] = "40";
    const Recorded recorded("steps", more);
    CHECK(recorded.outcome.err == "");
    CHECK(recorded.stream->header().step_base == "step-on");
    CHECK(read_manifest(recorded.folder.run()).step_base == "step-on");
    CHECK(steps_of(recorded.rows, "in it") == std::vector<int64_t>{first, first + 1, first + 2});
    // The mark's own range is no part of the path: its name tells the step's number.
    for (const Row& row : rows_of(recorded.rows, "in it")) CHECK(row.site.layer == "layer");
    CHECK(steps_of(recorded.rows, "before") == std::vector<int64_t>{kPrologueStep});
  }
  const Recorded without("steps");
  CHECK(without.stream->header().step_base == "step(n)");
  CHECK(steps_of(without.rows, "in it") == std::vector<int64_t>{-1, -1, -1});
}

TEST_CASE("steps that the program tells itself are not mixed with marks") {
  const Recorded own("own_steps", {{"FORKPOINT_STEP_ON", "step"}});
  CHECK(steps_of(own.rows, "in it") == std::vector<int64_t>{5, 6});
  CHECK(line_count(own.outcome.err) == 1);
  CHECK(own.outcome.err.find("the program's count") != std::string::npos);
  const Recorded marks("marks_then_own_steps", {{"FORKPOINT_STEP_ON", "step"}});
  CHECK(steps_of(marks.rows, "in it") == std::vector<int64_t>{1, 2});
  CHECK(line_count(marks.outcome.err) == 1);
  CHECK(marks.outcome.err.find("the marks count") != std::string::npos);
}

TEST_CASE("a malformed FORKPOINT_STEP_ON is named, and the program runs on unrecorded") {
  const TempFolder folder;
  const Outcome outcome =
      run_program({client_path("nvtx_client"), "own_steps"}, under_probe(folder.run(), {{"FORKPOINT_STEP_ON", "*("}}));
  CHECK(outcome.status == 0);
  CHECK(line_count(outcome.err) == 1);
  CHECK(outcome.err.find("forkpoint: FORKPOINT_STEP_ON is \"*(\"") == 0);
}

TEST_CASE("too many names of ranges are a coverage limit, and cost no record") {
  const Recorded recorded("many_names");
  CHECK(recorded.layer_of("late") == "");
  CHECK(has_limit(*recorded.stream, "distinct names of NVTX ranges"));
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("a number that counts on at the end of a name makes no layers without end, and the layers of a deep model stay") {
  const Recorded recorded("counting");
  CHECK(recorded.layer_of("64th") == "iter 63");
  CHECK(recorded.layer_of("65th") == "iter #");
  CHECK(recorded.layer_of("iter") == "iter #");
  CHECK(recorded.layer_of("early") == "iter 3");  // what was seen keeps its name
  CHECK(recorded.layer_of("equals") == "step=#");
  CHECK(recorded.layer_of("hash") == "batch ##");
  CHECK(recorded.layer_of("colon") == "i:#");
  CHECK(recorded.layer_of("brackets") == "epoch (#)");
  CHECK(recorded.layer_of("of") == "batch [#]");
  CHECK(recorded.layer_of("word") == "iter#");
  CHECK(recorded.layer_of("attn") == "blocks.199.attn");
  CHECK(recorded.layer_of("block") == "blocks.199");
  CHECK(recorded.layer_of("layer") == "layer199");
  CHECK(recorded.layer_of("index") == "layers[199]");
  CHECK(recorded.layer_of("late") == "one more");
  CHECK_FALSE(has_limit(*recorded.stream, "distinct names of NVTX ranges"));
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("a step mark sees the number of a name that is collapsed in layers") {
  const Recorded all("counting_steps", {{"FORKPOINT_STEP_ON", "^turn [0-9]+$"}});
  REQUIRE(steps_of(all.rows, "in it").size() == 200);
  CHECK(steps_of(all.rows, "in it").back() == 199);
  const Recorded some("counting_steps", {{"FORKPOINT_STEP_ON", "^turn 1[0-9][05]$"}});
  CHECK(steps_of(some.rows, "in it").back() == 19);
}

TEST_CASE("ranges deeper than any stack of ours do not shift those that follow") {
  const Recorded recorded("deep");
  CHECK(recorded.layer_of("after") == "shallow");
  CHECK(has_limit(*recorded.stream, "scopes nested deeper"));
}

TEST_CASE("another NVTX tool keeps its place, and the run says so") {
  const Recorded recorded("nested", {{"NVTX_INJECTION64_PATH", "/nowhere/libtool.so"}});
  CHECK(recorded.layer_of("c") == "");
  CHECK(has_limit(*recorded.stream, "NVTX_INJECTION64_PATH names another library"));
  CHECK_FALSE(has_limit(*Recorded("nested").stream, "NVTX"));
}

TEST_CASE("a dormant probe leaves NVTX alone") {
  const std::vector<std::string> command = {client_path("nvtx_client"), "environment"};
  CHECK(run_program(command, {{"LD_PRELOAD", preload()}}).out == "unset\n");
  const TempFolder folder;
  CHECK(run_program(command, under_probe(folder.run())).out == probe_path() + "\n");
  // Found by NVTX through its variable while it sleeps: nothing happens.
  const Outcome named = run_program(command, {{"NVTX_INJECTION64_PATH", probe_path()}});
  CHECK(named.status == 0);
  CHECK(named.err == "");
}
