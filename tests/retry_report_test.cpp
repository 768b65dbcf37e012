// What `record --retry` says of the launch that it was to repeat.
#include "lib/retry_report.h"

#include "tests/support/launch_training.h"

using namespace forkpoint;

namespace {

// One step: a set, a kernel that is run again, a kernel in a graph, a copy to the host.
std::unique_ptr<LaunchProgram> program(int rank = 0, int retries = 0, bool unstable = false) {
  auto program = std::make_unique<LaunchProgram>(Machine{}, rank);
  const DeviceBuffer x = program->allocate(16);
  program->step(2);
  program->set(x, 1);
  LaunchOptions options;
  options.retries = retries;
  program->kernel("work", {to(x)}, [unstable](KernelCall& call) { call.buffers[0][0] += unstable ? 7u + static_cast<uint32_t>(call.attempt) : 7u; },
                  options);
  program->graph(1);
  program->kernel("node", {to(x)}, [](KernelCall& call) { ++call.buffers[0][1]; });
  program->end_graph();
  program->copy_to_host(x);
  return program;
}

std::vector<std::string> said(const std::vector<LaunchProgram*>& ranks, int64_t step, uint64_t index, bool repeated = false) {
  const TemporaryFolder folder;
  LaunchRun run(ranks);
  const RetryReport report = report_retry(Run::open(run.write(folder / "run")), step, index, 5);
  CHECK(report.repeated == repeated);
  return report.sentences;
}

std::string said_of_one(int64_t step, uint64_t index) {
  const auto one = program();
  const auto sentences = said({one.get()}, step, index);
  REQUIRE(sentences.size() == 1);
  return sentences[0];
}

}  // namespace

TEST_CASE("what came of the repetitions of a launch is counted") {
  const auto unstable = program(0, 5, true), stable = program(0, 5), fewer = program(0, 3);
  CHECK(said({unstable.get()}, 2, 1, true) == std::vector<std::string>{"launch 2:1 work: 5 outputs in 5 runs"});
  CHECK(said({stable.get()}, 2, 1, true) == std::vector<std::string>{"launch 2:1 work: 1 output in 5 runs, the recorded one"});
  CHECK(said({fewer.get()}, 2, 1) ==
        std::vector<std::string>{"launch 2:1 work: 1 output in 3 runs, the recorded one (5 were asked for)"});
}

TEST_CASE("what is no launch of a kernel by itself cannot be run again, and is named") {
  CHECK(said_of_one(2, 0) == "launch 2:0 is a set (cuMemsetD32Async): nothing to run again");
  CHECK(said_of_one(2, 2) == "launch 2:2 is the launch of a CUDA graph: only launches outside of graphs are run again");
  CHECK(said_of_one(2, 3) == "launch 2:3 is a node of a CUDA graph (node): only launches outside of graphs are run again");
  CHECK(said_of_one(2, 4) == "launch 2:4 is a copy (cuMemcpyDtoHAsync_v2): nothing to run again");
  CHECK(said_of_one(kPrologueStep, 0) == "launch -1:0 is an allocation: nothing to run again");
}

TEST_CASE("a launch that never came is said not to have come, and what came instead") {
  CHECK(said_of_one(2, 13).starts_with("launch 2:13 did not come: step 2 had only "));
  CHECK(said_of_one(2, 13).find(" launches (the last has index ") != std::string::npos);
  CHECK(said_of_one(7, 0) == "launch 7:0 did not come: there was no step 7; step 2 was recorded");
  CHECK(said_of_one(kPrologueStep, 9) == "launch -1:9 did not come: only 1 launch came before the first step (the last has index 0)");
}

TEST_CASE("a kernel that came and was not run again is not passed over in silence") {
  CHECK(said_of_one(2, 1).starts_with("launch 2:1 work was not run again: "));
}

TEST_CASE("ranks that fared alike share a sentence, others have their own") {
  const auto first = program(0, 5), second = program(1, 5), none = program(1, 0);
  CHECK(said({first.get(), second.get()}, 2, 1, true) ==
        std::vector<std::string>{"ranks 0, 1: launch 2:1 work: 1 output in 5 runs, the recorded one"});
  const auto sentences = said({first.get(), none.get()}, 2, 1);
  REQUIRE(sentences.size() == 2);
  CHECK(sentences[0].starts_with("rank 0: launch 2:1 work: 1 output"));
  CHECK(sentences[1].starts_with("rank 1: launch 2:1 work was not run again"));
}
