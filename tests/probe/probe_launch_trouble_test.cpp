// The launch level on programs that make it hard: what cannot be recorded or repeated is said, and the program does what it
// did without us.
#include <doctest/doctest.h>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

std::vector<std::string> program(const std::string& scenario) {
  return {client_path("launch_trouble_client"), client_path("libcuda.so.1"), scenario};
}

struct Recorded {
  TempFolder folder;
  Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<LaunchRow> rows;

  explicit Recorded(const std::string& scenario, const Environment& more = {}, int rank = 0) {
    Environment environment = {{"FORKPOINT_LEVEL", "launch"}, {"FORKPOINT_CUPTI", client_path("libcupti.so.13")}};
    environment.insert(more.begin(), more.end());
    outcome = run_program(program(scenario), under_probe(folder.run(), environment));
    INFO(outcome.err);
    REQUIRE(outcome.status == 0);
    stream = open_stream(folder.run(), rank);
    REQUIRE(stream != nullptr);
    for (size_t i = 0; i < stream->steps().size(); ++i) {
      LaunchColumns columns;
      stream->read_launches(i, &columns);
      rows.insert(rows.end(), columns.rows.begin(), columns.rows.end());
    }
  }
  size_t count(LaunchKind kind) const {
    size_t found = 0;
    for (const LaunchRow& row : rows) found += row.kind == kind;
    return found;
  }
  bool says(const std::string& part) const { return outcome.err.find(part) != std::string::npos; }
};

std::string unrecorded(const std::string& scenario) { return run_program(program(scenario)).out; }

}  // namespace

TEST_CASE("the launches of ranks that are forks of a process without CUDA are recorded") {
  const Recorded recorded("forked_rank", {}, 1);
  CHECK(recorded.outcome.out == "2\n");
  CHECK(recorded.count(LaunchKind::kernel) == 1);
  CHECK(recorded.outcome.err == "");
}

TEST_CASE("CUPTI that failed in the child of such a process is a limit of the child") {
  const Recorded recorded("forked_rank", {{"FAKE_CUPTI_TAKEN", "1"}}, 1);
  CHECK(recorded.outcome.out == "2\n");
  CHECK(recorded.says("kernel launches are not recorded, the job goes on"));
  CHECK(has_limit(*recorded.stream, "another tool holds CUPTI"));
}

TEST_CASE("a launch that writes behind a table of addresses is not repeated, and says why") {
  const Recorded recorded("table_in_place", {{"FORKPOINT_RETRY", "3"}, {"FORKPOINT_LAUNCH", "0:0"}});
  CHECK(recorded.outcome.out == unrecorded("table_in_place"));
  CHECK(recorded.outcome.out == "2\n");
  CHECK(recorded.count(LaunchKind::retry) == 0);
  CHECK(recorded.says("the launch 0:0 was not repeated: it was handed a table of device addresses"));
  CHECK(has_limit(*recorded.stream, "the launch to be repeated could not be"));
}

TEST_CASE("a launch that may write past what was saved of a buffer is not repeated, and says why") {
  const Recorded recorded("past_the_window", {{"FORKPOINT_RETRY", "3"}, {"FORKPOINT_LAUNCH", "0:0"}});
  CHECK(recorded.outcome.out == unrecorded("past_the_window"));
  CHECK(recorded.count(LaunchKind::retry) == 0);
  CHECK(recorded.says("it was handed a buffer whose extent is not known"));
  CHECK(has_limit(*recorded.stream, "the launch to be repeated could not be"));
}

TEST_CASE("launches with many buffers that run ahead of the device are all recorded") {
  for (const std::string scenario : {"many_buffers", "far_ahead"}) {
    CAPTURE(scenario);
    const Recorded recorded(scenario);
    CHECK(recorded.outcome.out == unrecorded(scenario));
    CHECK(recorded.stream->gaps().empty());
    CHECK(recorded.count(LaunchKind::kernel) == (scenario == "many_buffers" ? 600 : 6000));
  }
}

TEST_CASE("a device that never gets done holds the program up once, and for no longer than it was told") {
  const Recorded recorded("never_done", {{"FORKPOINT_RING_WAIT_MS", "300"}});
  CHECK(recorded.outcome.out == "launched\n");
  CHECK(recorded.outcome.seconds < 10);  // of which up to 5 at the end
  CHECK(recorded.says("too many launches on their way"));
}

TEST_CASE("a device that never gets done is waited for once, whatever runs out, and not longer than five seconds at the exit") {
  const Recorded recorded("never_done", {{"FORKPOINT_RING_WAIT_MS", "6000"}});
  CHECK(recorded.says("digests were not computed on the device within"));
  CHECK(recorded.says("too many launches on their way"));
  CHECK(recorded.outcome.seconds > 6);
  CHECK(recorded.outcome.seconds < 16.5);  // 6 and 5, and its own time; twice 6 and 5 are 17
  CHECK_FALSE(recorded.stream->gaps().empty());
}

TEST_CASE("CUPTI is given back behind the last step also when a kernel begins it") {
  const Environment steps = {{"FORKPOINT_STEP_ON", "^turn$"}, {"FORKPOINT_STEPS", "0:1"}};
  for (const std::string scenario : {"free_for_others", "free_at_exit"}) {
    CAPTURE(scenario);
    const Recorded recorded(scenario, steps);
    CHECK(recorded.outcome.out == "0\n");
    CHECK(recorded.count(LaunchKind::kernel) == 2);
  }
  CHECK(Recorded("free_for_others", {{"FORKPOINT_STEP_ON", "^turn$"}}).outcome.out == "1\n");
}

TEST_CASE("a thread that only asks whether work is done does not order it, and one that launches does") {
  CHECK(Recorded("watchdog").count(LaunchKind::synchronize) == 0);
  CHECK(Recorded("own_questions").count(LaunchKind::synchronize) == 2);
}

TEST_CASE("values that streams write to memory are a declared limit") {
  CHECK(has_limit(*Recorded("stream_value").stream, "values that streams write to memory"));
  CHECK_FALSE(has_limit(*Recorded("one_launch").stream, "values that streams write to memory"));
}
