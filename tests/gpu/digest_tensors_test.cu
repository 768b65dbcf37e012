// Many tensors in one launch, with their statistics, against the host's digest of the same bytes and against the device's of
// each tensor alone.
#include "kernels/digest_tensors.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/digest_fatbin.h"
#include "tests/gpu/digest_fixture.h"

namespace forkpoint {
namespace {

struct Tensor {
  size_t offset;
  size_t size;
  DType dtype;
  uint64_t first_byte = 0;
};

DigestResult on_host(const Bench& bench, const Tensor& tensor) {
  return digest_bytes(&bench.host[tensor.offset], tensor.size, tensor.dtype, tensor.first_byte);
}

// As the probe does it: what lies well goes together, the rest alone. Returns the number of launches that were shared.
size_t launch_all(Bench& bench, const std::vector<Tensor>& tensors, Expected& expected, int multiprocessors,
                  cudaStream_t stream = nullptr) {
  std::vector<DigestFlat> runs;
  for (const Tensor& tensor : tensors) {
    const DigestTarget target = bench.target();
    DigestLaunch single = plan_digest_bytes(bench.device + tensor.offset, tensor.size, tensor.dtype, tensor.first_byte,
                                            target, multiprocessors);
    if (single.is_flat()) {
      runs.push_back(single.flat);
    } else {
      CUDA_OK(launch_digest(single, stream));
    }
    expected.add(target, tensor.dtype, on_host(bench, tensor));
  }
  size_t launches = 0;
  DigestTensorsLaunch launch;
  for (size_t done = 0, covered = 0; done < runs.size(); done += covered, ++launches) {
    covered = plan_digest_tensors(runs.data() + done, runs.size() - done, multiprocessors, &launch);
    REQUIRE(covered >= 1);
    CUDA_OK(launch_digest(launch, stream));
  }
  return launches;
}

void check_tensors(Bench& bench, const std::vector<Tensor>& tensors, int multiprocessors = 132) {
  REQUIRE(tensors.size() < bench.room());
  Expected expected(bench);
  launch_all(bench, tensors, expected, multiprocessors);
}

Tensor random_tensor(std::mt19937_64& random, int largest_bits, size_t room) {
  const auto dtype = static_cast<DType>(random() % kDTypeCount);
  const auto element = static_cast<size_t>(size_bytes(dtype));
  const size_t limit = size_t{1} << (random() % static_cast<uint64_t>(largest_bits + 1));
  const size_t size = (random() % 3 == 0 ? limit : random() % (limit + 1)) / element * element;
  const uint64_t first = random() % 4 == 0 ? random() % 5000 * element : 0;
  // Where a shard's first byte says it must lie to be read in blocks, and now and then at any address.
  const size_t odd = random() % 8 == 0 ? random() % 16 : first % 16;
  return {16 * (random() % ((room - limit - 64) / 16)) + odd, size, dtype, first};
}

}  // namespace

TEST_CASE("every number of tensors from 1 to 300, of every dtype and of sizes from nothing to 256 KiB, agrees with the host") {
  Bench bench(2 << 20);
  std::mt19937_64 random(3);
  for (size_t count = 1; count <= 300; ++count) {
    CAPTURE(count);
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < count; ++i) tensors.push_back(random_tensor(random, 18, bench.host.size()));
    check_tensors(bench, tensors);
  }
  bench.check_scratch_is_clean();
}

TEST_CASE("every dtype at every size around a block, a row, a tile and a block's work agrees with the host") {
  Bench bench(1 << 20);
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    const auto element = static_cast<size_t>(size_bytes(dtype));
    std::vector<Tensor> tensors;
    for (size_t centre : {0, 16, 512, 2048, 4096, 16384, 32768, 65536}) {
      for (size_t elements = centre / element >= 9 ? centre / element - 9 : 0; elements <= centre / element + 9; ++elements) {
        tensors.push_back({16 * (elements % 7), elements * element, dtype});
      }
    }
    check_tensors(bench, tensors);
  }
}

TEST_CASE("tensors of a training step, shared by many blocks or by one, agree with the host and leave the scratch clean") {
  constexpr size_t kMiB = 1 << 20;
  Bench bench(64 * kMiB);
  std::vector<Tensor> tensors = {{0, 50'257 * 1024, DType::bf16}, {48, 0, DType::f32}};
  for (size_t i = 0; i < 100; ++i) {
    const DType dtype = i % 3 == 0 ? DType::f32 : i % 3 == 1 ? DType::bf16 : DType::i64;
    const size_t size = i % 12 < 4 ? (2 + i % 3 * 3) * kMiB : i % 2 ? 2048 : 8192;
    tensors.push_back({32 * 1024 * i, size, dtype});
  }
  Expected expected(bench);
  CHECK(launch_all(bench, tensors, expected, 132) == 2);
  expected.check();
  bench.check_scratch_is_clean();
}

TEST_CASE("non-finite elements and the largest finite one are counted for the tensor that holds them") {
  Bench bench(1 << 20);
  for (unsigned char& byte : bench.host) byte &= 0xBF;  // no element has all exponent bits
  const Tensor tensors[] = {{0, 100'000, DType::bf16}, {131'072, 300'000, DType::f32}, {524'288, 400'000, DType::f16}};
  const uint16_t infinite = 0x7F80, not_a_number = 0x7E00;
  const uint32_t infinity = 0xFF800000;
  std::memcpy(&bench.host[50'000], &infinite, 2);
  std::memcpy(&bench.host[131'072 + 299'996], &infinity, 4);
  for (size_t i = 0; i < 1000; ++i) std::memcpy(&bench.host[524'288 + 2 * i], &not_a_number, 2);
  CUDA_OK(cudaMemcpy(bench.device, bench.host.data(), bench.host.size(), cudaMemcpyHostToDevice));
  CHECK(on_host(bench, tensors[0]).stats.nonfinite == 1);
  CHECK(on_host(bench, tensors[1]).stats.nonfinite == 1);
  CHECK(on_host(bench, tensors[2]).stats.nonfinite == 1000);
  check_tensors(bench, {tensors, tensors + 3});
}

TEST_CASE("no number of multiprocessors changes a bit of any tensor") {
  Bench bench(8 << 20);
  const std::vector<Tensor> tensors = {{0, (5 << 20) + 4, DType::f32}, {16, 100'000, DType::f16},
                                       {32, 77, DType::u8},           {0, 0, DType::f64},
                                       {1 << 20, 3 << 20, DType::i64}, {0, 2048, DType::raw},
                                       {64, 40'000, DType::c64},      {4, 5000, DType::i16, 4}};
  for (int multiprocessors : {1, 2, 7, 78, 132, 500}) check_tensors(bench, tensors, multiprocessors);
  bench.check_scratch_is_clean();
}

TEST_CASE("shards that were digested together add up to the digest of the whole tensor") {
  Bench bench(1 << 20);
  const size_t whole = 600'000, cuts[] = {0, 16, 2048, 2064, 100'000, 100'000, 599'984, whole};
  std::vector<DigestFlat> runs;
  std::vector<DigestTarget> targets;
  for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
    targets.push_back(bench.target());
    const DigestLaunch single = plan_digest_bytes(bench.device + cuts[i], cuts[i + 1] - cuts[i], DType::bf16, cuts[i],
                                                  targets.back(), 132);
    REQUIRE(single.is_flat());
    runs.push_back(single.flat);
  }
  DigestTensorsLaunch launch;
  REQUIRE(plan_digest_tensors(runs.data(), runs.size(), 132, &launch) == runs.size());
  CUDA_OK(launch_digest(launch, nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  Digest sum;
  for (const DigestTarget& target : targets) {
    SlotResult part;
    REQUIRE(read_slot(*target.slot, target.ticket, &part));
    sum += part.raw.digest;
  }
  CHECK(sum == digest_bytes(bench.host.data(), whole, DType::bf16).digest);
}

TEST_CASE("the kernels for many tensors in the embedded fat binary do the same") {
  cudaLibrary_t library;
  CUDA_OK(cudaLibraryLoadData(&library, forkpoint_digest_fatbin_data, nullptr, nullptr, 0, nullptr, nullptr, 0));
  Bench bench(1 << 20);
  for (const size_t count : {2, 8, 9, 64}) {
    Expected expected(bench);
    std::vector<DigestFlat> runs;
    for (size_t i = 0; i < count; ++i) {
      const auto dtype = static_cast<DType>(i % kDTypeCount);
      const size_t size = 9008 * i;
      const DigestTarget target = bench.target();
      runs.push_back(plan_digest_bytes(bench.device + 64 * i, size, dtype, 0, target, 132).flat);
      expected.add(target, dtype, digest_bytes(&bench.host[64 * i], size, dtype));
    }
    DigestTensorsLaunch launch;
    REQUIRE(plan_digest_tensors(runs.data(), count, 132, &launch) == count);
    cudaKernel_t kernel;
    CUDA_OK(cudaLibraryGetKernel(&kernel, library, launch.name()));
    void* arguments[] = {launch.params()};
    CUDA_OK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(launch.grid), dim3(launch.block), arguments,
                             launch.shared_bytes, nullptr));
  }
  CUDA_OK(cudaLibraryUnload(library));
}

}  // namespace forkpoint
