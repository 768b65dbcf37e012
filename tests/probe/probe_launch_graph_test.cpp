// CUDA graphs at the launch level: a replay's digests are its own or are declared to be missing, whatever programs do
// with captured graphs. On the fakes.
#include <doctest/doctest.h>
#include <dlfcn.h>

#include <cstring>

#include "probes/cuda_driver.h"
#include "probes/graph_results.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

constexpr const char* kModes[] = {"at_once", "deferred", "slow"};

struct Node {
  LaunchRow row;
  BufferRow buffer;
};

struct Replays {
  Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<uint64_t> graphs;  // the number of the executable, of each launch
  std::vector<Node> nodes;       // rows of replayed launches, in order
};

Replays record(const std::string& scenario, const Environment& more = {}) {
  const TempFolder folder;
  Environment environment = {{"FORKPOINT_LEVEL", "launch"}, {"FORKPOINT_CUPTI", client_path("libcupti.so.13")}};
  environment.insert(more.begin(), more.end());
  Replays replays;
  const std::vector<std::string> command = {client_path("launch_graph_client"), client_path("libcuda.so.1"), scenario};
  replays.outcome = run_program(command, under_probe(folder.run(), environment));
  INFO(replays.outcome.err);
  REQUIRE(replays.outcome.status == 0);
  CHECK(replays.outcome.out == run_program(command, {}).out);
  replays.stream = open_stream(folder.run());
  REQUIRE(replays.stream != nullptr);
  CHECK(replays.stream->state() == StreamState::whole);
  for (size_t i = 0; i < replays.stream->steps().size(); ++i) {
    LaunchColumns columns;
    replays.stream->read_launches(i, &columns);
    size_t buffer = 0;
    for (const LaunchRow& row : columns.rows) {
      if (row.kind == LaunchKind::graph) replays.graphs.push_back(row.object);
      if (row.flags & kLaunchInGraph) replays.nodes.push_back({row, columns.buffers[buffer]});
      buffer += row.buffers;
    }
  }
  return replays;
}

// What the buffer holds after so many launches of the kernel that adds one.
Digest digest_after(size_t launches) {
  const std::vector<float> values(100, static_cast<float>(launches));
  return digest_only(values.data(), values.size() * sizeof(float));
}

bool has_digest(const Node& node) { return (node.buffer.flags & kBufferNoDigest) == 0; }

// The n-th row has the digest of the n-th launch.
void check_all_digests(const Replays& replays, size_t count) {
  REQUIRE(replays.nodes.size() == count);
  size_t right = 0;
  for (size_t i = 0; i < count; ++i) {
    right += has_digest(replays.nodes[i]) && replays.nodes[i].buffer.digest == digest_after(i + 1);
  }
  CHECK(right == count);
  CHECK(replays.stream->gaps().empty());
}

void check_declared_missing(const Replays& replays, size_t count) {
  REQUIRE(replays.nodes.size() == count);
  for (const Node& node : replays.nodes) CHECK_FALSE(has_digest(node));
  CHECK(has_limit(*replays.stream, "one by one"));
  CHECK(replays.stream->gaps().empty());
  CHECK(replays.outcome.seconds < 20);  // nothing was waited for in vain
}

// A ring on the fake device, and what a device would put there.
class Ring {
 public:
  explicit Ring(uint32_t slots) : slots_(slots) {
    void* library = dlopen(client_path("libcuda.so.1").c_str(), RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    CudaDriver driver = {};
    find(library, "cuMemHostRegister_v2", &driver.cuMemHostRegister_);
    find(library, "cuMemHostGetDevicePointer_v2", &driver.cuMemHostGetDevicePointer_);
    find(library, "cuMemAlloc_v2", &driver.cuMemAlloc_);
    find(library, "cuStreamCreate", &driver.cuStreamCreate_);
    find(library, "cuEventCreate", &driver.cuEventCreate_);
    find(library, "cuMemsetD8Async", &driver.cuMemsetD8Async_);
    find(library, "cuMemcpyHtoDAsync_v2", &driver.cuMemcpyHtoDAsync_);
    find(library, "cuEventRecord", &driver.cuEventRecord_);
    REQUIRE(results.prepare(driver, slots) == CUDA_SUCCESS);
    decltype(&cuCtxSynchronize) synchronize = nullptr;
    find(library, "cuCtxSynchronize", &synchronize);
    REQUIRE(synchronize() == CUDA_SUCCESS);
  }
  DigestTarget take() {
    uint32_t node = 0;
    DigestTarget target;
    REQUIRE(results.take_node(&node, &target));
    CHECK(node == target.node);
    return target;
  }
  // The node runs once more and gives `value`.
  void run(const DigestTarget& target, uint64_t value) {
    uint64_t words[kWordCount] = {};
    words[kWordA] = value;
    words[kWordNode] = target.node | uint64_t{target.scratch->ordinal++} << 32;
    DigestSlot& slot = target.ring->slots[sent_ % slots_];
    for (int i = 0; i < kSlotCells; ++i) {
      slot.cell[i] = static_cast<uint32_t>(words[i / 2] >> (32 * (i % 2))) | uint64_t{ring_ticket(sent_, slots_)} << 32;
    }
    ++sent_;
    results.drain();
  }
  // 0: not there.
  uint64_t result(const DigestTarget& target, uint32_t n) {
    RawDigest raw;
    return results.take(target.node, n, &raw) ? raw.digest.a : 0;
  }

  GraphResults results;

 private:
  template <typename Function>
  static void find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    REQUIRE_MESSAGE(static_cast<bool>(*function), name);
  }
  uint32_t slots_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace

TEST_CASE("a child graph gives its rows at each replay of its parent") { check_all_digests(record("child_once"), 3); }

TEST_CASE("a child that is added twice has nodes whose digests cannot be told apart, and they are declared missing") {
  check_declared_missing(record("child_twice"), 6);
}

TEST_CASE("a child of two executables has no digests in either") { check_declared_missing(record("child_of_two"), 6); }

TEST_CASE("two executables of one graph, which may run at the same time, have no digests") {
  for (const char* mode : kModes) check_declared_missing(record("two_executables", {{"FAKE_CUDA_MODE", mode}}), 2);
}

TEST_CASE("executables of one graph that come one after another have all digests") {
  for (const char* mode : kModes) check_all_digests(record("one_after_another", {{"FAKE_CUDA_MODE", mode}}), 6);
}

TEST_CASE("an executable that is updated from a new capture, and back, has the digests of what it runs") {
  for (const char* mode : kModes) check_all_digests(record("updated", {{"FAKE_CUDA_MODE", mode}}), 6);
}

TEST_CASE("a capture of two streams has all digests") {
  for (const char* mode : kModes) check_all_digests(record("forked", {{"FAKE_CUDA_MODE", mode}}), 6);
}

TEST_CASE("a capture that another thread tried to end has all digests") {
  check_all_digests(record("ended_by_another"), 6);
}

TEST_CASE("digests that no kernel brings to the host are missing with a Gap, and are not waited for") {
  const Replays replays = record("no_flush");
  REQUIRE(replays.nodes.size() == 6);
  for (const Node& node : replays.nodes) CHECK_FALSE(has_digest(node));
  CHECK_FALSE(replays.stream->gaps().empty());
  CHECK(replays.outcome.seconds < 3);
}

TEST_CASE("what is added to a graph after it was instantiated is not in the executable") {
  const Replays replays = record("child_later");
  check_all_digests(replays, 3);
  CHECK(replays.outcome.seconds < 20);
}

TEST_CASE("a program may capture and update for ever: numbers of digests come back") {
  check_all_digests(record("recaptured"), 150'000);
}

TEST_CASE("a capture that became invalid gives back what it had") { check_all_digests(record("abandoned"), 3); }

TEST_CASE("a capture that finds no number for its digests has the form that it had before") {
  const Replays replays = record("exhausted");  // its update succeeded
  REQUIRE(replays.nodes.size() == 4);
  CHECK(replays.nodes[1].buffer.digest == digest_after(2));
  CHECK(has_digest(replays.nodes[1]));
  CHECK(has_digest(replays.nodes[2]));  // there was one number left
  CHECK(replays.nodes[2].buffer.digest == digest_after(3));
  CHECK_FALSE(has_digest(replays.nodes[3]));
  CHECK(has_gap(*replays.stream, "more digests inside CUDA graphs"));
}

TEST_CASE("a replay whose results found the ring full is not waited for once a later one has given some") {
  // The one at which the program ends has none behind it.
  const Replays replays = record("crowded", {{"FORKPOINT_RING_SLOTS", "2048"}});
  REQUIRE(replays.nodes.size() == 300'000);
  size_t missing = 0, wrong = 0;
  for (size_t i = 0; i < replays.nodes.size(); ++i) {
    missing += !has_digest(replays.nodes[i]);
    wrong += has_digest(replays.nodes[i]) && replays.nodes[i].buffer.digest != digest_after(i + 1);
  }
  CHECK(missing > 0);
  CHECK(wrong == 0);
  CHECK(has_gap(*replays.stream, "more digests inside CUDA graphs"));
  CHECK_FALSE(has_gap(*replays.stream, "before the process ended"));
  CHECK(replays.outcome.seconds < 4.5);
}

TEST_CASE("each executable has a number of its own, also at an address that comes round again") {
  CHECK(record("numbered").graphs == std::vector<uint64_t>{1, 1, 2, 2, 3, 3, 4, 4});
  CHECK(record("updated").graphs == std::vector<uint64_t>(6, 1));  // an update leaves it what it is
}

TEST_CASE("results that nobody takes are dropped once a later one of their node was taken") {
  Ring ring(64);
  const DigestTarget node = ring.take();
  for (uint64_t run = 0; run < 50; ++run) ring.run(node, 100 + run);
  CHECK(ring.results.waiting() == 50);
  CHECK(ring.result(node, 40) == 140);
  CHECK(ring.results.waiting() == 9);
  CHECK(ring.result(node, 39) == 0);
  ring.results.ignore(node.node);
  ring.run(node, 150);
  CHECK(ring.results.waiting() == 9);
}

TEST_CASE("results that nobody ever takes are kept up to a bound, then counted as dropped") {
  Ring ring(64);
  const DigestTarget node = ring.take();
  constexpr uint64_t kRuns = 1'000'000;
  for (uint64_t run = 0; run < kRuns; ++run) ring.run(node, run);
  CHECK(ring.results.waiting() < kRuns);
  CHECK(ring.results.dropped() == kRuns - ring.results.waiting());
}

TEST_CASE("a number that was given back begins anew, and not before its last run has arrived") {
  Ring ring(64);
  const DigestTarget node = ring.take();
  ring.run(node, 1);
  ring.results.give_node(node.node, 2);
  const DigestTarget other = ring.take();
  CHECK(other.node != node.node);
  ring.run(node, 2);
  const DigestTarget again = ring.take();
  REQUIRE(again.node == node.node);
  ring.run(again, 3);
  CHECK(ring.result(again, 0) == 3);
  CHECK(ring.results.waiting() == 0);
}

TEST_CASE("a number that ran more often than its graph was launched is not used again") {
  Ring ring(64);
  const DigestTarget node = ring.take();
  ring.run(node, 1);
  ring.run(node, 2);
  ring.results.give_node(node.node, 1);
  CHECK(ring.take().node != node.node);
}

TEST_CASE("a later run of a node tells that an earlier one is over") {
  Ring ring(64);
  const DigestTarget node = ring.take();
  ring.run(node, 1);
  CHECK_FALSE(ring.results.has_passed(node.node, 0));
  ring.run(node, 2);
  CHECK(ring.results.has_passed(node.node, 0));
  CHECK_FALSE(ring.results.has_passed(node.node, 1));
}
