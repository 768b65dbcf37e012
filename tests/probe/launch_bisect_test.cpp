// `forkpoint bisect` down to the launch, as a user runs it, on the fake libcuda.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::string trainer(const std::string& fault = "") {
  return client_path("launch_trainer") + " " + client_path("libcuda.so.1") + " 8" + (fault.empty() ? "" : " " + fault);
}

struct Bisected {
  TempFolder folder;
  probe_test::Outcome outcome;

  Bisected(const std::string& good, const std::string& bad, const std::vector<std::string>& more = {}) {
    std::vector<std::string> command = {FORKPOINT_PROGRAM, "bisect", "--good", good, "--bad", bad, "--steps", "0:7", "-o", folder.run()};
    command.insert(command.end(), more.begin(), more.end());
    outcome = run_program(command, {{"FORKPOINT_CUPTI", client_path("libcupti.so.13")}, {"FORKPOINT_PROBE", probe_path()}});
  }
};

}  // namespace

TEST_CASE("a launch that gives another value in one arm is found, with its operands, and repeats itself in each arm") {
  const Bisected bisected(trainer(), trainer("other 5"));
  INFO(bisected.outcome.err);
  INFO(bisected.outcome.out);
  CHECK(bisected.outcome.status == 1);
  CHECK(bisected.outcome.out.starts_with("diverged at step 5, rank 0, forward, blocks.1: smooth"));
  CHECK(has(bisected.outcome.out, "blocks.1: output: 1 of 256 elements differ"));
  CHECK(has(bisected.outcome.out, "forward, blocks.1 (smooth): parameter byte 8 (allocation 2), before: all 1,024 bytes are equal"));
  CHECK(has(bisected.outcome.out, "its buffers agree, its parameters and its output differ"));
  CHECK_FALSE(has(bisected.outcome.out, "unordered_accumulation"));  // it repeats itself, in each arm
  CHECK(has(bisected.outcome.out, "smooth: 1 output in 20 runs, the recorded one"));
}

TEST_CASE("a launch that gives values of its own each time is found, and its repetitions show it") {
  const Bisected bisected(trainer("drawn 3"), trainer("drawn 3"));
  INFO(bisected.outcome.err);
  INFO(bisected.outcome.out);
  CHECK(bisected.outcome.status == 1);
  CHECK(bisected.outcome.out.starts_with("diverged at step 3, rank 0, forward, blocks.1: smooth"));
  CHECK(has(bisected.outcome.out, "unordered_accumulation"));  // as the repetitions decide
  CHECK(has(bisected.outcome.out, "good: launch 3:"));
  CHECK(has(bisected.outcome.out, "bad: launch 3:"));
  CHECK(has(bisected.outcome.out, "smooth: 20 outputs in 20 runs"));
}

TEST_CASE("two arms that do the same are identical down to their launches") {
  const Bisected bisected(trainer(), trainer());
  INFO(bisected.outcome.err);
  CHECK(bisected.outcome.status == 0);
  CHECK(bisected.outcome.out.starts_with("identical"));
}
