// The device digest against the host's, on every dtype, size, place and view.
#include "kernels/device_digest.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/digest_fatbin.h"
#include "tests/gpu/digest_fixture.h"

namespace forkpoint {
namespace {

constexpr DType dtype_at(int i) { return static_cast<DType>(i); }

TensorView random_view(std::mt19937_64& random, int64_t longest) {
  const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % (high - low + 1)); };
  const auto dtype = dtype_at(static_cast<int>(pick(0, kDTypeCount - 1)));
  const auto dims = static_cast<size_t>(pick(0, 5));
  std::vector<int64_t> shape(dims), strides(dims), global(dims), offset(dims);
  std::vector<size_t> order(dims);
  for (size_t d = 0; d < dims; ++d) {
    shape[d] = pick(1, d + 1 == dims ? longest : 6);
    offset[d] = pick(0, 3);
    global[d] = offset[d] + shape[d] + pick(0, 3);
    order[d] = d;
  }
  if (pick(0, 1)) std::shuffle(order.begin(), order.end(), random);
  int64_t step = 1;
  for (size_t k = dims; k-- > 0;) {
    const size_t d = order[k];
    strides[d] = step;
    step *= shape[d] + pick(0, 1) * pick(0, 3);
    const int64_t kind = pick(0, 11);
    if (kind == 0) strides[d] = 0;
    if (kind == 1) strides[d] = -strides[d];
  }
  return pick(0, 1) ? shard_view(dtype, shape, strides, global, offset) : whole_view(dtype, shape, strides);
}

// Lowest and highest element of a view, in elements.
std::pair<int64_t, int64_t> reach(const TensorView& view) {
  int64_t low = 0, high = 0;
  for (int d = 0; d < view.dims; ++d) (view.strides[d] < 0 ? low : high) += (view.shape[d] - 1) * view.strides[d];
  return {low, high};
}

}  // namespace

TEST_CASE("device and host agree on every dtype, size, address and place in the tensor") {
  Bench bench(1 << 20);
  Expected expected(bench);
  for (int d = 0; d < kDTypeCount; ++d) {
    const DType dtype = dtype_at(d);
    const auto element = static_cast<size_t>(size_bytes(dtype));
    for (size_t elements : {0, 1, 2, 3, 5, 16, 31, 127, 128, 513, 1000, 4096, 9001}) {
      for (size_t address : {0, 1, 2, 4, 8, 16, 20, 48, 1028}) {
        for (uint64_t first : {0, 1, 3, 4, 127, 512, 1024, 5000}) {
          expected.bytes(address, elements * element, dtype, first * element);
        }
      }
    }
  }
}

TEST_CASE("device and host agree on every size and start of raw bytes around a tile") {
  Bench bench(1 << 16);
  Expected expected(bench);
  for (size_t size = 0; size < 70; ++size) {
    for (size_t address = 0; address < 20; ++address) {
      expected.bytes(address, size, DType::raw, (size * 7 + address * 3) % 41);
    }
  }
  for (size_t size = 2000; size < 2100; ++size) {
    for (uint64_t first : {0, 1, 2, 3, 16, 2000, 2047}) expected.bytes(size % 5, size, DType::u8, first);
  }
}

TEST_CASE("device and host agree on large tensors of every dtype, with and without non-finite elements") {
  constexpr size_t kBytes = 33 << 20;
  Bench bench(kBytes + 64);
  for (const bool finite : {false, true}) {
    // Clearing one exponent bit of every element leaves none that is not finite.
    if (finite) {
      for (unsigned char& byte : bench.host) byte &= 0xBF;
      CUDA_OK(cudaMemcpy(bench.device, bench.host.data(), bench.host.size(), cudaMemcpyHostToDevice));
    }
    Expected expected(bench);
    for (int d = 0; d < kDTypeCount; ++d) {
      expected.bytes(0, kBytes, dtype_at(d), 0);
      expected.bytes(32, kBytes - 4096 - 48, dtype_at(d), 48 + 2048 * 5);
      expected.bytes(16, (1 << 20) + 16, dtype_at(d), 16);
    }
  }
}

TEST_CASE("device and host agree on strided, permuted, broadcast and reversed views and on shards") {
  constexpr size_t kBytes = 24 << 20;
  Bench bench(kBytes);
  Expected expected(bench);
  std::mt19937_64 random(11);
  for (int i = 0; i < 3000; ++i) {
    const TensorView view = random_view(random, i % 10 == 0 ? 700 : 40);
    const auto [low, high] = reach(view);
    const auto element = static_cast<int64_t>(size_bytes(view.dtype));
    const auto shift = static_cast<int64_t>(random() % 2 ? 0 : random() % 33);
    REQUIRE((high - low + 1) * element + shift <= static_cast<int64_t>(kBytes));
    expected.view(static_cast<size_t>(-low * element + shift), view);
  }
}

TEST_CASE("shards on the device add up to the digest of the whole tensor") {
  Bench bench(1 << 20);
  const int64_t global[] = {96, 130};
  const TensorView whole = whole_view(DType::bf16, global);
  std::vector<DigestTarget> targets;
  for (int64_t begin : {0, 41}) {
    const int64_t shape[] = {96, begin == 0 ? 41 : 89}, strides[] = {130, 1}, offset[] = {0, begin};
    targets.push_back(bench.target());
    CUDA_OK(digest_on_device(bench.device + 2 * begin, shard_view(DType::bf16, shape, strides, global, offset),
                             targets.back(), nullptr));
  }
  CUDA_OK(cudaDeviceSynchronize());
  Digest sum;
  for (const DigestTarget& target : targets) {
    SlotResult part;
    REQUIRE(read_slot(*target.slot, target.ticket, &part));
    sum += part.raw.digest;
  }
  CHECK(sum == digest_view(bench.host.data(), whole).digest);
}

TEST_CASE("no number of blocks changes a bit, and the scratch is left clean") {
  Bench bench(5 << 20);
  Expected expected(bench);
  const size_t size = (5 << 20) - 100;
  const DigestResult host = digest_bytes(bench.host.data(), size, DType::bf16);
  const int64_t shape[] = {1000, 1001}, strides[] = {1203, 1};
  const TensorView view = whole_view(DType::bf16, shape, strides);
  const DigestResult host_view = digest_view(bench.host.data(), view);
  for (int multiprocessors : {1, 2, 7, 78, 132, 500}) {
    DigestTarget target = bench.target();
    DigestLaunch launch = plan_digest_bytes(bench.device, size, DType::bf16, 0, target, multiprocessors);
    CUDA_OK(launch_digest(launch, nullptr));
    expected.add(target, DType::bf16, host);
    target = bench.target();
    launch = plan_digest(bench.device, view, target, multiprocessors);
    CUDA_OK(launch_digest(launch, nullptr));
    expected.add(target, DType::bf16, host_view);
  }
  expected.check();
  bench.check_scratch_is_clean();
}

TEST_CASE("a batch of tensors of mixed dtypes and sizes agrees with the host") {
  Bench bench(64 << 20);
  std::vector<DigestLaunch> singles;
  Expected expected(bench);
  std::mt19937_64 random(5);
  size_t offset = 0;
  for (int i = 0; i < 1000; ++i) {
    const DType dtype = dtype_at(i % kDTypeCount);
    const size_t element = static_cast<size_t>(size_bytes(dtype));
    const size_t size = (i == 500 ? 9 << 20 : random() % (i % 50 == 0 ? 400000 : 20000)) / element * element;
    const DigestTarget target = bench.target();
    singles.push_back(plan_digest_bytes(bench.device + offset, size, dtype, offset, target, 132));
    REQUIRE(singles.back().is_flat());
    expected.add(target, dtype, digest_bytes(&bench.host[offset], size, dtype, offset));
    offset += (size + 15) / 16 * 16;
    REQUIRE(offset + (10 << 20) < bench.host.size());
  }
  std::vector<DigestFlat> pieces(20000);
  DigestFlat* device_pieces = nullptr;
  CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&device_pieces), pieces.size() * sizeof(DigestFlat)));
  DigestLaunch launch;
  const size_t count =
      plan_digest_batch(singles.data(), singles.size(), device_pieces, pieces.data(), pieces.size(), 132, &launch);
  REQUIRE(count > 1000);
  CUDA_OK(cudaMemcpy(device_pieces, pieces.data(), count * sizeof(DigestFlat), cudaMemcpyHostToDevice));
  CUDA_OK(launch_digest(launch, nullptr));
  expected.check();
  CUDA_OK(cudaFree(device_pieces));
}

TEST_CASE("beyond 4 GiB positions and addresses stay right") {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_OK(cudaMemGetInfo(&free_bytes, &total_bytes));
  constexpr size_t kBytes = (size_t{9} << 29) + 12345 * 16;  // 4.5 GiB and a bit
  REQUIRE_MESSAGE(free_bytes > kBytes + (size_t{1} << 30), "this test needs 6 GB of free device memory");
  Bench bench(8 << 20);
  unsigned char* large = nullptr;
  CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&large), kBytes));
  const size_t piece = bench.host.size();
  for (size_t at = 0; at < kBytes; at += piece) {
    CUDA_OK(cudaMemcpyAsync(large + at, bench.device, std::min(piece, kBytes - at), cudaMemcpyDeviceToDevice, nullptr));
  }
  DigestResult sum;
  uint64_t word_sum = 0;
  for (size_t at = 0; at < kBytes; at += piece) {
    const size_t size = std::min(piece, kBytes - at);
    const DigestResult part = digest_bytes(bench.host.data(), size, DType::bf16, at);
    sum.digest += part.digest;
    sum.stats.nonfinite += part.stats.nonfinite;
    sum.stats.absmax = std::max(sum.stats.absmax, part.stats.absmax);
    word_sum += part.stats.word_sum;
  }
  sum.stats.word_sum = fold_word_sum(word_sum);
  Expected expected(bench);
  DigestTarget target = bench.target();
  CUDA_OK(digest_bytes_on_device(large, kBytes, DType::bf16, 0, target, nullptr));
  expected.add(target, DType::bf16, sum);
  // Columns of a matrix whose rows lie 1 MiB apart, the last of them beyond 4 GiB.
  const int64_t shape[] = {static_cast<int64_t>(kBytes >> 20), 96}, strides[] = {1 << 19, 1};
  const TensorView rows = whole_view(DType::bf16, shape, strides);
  std::vector<unsigned char> gathered(static_cast<size_t>(shape[0]) * 192);
  for (int64_t r = 0; r < shape[0]; ++r) {
    std::memcpy(&gathered[static_cast<size_t>(r) * 192], &bench.host[(static_cast<size_t>(r) << 20) % piece], 192);
  }
  target = bench.target();
  CUDA_OK(digest_on_device(large, rows, target, nullptr));
  expected.add(target, DType::bf16, digest_bytes(gathered.data(), gathered.size(), DType::bf16));
  expected.check();
  CUDA_OK(cudaFree(large));
}

TEST_CASE("in a captured graph every replay draws a slot from the ring; a full ring counts what it drops") {
  constexpr uint64_t kCapacity = 8;
  Bench bench(4 << 20);
  Ring ring(bench.slots, kCapacity);
  const size_t sizes[] = {3 << 20, 1000};
  Graph graph([&](cudaStream_t stream) {
    for (uint32_t node = 0; node < 2; ++node) {
      DigestTarget target;
      target.ring = ring.device();
      target.scratch = bench.scratch + node;
      target.node = 70 + node;
      CUDA_OK(digest_bytes_on_device(bench.device, sizes[node], DType::f32, 0, target, stream));
    }
  });
  const DigestResult expected[] = {digest_bytes(bench.host.data(), sizes[0], DType::f32),
                                   digest_bytes(bench.host.data(), sizes[1], DType::f32)};
  const auto take_both = [&](uint32_t ordinal) {
    for (uint32_t node = 0; node < 2; ++node) {
      SlotResult found;
      REQUIRE(ring.take(&found));
      CHECK(found.node == 70 + node);
      CHECK(found.ordinal == ordinal);
      check_equal(finish(DType::f32, found.raw), expected[node]);
    }
  };
  for (uint32_t replay = 0; replay < 20; ++replay) {
    graph.launch();
    graph.wait();
    take_both(replay);
  }
  CHECK(ring.dropped() == 0);
  for (int replay = 0; replay < 7; ++replay) graph.launch();
  graph.wait();
  CHECK(ring.dropped() == 14 - kCapacity);
  for (uint32_t replay = 20; replay < 24; ++replay) take_both(replay);
  SlotResult none;
  CHECK_FALSE(ring.take(&none));
  graph.launch();
  graph.wait();
  take_both(27);
}

TEST_CASE("the embedded fat binary holds every kernel by name, and they do the same") {
  cudaLibrary_t library;
  CUDA_OK(cudaLibraryLoadData(&library, forkpoint_digest_fatbin_data, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(forkpoint_digest_fatbin_size > 1000);
  cudaKernel_t kernels[kDigestKernelCount];
  for (int i = 0; i < kDigestKernelCount; ++i) {
    CUDA_OK(cudaLibraryGetKernel(&kernels[i], library, kDigestKernelNames[i]));
  }
  Bench bench(1 << 20);
  Expected expected(bench);
  for (const size_t address : {0, 4}) {
    const DigestTarget target = bench.target();
    DigestLaunch launch = plan_digest_bytes(bench.device + address, 1000000, DType::f32, 0, target, 132);
    void* arguments[] = {launch.params()};
    CUDA_OK(cudaLaunchKernel(reinterpret_cast<const void*>(kernels[launch.kernel]), dim3(launch.grid),
                             dim3(launch.block), arguments, launch.shared_bytes, nullptr));
    expected.add(target, DType::f32, digest_bytes(&bench.host[address], 1000000, DType::f32));
  }
  expected.check();
  CUDA_OK(cudaLibraryUnload(library));
}

}  // namespace forkpoint
