// The planner of many tensors in one launch, checked without a device: the kernel's search is followed on the host, and each
// block must find its tensor, with that tensor's own rule, place and target.
#include "kernels/digest_tensors.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "lib/digest_magnitude.h"
#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr uint64_t kBase = 0x7000000000;
constexpr uint64_t kWarps = kDigestBlockThreads / 32;

DigestFlat run(size_t number, uint64_t size_bytes, DType dtype, uint64_t first_byte = 0) {
  DigestTarget target;
  target.slot = reinterpret_cast<DigestSlot*>(0x1000 + 256 * number);
  target.scratch = reinterpret_cast<DigestScratch*>(0x900000 + 128 * number);
  target.ticket = static_cast<uint32_t>(7 + number);
  const auto* data = reinterpret_cast<const void*>(kBase + (uint64_t{number} << 36) + first_byte % 16);
  const DigestLaunch single = plan_digest_bytes(data, size_bytes, dtype, first_byte, target, 132);
  REQUIRE(single.is_flat());
  return single.flat;
}

template <int kCapacity>
void check_tensor(const DigestTensors<kCapacity>& tensors, size_t i, const DigestFlat& asked) {
  const DigestTensor& tensor = tensors.tensor[i];
  CHECK(tensor.data == asked.data);
  CHECK(tensor.size_bytes == asked.size_bytes);
  CHECK(tensor.first_byte == asked.first_byte);
  CHECK(tensor.slot == asked.target.slot);
  CHECK(tensor.scratch == asked.target.scratch);
  CHECK(tensor.ticket == asked.target.ticket);
  REQUIRE(tensor.rule < kMostRules);
  const DigestTensorRule& rule = tensors.rule[tensor.rule];
  CHECK(rule.loop == asked.loop);
  CHECK(rule.mask == asked.mask);
  CHECK(rule.largest_finite == asked.largest_finite);
}

// Blocks of each tensor, as the kernel finds them.
template <int kCapacity>
std::vector<uint64_t> follow(const DigestTensors<kCapacity>& tensors, uint32_t grid, const DigestFlat* asked,
                             size_t count) {
  std::vector<uint64_t> blocks(count);
  for (uint32_t block = 0; block < grid; ++block) {
    size_t place = 0;
    while (place + 1 < tensors.kPlaces && tensors.first_block[place + 1] <= block) ++place;
    REQUIRE(place < count);
    CHECK(block - tensors.first_block[place] == blocks[place]++);
  }
  for (size_t i = 0; i < count; ++i) {
    check_tensor(tensors, i, asked[i]);
    CHECK(blocks[i] >= 1);
    CHECK(blocks[i] <= kMostParts);
  }
  return blocks;
}

std::vector<uint64_t> follow(const DigestTensorsLaunch& launch, const DigestFlat* asked, size_t count) {
  CHECK(launch.block == kDigestBlockThreads);
  if (launch.kernel == kDigestTensorsKernel) return follow(launch.few, launch.grid, asked, count);
  REQUIRE(launch.kernel == kDigestTensorsKernel + 1);
  return follow(launch.many, launch.grid, asked, count);
}

}  // namespace

TEST_CASE("every block finds its tensor, for every number of tensors, in as few launches as hold them") {
  std::mt19937_64 random(2);
  for (size_t count = 0; count <= 300; ++count) {
    CAPTURE(count);
    const int multiprocessors = std::vector<int>{1, 4, 132, 160}[count % 4];
    std::vector<DigestFlat> runs;
    for (size_t i = 0; i < count; ++i) {
      const auto dtype = static_cast<DType>(random() % kDTypeCount);
      const uint64_t element = static_cast<uint64_t>(size_bytes(dtype));
      const uint64_t size = random() % (uint64_t{1} << random() % 32) / element * element;
      runs.push_back(run(i, size, dtype, random() % 3 == 0 ? element * (random() % 5000) : 0));
    }
    size_t launches = 0;
    DigestTensorsLaunch launch;
    for (size_t done = 0, covered = 0; done < count; done += covered, ++launches) {
      covered = plan_digest_tensors(runs.data() + done, count - done, multiprocessors, &launch);
      REQUIRE(covered >= 1);
      CHECK(launch.param_bytes() <= 4096);
      if (covered == 1) {
        CHECK(launch.kernel == static_cast<int>(runs[done].loop));
        CHECK(launch.flat.data == runs[done].data);
        CHECK(launch.grid == launch.flat.parts);
        continue;
      }
      uint64_t blocks = 0;
      for (const uint64_t of_one : follow(launch, runs.data() + done, covered)) blocks += of_one;
      CHECK(blocks <= std::max<uint64_t>(4 * static_cast<uint64_t>(multiprocessors), 2 * covered));
    }
    CHECK(launches == (count + kMostTensors - 1) / kMostTensors);
  }
}

TEST_CASE("all rules that there are find room beside each other") {
  std::set<std::tuple<uint64_t, uint32_t, uint32_t>> rules;
  std::vector<DigestFlat> runs;
  for (int d = 0; d < kDTypeCount; ++d) {
    runs.push_back(run(runs.size(), 4096, static_cast<DType>(d)));
    rules.insert({runs.back().largest_finite, runs.back().mask, runs.back().loop});
  }
  CHECK(rules.size() <= kMostRules);
  DigestTensorsLaunch launch;
  CHECK(plan_digest_tensors(runs.data(), runs.size(), 132, &launch) == runs.size());
}

TEST_CASE("large tensors are shared by many blocks and small ones have one each") {
  std::vector<DigestFlat> runs = {run(0, 103 << 20, DType::bf16)};
  for (size_t i = 1; i < 60; ++i) runs.push_back(run(i, i % 2 ? 2048 : 8 << 20, DType::bf16));
  DigestTensorsLaunch launch;
  REQUIRE(plan_digest_tensors(runs.data(), runs.size(), 132, &launch) == 60);
  const std::vector<uint64_t> blocks = follow(launch, runs.data(), 60);
  CHECK(blocks[0] > 100);
  CHECK(blocks[1] == 1);
  CHECK(blocks[2] > 8);
}

}  // namespace forkpoint
