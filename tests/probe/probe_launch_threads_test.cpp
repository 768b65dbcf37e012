// Threads as ranks of one process: what they launch at the same time is recorded, each row with the digests that are
// its own, and nothing of the probe is used by one thread while another changes or frees it (built with a sanitizer,
// this says so).
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "lib/digest_mix.h"
#include "tests/probe/harness.h"
#include "tests/probe/launch_threads_client.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;
using namespace launch_threads;

namespace {

probe_test::Outcome run_ranks(const std::string& run, const std::string& scenario, const Environment& more = {}) {
  Environment environment =
      under_probe(run, {{"FORKPOINT_LEVEL", "launch"}, {"FORKPOINT_CUPTI", client_path("libcupti.so.13")}});
  environment.insert(more.begin(), more.end());
  return run_program({client_path("launch_threads_client"), client_path("libcuda.so.1"), scenario}, environment);
}

using DigestSet = std::multiset<std::pair<uint64_t, uint64_t>>;
void add(DigestSet& digests, const Digest& digest) { digests.emplace(digest.a, digest.b); }

Digest digest_of(float value) {
  const std::vector<float> values(kCount, value);
  return digest_only(values.data(), values.size() * sizeof(float));
}

// Of everything that the kernel `put` must have left.
DigestSet expected_digests() {
  DigestSet digests;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int step = 0; step < kSteps; ++step) {
      for (int round = 0; round < kRounds; ++round) add(digests, digest_of(put_value(rank, step, round)));
      for (int i = 0; i < kReplays; ++i) add(digests, digest_of(graph_value(rank, step)));
      add(digests, digest_of(static_cast<float>(rank + step)));
    }
  }
  return digests;
}

DigestSet recorded_digests(const HashStreamReader& stream) {
  DigestSet digests;
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    LaunchColumns columns;
    stream.read_launches(i, &columns);
    size_t buffer = 0;
    for (const LaunchRow& row : columns.rows) {
      const bool puts = row.kind == LaunchKind::kernel && stream.sites()[row.site].tensor == "put";
      for (const size_t end = buffer + row.buffers; buffer < end; ++buffer) {
        if (puts && (columns.buffers[buffer].flags & kBufferBefore) == 0) add(digests, columns.buffers[buffer].digest);
      }
    }
  }
  return digests;
}

void check_complete(const Environment& more) {
  const TempFolder folder;
  const probe_test::Outcome outcome = run_ranks(folder.run(), "ranks", more);
  INFO(outcome.err);
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "right\n");
  CHECK(outcome.err == "");
  const auto stream = open_stream(folder.run());
  REQUIRE(stream);
  CHECK(stream->state() == StreamState::whole);
  CHECK(stream->gaps().empty());
  CHECK(recorded_digests(*stream) == expected_digests());
  // Of each all-reduce its reduction, its input and its output.
  CHECK(all_rows(*stream).size() == size_t{kRanks} * kSteps * kReductions * 3);
}

}  // namespace

TEST_CASE("what ranks that are threads launch at the same time is recorded whole, each launch with its own digests") {
  check_complete({});
}

TEST_CASE("and where the device is slow, and the ring is short") {
  check_complete({{"SLOW", "1"}, {"FORKPOINT_RING_SLOTS", "256"}, {"FORKPOINT_RING_WAIT_MS", "20000"}});
}

TEST_CASE("with the values before each launch as well") { check_complete({{"FORKPOINT_INPUTS", "1"}}); }

TEST_CASE("calls of the driver that fail, the probe's own too, cost a gap and never the job") {
  const TempFolder folder;
  const probe_test::Outcome outcome = run_ranks(folder.run(), "failing");
  INFO(outcome.err);
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "right\n");
  const auto stream = open_stream(folder.run());
  REQUIRE(stream);
  CHECK(stream->state() == StreamState::whole);
  CHECK(has_gap(*stream, "the digest kernel could not be launched"));
}

namespace {

struct Marked {
  TempFolder folder;
  std::unique_ptr<HashStreamReader> stream;
  explicit Marked(const std::string& scenario) {
    const probe_test::Outcome outcome = run_ranks(folder.run(), scenario, {{"FORKPOINT_STEP_ON", "mark"}});
    INFO(outcome.err);
    CHECK(outcome.status == 0);
    CHECK(outcome.err == "");
    stream = open_stream(folder.run());
    REQUIRE(stream);
    CHECK(stream->gaps().empty());
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> numbers;
    for (const StepSummary& step : stream->steps()) numbers.push_back(step.step);
    return numbers;
  }
  std::vector<std::string> kernels_of(size_t step) const {
    LaunchColumns columns;
    stream->read_launches(step, &columns);
    std::vector<std::string> names;
    for (const LaunchRow& row : columns.rows) {
      if (row.kind == LaunchKind::kernel) names.push_back(stream->sites()[row.site].tensor);
    }
    return names;
  }
};

std::vector<int64_t> numbers_to(int64_t end) {
  std::vector<int64_t> numbers;
  for (int64_t number = kPrologueStep; number < end; ++number) numbers.push_back(number);
  return numbers;
}

}  // namespace

TEST_CASE("a range and the kernel in it that both match are one mark, whatever other threads do in between") {
  const Marked marked("marks");
  REQUIRE(marked.steps() == numbers_to(kSteps));
  CHECK(marked.kernels_of(1) == std::vector<std::string>{"mark"});
  for (size_t step = 2; step <= kSteps; ++step)
    CHECK(marked.kernels_of(step) == std::vector<std::string>{"mark", "put"});
}

TEST_CASE("steps that several threads begin at once follow each other in the stream, and none is lost") {
  const Marked marked("many_marks");
  REQUIRE(marked.steps() == numbers_to(kRanks * kMarks));
  size_t marks = 0, puts = 0;
  for (size_t step = 0; step < marked.stream->steps().size(); ++step) {
    for (const std::string& name : marked.kernels_of(step)) ++(name == "mark" ? marks : puts);
  }
  CHECK(marks == kRanks * kMarks);
  CHECK(puts == kRanks * kMarks);
}
