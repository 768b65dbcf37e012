// Many runs of raw bytes in one launch, against the host's digest of the same bytes.
#include "kernels/digest_pieces.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "kernels/digest_fatbin.h"
#include "tests/gpu/digest_fixture.h"

namespace forkpoint {
namespace {

struct Range {
  size_t offset;
  size_t size;
};

DigestResult on_host(const Bench& bench, const Range& range) {
  return digest_bytes(&bench.host[range.offset], range.size, DType::raw);
}

// All of them, in as few launches as the planner makes.
size_t launch_all(const std::vector<DigestRequest>& requests, int multiprocessors, cudaStream_t stream) {
  size_t launches = 0;
  for (size_t done = 0; done < requests.size(); ++launches) {
    DigestPiecesLaunch launch;
    const size_t covered = plan_digest_pieces(requests.data() + done, requests.size() - done, multiprocessors, &launch);
    REQUIRE(covered >= 1);
    CUDA_OK(launch_digest(launch, stream));
    done += covered;
  }
  return launches;
}

void check_pieces(Bench& bench, const std::vector<Range>& ranges, int multiprocessors = 132) {
  REQUIRE(ranges.size() <= bench.room());
  Expected expected(bench);
  std::vector<DigestRequest> requests;
  for (const Range& range : ranges) requests.push_back({bench.device + range.offset, range.size, bench.target()});
  launch_all(requests, multiprocessors, nullptr);
  for (size_t i = 0; i < ranges.size(); ++i) expected.add(requests[i].target, DType::raw, on_host(bench, ranges[i]));
}

size_t random_size(std::mt19937_64& random, int largest_bits) {
  const size_t limit = size_t{1} << (random() % static_cast<uint64_t>(largest_bits + 1));
  return random() % 3 == 0 ? limit : random() % (limit + 1);
}

}  // namespace

TEST_CASE("every number of pieces from 1 to 200, of sizes from nothing to 256 KiB, agrees with the host") {
  Bench bench(2 << 20);
  std::mt19937_64 random(3);
  for (size_t count = 1; count <= 200; ++count) {
    CAPTURE(count);
    std::vector<Range> ranges;
    for (size_t i = 0; i < count; ++i) ranges.push_back({16 * (random() % 100'000), random_size(random, 18)});
    check_pieces(bench, ranges);
  }
}

TEST_CASE("every size around 16 bytes, a row, a tile and a block's work agrees with the host") {
  Bench bench(1 << 20);
  std::vector<Range> ranges;
  for (size_t centre : {16, 512, 2048, 4096, 16384, 32768, 65536}) {
    for (size_t size = centre - 16; size <= centre + 16; ++size) ranges.push_back({16 * (size % 7), size});
  }
  check_pieces(bench, ranges);
}

TEST_CASE("runs of raw bytes that begin and end anywhere within a block or a tile agree with the host") {
  Bench bench(1 << 16);
  Expected expected(bench);
  for (size_t begin : {0, 1, 15, 16, 17, 2030, 2040, 2047, 2048, 2049, 4095}) {
    for (size_t size = 1; size <= 70; ++size) expected.bytes(begin, size, DType::raw, begin);
    for (size_t size : {2000, 2031, 2032, 2047, 2048, 2049, 4096, 5001, 16384, 20'000, 40'003}) {
      expected.bytes(begin, size, DType::raw, begin);
    }
  }
}

TEST_CASE("pieces at odd addresses are answered too, among the others") {
  Bench bench(1 << 20);
  std::vector<Range> ranges;
  for (size_t i = 0; i < 60; ++i) ranges.push_back({i % 4 == 0 ? 16 * i + i % 13 : 32 * i, 37 * i});
  check_pieces(bench, ranges);
}

TEST_CASE("large pieces beside small ones agree with the host, and leave the scratch clean") {
  constexpr size_t kMiB = 1 << 20;
  Bench bench(40 * kMiB);
  check_pieces(bench, {{0, 8 * kMiB}, {16, 4096}, {64, 40000}});
  check_pieces(bench, {{0, 40 * kMiB}, {kMiB, 33 * kMiB + 7}});
  check_pieces(bench, {{48, 1}, {0, 12 * kMiB - 1}, {32, 0}, {32, 300'000}, {16, kMiB + 17}, {0, 65'536}});
  bench.check_scratch_is_clean();
  std::mt19937_64 random(4);
  for (int i = 0; i < 40; ++i) {
    std::vector<Range> ranges;
    const size_t count = 1 + random() % 60;
    for (size_t k = 0; k < count; ++k) ranges.push_back({16 * (random() % kMiB), random_size(random, 24)});
    check_pieces(bench, ranges);
  }
  bench.check_scratch_is_clean();
}

TEST_CASE("no number of multiprocessors changes a bit of any piece") {
  Bench bench(8 << 20);
  const std::vector<Range> ranges = {{0, (5 << 20) + 3}, {16, 100'000}, {32, 77}, {0, 0},
                                     {1 << 20, 3 << 20}, {0, 2048}};
  for (int multiprocessors : {1, 2, 7, 78, 132, 500}) check_pieces(bench, ranges, multiprocessors);
  bench.check_scratch_is_clean();
}

TEST_CASE("a change of any single byte of a piece shows in its digest and in no other") {
  Bench bench(1 << 16);
  const std::vector<Range> ranges = {{0, 5000}, {5008, 3000}, {8016, 40'000}};
  for (size_t byte : {0, 1, 2047, 2048, 4999, 5008, 8007, 8016, 9999, 48'015}) {
    CAPTURE(byte);
    bench.host[byte] ^= 0x40;
    CUDA_OK(cudaMemcpy(bench.device + byte, &bench.host[byte], 1, cudaMemcpyHostToDevice));
    check_pieces(bench, ranges);
  }
}

TEST_CASE("pieces of 16 GiB, or of 4.5 GiB where no more fits, agree with the host") {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_OK(cudaMemGetInfo(&free_bytes, &total_bytes));
  constexpr size_t kOdd = 12345 * 16 + 5, kRoom = size_t{1} << 30;
  size_t size = (size_t{16} << 30) + kOdd;
  if (free_bytes < size + kRoom) size = (size_t{9} << 29) + kOdd;
  REQUIRE_MESSAGE(free_bytes > size + kRoom, "this test needs 6 GB of free device memory");
  Bench bench(8 << 20);
  unsigned char* large = nullptr;
  CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&large), size));
  DigestResult sum;
  uint64_t word_sum = 0;
  for (size_t at = 0; at < size; at += bench.host.size()) {
    const size_t part_bytes = std::min(bench.host.size(), size - at);
    CUDA_OK(cudaMemcpyAsync(large + at, bench.device, part_bytes, cudaMemcpyDeviceToDevice, nullptr));
    const DigestResult part = digest_bytes(bench.host.data(), part_bytes, DType::raw, at);
    sum.digest += part.digest;
    word_sum += part.stats.word_sum;
  }
  sum.stats.word_sum = fold_word_sum(word_sum);
  Expected expected(bench);
  const std::vector<DigestRequest> requests = {{large, size, bench.target()}, {bench.device, 4096, bench.target()}};
  CHECK(launch_all(requests, 132, nullptr) == 1);
  expected.add(requests[0].target, DType::raw, sum);
  expected.add(requests[1].target, DType::raw, on_host(bench, {0, 4096}));
  expected.check();
  CUDA_OK(cudaFree(large));
}

TEST_CASE("in a captured graph every replay of every piece draws a slot and bears its node and ordinal") {
  Bench bench(4 << 20);
  Ring ring(bench.slots, 256);
  std::vector<Range> ranges;
  for (size_t i = 0; i < 60; ++i) ranges.push_back({4096 * i, i % 20 == 7 ? 3'000'000 : i % 5 == 0 ? 90'000 : 100 * i});
  Graph graph([&](cudaStream_t stream) {
    std::vector<DigestRequest> requests;
    for (uint32_t i = 0; i < ranges.size(); ++i) {
      DigestTarget target;
      target.ring = ring.device();
      target.scratch = bench.scratch + i;
      target.node = 1000 + i;
      requests.push_back({bench.device + ranges[i].offset, ranges[i].size, target});
    }
    CHECK(launch_all(requests, 132, stream) == 2);
  });
  for (uint32_t replay = 0; replay < 30; ++replay) {
    graph.launch();
    graph.wait();
    std::map<uint32_t, SlotResult> found;
    for (size_t i = 0; i < ranges.size(); ++i) {
      SlotResult result;
      REQUIRE(ring.take(&result));
      found[result.node] = result;
    }
    REQUIRE(found.size() == ranges.size());
    for (uint32_t i = 0; i < ranges.size(); ++i) {
      const SlotResult& result = found.at(1000 + i);
      CHECK(result.ordinal == replay);
      check_equal(finish(DType::raw, result.raw), on_host(bench, ranges[i]));
    }
  }
  CHECK(ring.dropped() == 0);
  bench.check_scratch_is_clean();
}

TEST_CASE("a slot and a ring serve pieces of one launch") {
  Bench bench(1 << 20);
  Ring ring(bench.slots + 100, 8);
  std::vector<DigestRequest> requests = {{bench.device, 100'000, bench.target()}, {bench.device + 16, 70'000, {}}};
  requests[1].target.ring = ring.device();
  requests[1].target.scratch = bench.scratch + 100;
  requests[1].target.node = 5;
  CHECK(launch_all(requests, 132, nullptr) == 1);
  CUDA_OK(cudaDeviceSynchronize());
  SlotResult found;
  REQUIRE(read_slot(*requests[0].target.slot, requests[0].target.ticket, &found));
  check_equal(finish(DType::raw, found.raw), on_host(bench, {0, 100'000}));
  REQUIRE(ring.take(&found));
  CHECK(found.node == 5);
  check_equal(finish(DType::raw, found.raw), on_host(bench, {16, 70'000}));
}

TEST_CASE("slots that are used again as soon as they are answered, on four streams, give no wrong digest") {
  constexpr size_t kStreams = 4, kPieces = 3, kRounds = 5000, kPatience = 1'000'000'000;
  Bench bench(4 << 20);
  cudaStream_t streams[kStreams];
  for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Range ranges[kPieces] = {{0, 200'000}, {160, 1'000'000}, {320, 5000}};
  DigestResult expected[kPieces];
  for (size_t i = 0; i < kPieces; ++i) expected[i] = on_host(bench, ranges[i]);
  size_t wrong = 0;
  for (uint32_t round = 1; round <= kRounds; ++round) {
    // The same slots and scratch on the next stream, with nothing but the answer between the two uses.
    std::vector<DigestRequest> requests;
    for (size_t i = 0; i < kPieces; ++i) {
      DigestTarget target;
      target.slot = bench.slots + i;
      target.scratch = bench.scratch + i;
      target.ticket = round;
      requests.push_back({bench.device + ranges[i].offset, ranges[i].size, target});
    }
    launch_all(requests, 132, streams[round % kStreams]);
    for (size_t i = 0; i < kPieces; ++i) {
      SlotResult found;
      bool answered = false;
      for (uint64_t tries = 0; !answered && tries < kPatience; ++tries) {
        answered = read_slot(bench.slots[i], round, &found);
      }
      REQUIRE(answered);
      wrong += found.raw.digest != expected[i].digest;
    }
  }
  CHECK(wrong == 0);
  for (cudaStream_t stream : streams) CUDA_OK(cudaStreamDestroy(stream));
}

TEST_CASE("the kernels of the embedded fat binary do the same") {
  cudaLibrary_t library;
  CUDA_OK(cudaLibraryLoadData(&library, forkpoint_digest_fatbin_data, nullptr, nullptr, 0, nullptr, nullptr, 0));
  Bench bench(1 << 20);
  for (const size_t count : {2, 5, 17}) {
    Expected expected(bench);
    std::vector<DigestRequest> requests;
    for (size_t i = 0; i < count; ++i) requests.push_back({bench.device + 64 * i, 9000 * i, bench.target()});
    DigestPiecesLaunch launch;
    REQUIRE(plan_digest_pieces(requests.data(), count, 132, &launch) == count);
    cudaKernel_t kernel;
    CUDA_OK(cudaLibraryGetKernel(&kernel, library, launch.name()));
    void* arguments[] = {launch.params()};
    CUDA_OK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(launch.grid), dim3(launch.block), arguments,
                             launch.shared_bytes, nullptr));
    for (size_t i = 0; i < count; ++i) {
      expected.add(requests[i].target, DType::raw, on_host(bench, {64 * i, 9000 * i}));
    }
  }
  CUDA_OK(cudaLibraryUnload(library));
}

}  // namespace forkpoint
