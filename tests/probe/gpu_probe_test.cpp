// What the probe records of CUDA tensors is what the host makes of the same bytes. Skipped (77) without a device.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

std::vector<std::string> gpu_client(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), client_path("probe_gpu_client"));
  return arguments;
}

struct Recorded {
  Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<Row> rows;
};

Recorded record(const std::vector<std::string>& scenario, const Environment& more = {}) {
  const TempFolder folder;
  Recorded recorded;
  recorded.outcome = run_program(gpu_client(scenario), under_probe(folder.run(), more));
  INFO(recorded.outcome.err);
  REQUIRE(recorded.outcome.status == 0);
  recorded.stream = open_stream(folder.run());
  CHECK(recorded.stream->state() == StreamState::whole);
  recorded.rows = all_rows(*recorded.stream);
  return recorded;
}

// Compares every NAME.host with its NAME; returns how many.
int compare_with_host(const Recorded& recorded) {
  int pairs = 0;
  for (const Row& host : recorded.rows) {
    const std::string& name = host.site.tensor;
    if (!name.ends_with(".host")) continue;
    const auto device = rows_of(recorded.rows, name.substr(0, name.size() - 5));
    INFO(name);
    REQUIRE(device.size() == 1);
    CHECK(device[0].record.digest == host.record.digest);
    CHECK(device[0].record.stats.absmax == host.record.stats.absmax);
    CHECK(device[0].record.stats.nonfinite == host.record.stats.nonfinite);
    CHECK(device[0].record.stats.word_sum == host.record.stats.word_sum);
    CHECK(device[0].layout == host.layout);
    ++pairs;
  }
  return pairs;
}

}  // namespace

int main(int argc, char** argv) {
  if (atoi(run_program(gpu_client({"count"})).out.c_str()) < 1) {
    puts("skipped: no CUDA device");
    return 77;
  }
  return doctest::Context(argc, argv).run();
}

TEST_CASE("every dtype and size, on four kinds of stream, digested before the memory is overwritten") {
  const Recorded recorded = record({"dtypes"});
  CHECK(recorded.outcome.err == "");
  CHECK(compare_with_host(recorded) == 19 * 4);
  CHECK(recorded.stream->gaps().empty());
  CHECK(recorded.stream->header().device != "cpu");
}

TEST_CASE("strided, reversed, broadcast, permuted and misaligned views, shards, and a large tensor") {
  const Recorded recorded = record({"views"});
  CHECK(compare_with_host(recorded) == 11);
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("pinned, managed and pooled memory") {
  const Recorded recorded = record({"memory_kinds"});
  CHECK(compare_with_host(recorded) == 3);
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("an address that the device cannot read is a gap, and the context lives on") {
  const Recorded recorded = record({"bad_addresses"});
  CHECK(recorded.rows.empty());
  CHECK(has_gap(*recorded.stream, "not (wholly) known to CUDA"));
  CHECK(records_lost(*recorded.stream) == 3);
}

TEST_CASE("a capture is neither broken nor recorded into: a coverage limit, no gap") {
  const Recorded recorded = record({"capture"});
  CHECK(rows_of(recorded.rows, "captured").empty());
  CHECK(rows_of(recorded.rows, "beside").size() == 1);
  CHECK(recorded.stream->gaps().empty());
  CHECK(has_limit(*recorded.stream, "inside CUDA graph capture"));
}

TEST_CASE("four threads with a stream each") {
  const Recorded recorded = record({"threads"});
  CHECK(compare_with_host(recorded) == 100);
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("a ring smaller than the number of records waits for the device and loses nothing") {
  const Recorded recorded = record({"leave", "return"}, {{"FORKPOINT_RING_SLOTS", "16"}});
  CHECK(recorded.rows.size() == 2000);
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("digests that are still on their way when the process ends arrive") {
  for (const char* how : {"return", "exit", "_exit", "reset"}) {
    INFO(how);
    const Recorded recorded = record({"leave", how});
    CHECK(recorded.stream->gaps().empty());
    REQUIRE(recorded.rows.size() == 2000);
    for (const Row& row : recorded.rows) CHECK(row.record.digest == recorded.rows[0].record.digest);
  }
}

TEST_CASE("contexts that are destroyed and made again") {
  const Recorded recorded = record({"reset_and_go_on"});
  CHECK(compare_with_host(recorded) == 3);
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("forks of a process that uses CUDA") {
  const Recorded recorded = record({"forks"});
  CHECK(compare_with_host(recorded) == 2);
  CHECK(rows_of(recorded.rows, "child").empty());
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("every device, while another one is current") {
  const int devices = atoi(run_program(gpu_client({"count"})).out.c_str());
  const Recorded recorded = record({"devices"});
  CHECK(compare_with_host(recorded) == 2 * devices);
  CHECK(recorded.stream->gaps().empty());
}

TEST_CASE("what a CUDA record costs its caller") {
  const Recorded recorded = record({"cost"});
  const double microseconds = atof(recorded.outcome.out.c_str());
  printf("bench probe_cuda_record_us %.2fus <=8us %s\n", microseconds, microseconds <= 8 ? "ok" : "miss");
  CHECK(microseconds > 0);
}
