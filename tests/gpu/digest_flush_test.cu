// Digests of a captured graph that leave their sums on the device, and the flush that sends them all to the host.
#include "kernels/digest_flush.h"

#include <doctest/doctest.h>

#include <map>
#include <vector>

#include "kernels/digest_pieces.h"
#include "tests/gpu/digest_fixture.h"

namespace forkpoint {
namespace {

// Nodes with the bytes that each digests.
class Nodes {
 public:
  // first: number of the first node.
  Nodes(Bench& bench, uint32_t first) : bench_(bench), next_(first) {}

  void add(size_t offset, size_t size) {
    requests_.push_back({bench_.device + offset, size, target()});
    numbers_.push_back(next_);
    expected_[next_++] = digest_bytes(&bench_.host[offset], size, DType::raw);
  }
  void launch(cudaStream_t stream) const {
    for (size_t done = 0; done < requests_.size();) {
      DigestPiecesLaunch launch;
      done += plan_digest_pieces(&requests_[done], requests_.size() - done, 132, &launch);
      CUDA_OK(launch_digest(launch, stream));
    }
  }
  void flush(const Ring& ring, cudaStream_t stream) const {
    for (size_t done = 0; done < numbers_.size();) {
      DigestFlushLaunch launch;
      done += plan_digest_flush(ring.device(), bench_.scratch, &numbers_[done], numbers_.size() - done, &launch);
      CUDA_OK(launch_digest(launch, stream));
    }
  }
  bool has(uint32_t node) const { return expected_.count(node) != 0; }
  size_t size() const { return numbers_.size(); }
  void check(const SlotResult& result, uint32_t ordinal) const {
    CAPTURE(result.node);
    REQUIRE(has(result.node));
    CHECK(result.ordinal == ordinal);
    check_equal(finish(DType::raw, result.raw), expected_.at(result.node));
  }
  // All of one replay, each once.
  void check_replay(Ring& ring, uint32_t ordinal) const {
    std::map<uint32_t, SlotResult> found;
    SlotResult result;
    for (size_t i = 0; i < size(); ++i) {
      REQUIRE(ring.take(&result));
      found[result.node] = result;
    }
    CHECK_FALSE(ring.take(&result));
    CHECK(found.size() == size());
    for (const auto& [node, one] : found) check(one, ordinal);
  }

 private:
  DigestTarget target() const {
    DigestTarget target;
    target.scratch = bench_.scratch + next_;
    target.node = next_;
    return target;
  }

  Bench& bench_;
  uint32_t next_;
  std::vector<DigestRequest> requests_;
  std::vector<uint32_t> numbers_;
  std::map<uint32_t, DigestResult> expected_;
};

}  // namespace

TEST_CASE("a flush brings every replay of every piece, of all sizes and at odd addresses, with its node and ordinal") {
  Bench bench(9 << 20);
  Ring ring(bench.slots, 256);
  Nodes nodes(bench, 1);
  for (size_t i = 0; i < 90; ++i) {
    nodes.add(4096 * i + (i % 11 == 3 ? 5 : 0), i % 20 == 7 ? 8'000'000 : i % 5 == 0 ? 90'000 : 100 * i);
  }
  Graph graph([&](cudaStream_t stream) {
    nodes.launch(stream);
    nodes.flush(ring, stream);
  });
  for (uint32_t replay = 0; replay < 30; ++replay) {
    graph.launch();
    graph.wait();
    nodes.check_replay(ring, replay);
  }
  CHECK(ring.dropped() == 0);
  bench.check_scratch_is_clean();
}

TEST_CASE("replays that follow each other without a wait are told apart") {
  Bench bench(4 << 20);
  Ring ring(bench.slots, 4096);
  Nodes nodes(bench, 1);
  for (size_t i = 0; i < 20; ++i) nodes.add(1024 * i, 150'000 * i);
  Graph graph([&](cudaStream_t stream) {
    nodes.launch(stream);
    nodes.flush(ring, stream);
  });
  for (int replay = 0; replay < 100; ++replay) graph.launch();
  graph.wait();
  std::map<uint32_t, uint32_t> runs;
  SlotResult result;
  while (ring.take(&result)) nodes.check(result, runs[result.node]++);
  CHECK(runs.size() == 20);
  for (const auto& [node, count] : runs) CHECK(count == 100);
}

TEST_CASE("more digests than one flush holds arrive too") {
  Bench bench(1 << 20);
  Ring ring(bench.slots, 4096);
  Nodes nodes(bench, 1);
  for (size_t i = 0; i < 2 * kMostFlushed + 37; ++i) nodes.add(16 * i, i % 4000);
  Graph graph([&](cudaStream_t stream) {
    nodes.launch(stream);
    nodes.flush(ring, stream);
  });
  for (uint32_t replay = 0; replay < 3; ++replay) {
    graph.launch();
    graph.wait();
    nodes.check_replay(ring, replay);
  }
  CHECK(ring.dropped() == 0);
}

TEST_CASE("magnitudes of a large tensor come through a flush, and the next run begins anew") {
  Bench bench(16 << 20);
  Ring ring(bench.slots, 16);
  const int64_t shape[] = {6 << 20};
  const TensorView view = whole_view(DType::bf16, shape);
  DigestTarget target;
  target.scratch = bench.scratch + 7;
  const uint32_t node = 7;
  for (uint32_t run = 0; run < 3; ++run) {
    CUDA_OK(digest_on_device(bench.device, view, target, nullptr));
    DigestFlushLaunch flush;
    REQUIRE(plan_digest_flush(ring.device(), bench.scratch, &node, 1, &flush) == 1);
    CUDA_OK(launch_digest(flush, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    SlotResult result;
    REQUIRE(ring.take(&result));
    CHECK(result.ordinal == run);
    check_equal(finish(DType::bf16, result.raw), digest_view(bench.host.data(), view));
  }
  bench.check_scratch_is_clean();
}

TEST_CASE("a flush that comes before the digest sends nothing, then and ever after, and counts it") {
  Bench bench(1 << 20);
  Ring ring(bench.slots, 64);
  Nodes late(bench, 1), other(bench, 10);
  late.add(0, 300'000);
  other.add(0, 300'000);
  SlotResult result;
  for (uint64_t run = 0; run < 3; ++run) {
    late.flush(ring, nullptr);
    late.launch(nullptr);
    other.launch(nullptr);
    other.flush(ring, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    other.check_replay(ring, static_cast<uint32_t>(run));
    CHECK(ring.dropped() == run + 1);
  }
  late.flush(ring, nullptr);
  CUDA_OK(cudaDeviceSynchronize());
  CHECK_FALSE(ring.take(&result));
}

TEST_CASE("a digest that ran twice before the flush is not taken for one") {
  Bench bench(1 << 20);
  Ring ring(bench.slots, 64);
  Nodes nodes(bench, 1);
  nodes.add(0, 1000);
  nodes.add(16, 300'000);
  nodes.launch(nullptr);
  nodes.launch(nullptr);
  nodes.flush(ring, nullptr);
  CUDA_OK(cudaDeviceSynchronize());
  SlotResult result;
  CHECK_FALSE(ring.take(&result));
  CHECK(ring.dropped() == 2);
}

TEST_CASE("what finds the ring full is counted, and the next run is whole and has its own ordinal") {
  Bench bench(1 << 20);
  Ring ring(bench.slots, 64);
  Nodes nodes(bench, 1);
  for (size_t i = 0; i < 100; ++i) nodes.add(16 * i, 50 * i);
  Nodes few(bench, 200);
  for (size_t i = 0; i < 10; ++i) few.add(16 * i, 50 * i);
  for (const Nodes* each : {&nodes, &few}) {
    each->launch(nullptr);
    each->flush(ring, nullptr);
  }
  CUDA_OK(cudaDeviceSynchronize());
  CHECK(ring.dropped() == 46);
  SlotResult result;
  for (int i = 0; i < 64; ++i) {
    REQUIRE(ring.take(&result));
    nodes.check(result, 0);
  }
  few.launch(nullptr);
  few.flush(ring, nullptr);
  CUDA_OK(cudaDeviceSynchronize());
  few.check_replay(ring, 1);
  CHECK(ring.dropped() == 46);
  bench.check_scratch_is_clean();
}

TEST_CASE("graphs on two streams that flush into one ring at the same time lose nothing and mix nothing up") {
  Bench bench(4 << 20);
  Ring ring(bench.slots, 1024);
  Nodes one(bench, 1), other(bench, 1000);
  for (size_t i = 0; i < 150; ++i) {
    one.add(16 * i, i % 30 == 0 ? 1'000'000 : 64 * i);
    other.add(32 * i, i % 40 == 0 ? 2'000'000 : 48 * i);
  }
  const auto capture = [&](const Nodes& nodes) {
    return [&](cudaStream_t stream) {
      nodes.launch(stream);
      nodes.flush(ring, stream);
    };
  };
  Graph first(capture(one)), second(capture(other));
  constexpr uint32_t kReplays = 200;
  std::map<uint32_t, uint32_t> runs;
  size_t taken = 0;
  for (uint32_t replay = 0; replay < kReplays; ++replay) {
    first.launch();
    second.launch();
    SlotResult result;
    const size_t wanted = (replay + 1) * (one.size() + other.size());
    for (uint64_t tries = 0; taken < wanted && tries < 1'000'000'000; ++tries) {
      if (!ring.take(&result)) continue;
      (one.has(result.node) ? one : other).check(result, runs[result.node]++);
      ++taken;
    }
    REQUIRE(taken == wanted);
  }
  CHECK(ring.dropped() == 0);
  first.wait();
  second.wait();
}

TEST_CASE("pieces of one launch go to a slot, through a ring and into the scratch for a flush") {
  Bench bench(1 << 20);
  Ring ring(bench.slots + 100, 8);
  std::vector<DigestRequest> requests(3);
  for (size_t i = 0; i < 3; ++i) {
    requests[i] = {bench.device + 16 * i, 100'000, {}};
    requests[i].target.scratch = bench.scratch + i + 1;
    requests[i].target.node = static_cast<uint32_t>(i) + 1;
  }
  requests[0].target.slot = bench.slots;
  requests[0].target.ticket = 1;
  requests[1].target.ring = ring.device();
  DigestPiecesLaunch launch;
  REQUIRE(plan_digest_pieces(requests.data(), 3, 132, &launch) == 3);
  CUDA_OK(launch_digest(launch, nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  SlotResult result;
  const auto check = [&](size_t i) {
    CHECK(result.node == i + 1);
    check_equal(finish(DType::raw, result.raw), digest_bytes(&bench.host[16 * i], 100'000, DType::raw));
  };
  REQUIRE(read_slot(bench.slots[0], 1, &result));
  check(0);
  REQUIRE(ring.take(&result));
  check(1);
  CHECK_FALSE(ring.take(&result));
  const uint32_t nodes[] = {0, 3};  // 0: none
  DigestFlushLaunch flush;
  REQUIRE(plan_digest_flush(ring.device(), bench.scratch, nodes, 2, &flush) == 2);
  CUDA_OK(launch_digest(flush, nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  REQUIRE(ring.take(&result));
  check(2);
  CHECK_FALSE(ring.take(&result));
  CHECK(ring.dropped() == 0);
}

}  // namespace forkpoint
