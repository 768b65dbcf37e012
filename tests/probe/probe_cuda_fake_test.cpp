// The probe's CUDA side against a libcuda that is made of host memory: what it does when the device is slow, stuck, gone,
// or captures.
#include <doctest/doctest.h>

#include "tests/probe/harness.h"
#include "tests/probe/sample_data.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

struct Recorded {
  Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<Row> rows;
};

Recorded record(const std::string& scenario, const Environment& more = {}) {
  const TempFolder folder;
  Recorded recorded;
  recorded.outcome = run_program({client_path("fake_cuda_client"), client_path("libcuda.so.1"), scenario},
                                 under_probe(folder.run(), more));
  INFO(recorded.outcome.err);
  REQUIRE(recorded.outcome.status == 0);
  recorded.stream = open_stream(folder.run());
  CHECK(recorded.stream->state() == StreamState::whole);
  recorded.rows = all_rows(*recorded.stream);
  return recorded;
}

Digest digest_of(const std::vector<float>& values) {
  return digest_bytes(values.data(), values.size() * sizeof(float), DType::f32).digest;
}

}  // namespace

TEST_CASE("digests of a slow device arrive in order among the host's records") {
  for (const char* slots : {"65536", "8"}) {
    const Recorded recorded = record("plain", {{"FORKPOINT_RING_SLOTS", slots}});
    CHECK(recorded.stream->gaps().empty());
    CHECK(recorded.stream->header().device == "fake");
    REQUIRE(recorded.rows.size() == 600);
    for (size_t i = 0; i < 600; i += 3) {
      CHECK(recorded.rows[i].record.digest == digest_of(sample_floats(1000, 5)));
      CHECK(scalar_value(recorded.rows[i + 1].record.digest) == static_cast<double>(i / 3));
      CHECK(recorded.rows[i + 2].record.digest == digest_of(sample_floats(10'000, 6)));
    }
  }
}

TEST_CASE("four threads share a context's slots") {
  const Recorded recorded = record("threads", {{"FORKPOINT_RING_SLOTS", "32"}});
  CHECK(recorded.stream->gaps().empty());
  REQUIRE(recorded.rows.size() == 2000);
  for (const Row& row : recorded.rows) CHECK(row.record.digest == digest_of(sample_floats(1000, 5)));
}

TEST_CASE("a device that is stuck holds the exit up for five seconds, not more, and leaves a gap") {
  const Recorded recorded = record("stuck");
  CHECK(recorded.outcome.seconds > 4);
  CHECK(recorded.outcome.seconds < 7);
  CHECK(has_gap(*recorded.stream, "not computed on the device before the process ended"));
  CHECK(records_lost(*recorded.stream) == 3);
  REQUIRE(recorded.rows.size() == 1);
  CHECK(recorded.rows[0].site.tensor == "after");
}

TEST_CASE("a context that is destroyed takes its digests along, and the next one is used") {
  const Recorded recorded = record("reset");
  CHECK(recorded.outcome.seconds < 4);
  CHECK(has_gap(*recorded.stream, "context was destroyed"));
  CHECK(records_lost(*recorded.stream) == 100);
  CHECK(rows_of(recorded.rows, "values").size() == 1);
  const auto more = rows_of(recorded.rows, "more");
  REQUIRE(more.size() == 1);
  CHECK(more[0].record.digest == digest_of(sample_floats(10'000, 6)));
}

TEST_CASE("a launch that fails is a gap with the driver's number") {
  const Recorded recorded = record("launch error");
  CHECK(has_gap(*recorded.stream, "could not be launched (CUDA error 701)"));
  CHECK(records_lost(*recorded.stream) == 3);
  CHECK(line_count(recorded.outcome.err) == 1);
}

TEST_CASE("a captured stream is a coverage limit and no gap") {
  const Recorded recorded = record("captured");
  CHECK(recorded.stream->gaps().empty());
  CHECK(has_limit(*recorded.stream, "inside CUDA graph capture"));
  CHECK(rows_of(recorded.rows, "values").empty());
  CHECK(rows_of(recorded.rows, "more").size() == 1);
}

TEST_CASE("the default stream while another stream is captured is a gap") {
  const Recorded recorded = record("implicit");
  CHECK(records_lost(*recorded.stream) == 3);
  CHECK(rows_of(recorded.rows, "more").size() == 1);
}

TEST_CASE("an address that CUDA does not know is never handed to a kernel") {
  const Recorded recorded = record("bad address");
  CHECK(has_gap(*recorded.stream, "not (wholly) known to CUDA"));
  CHECK(recorded.rows.empty());
}
