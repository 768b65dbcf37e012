#include "kernels/scatter_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "kernels/scatter_launch.h"

using namespace forkpoint;
using namespace forkpoint::scatter;

namespace {

// The kernels' algorithm on the host, with the plan's own functions: sums by destination.
struct HostScatter {
  std::vector<int32_t> keys;
  std::vector<float> values;

  SortedKeys sorted() const { return {keys.data(), static_cast<int64_t>(keys.size()), false}; }

  std::vector<uint32_t> starts() const {
    std::vector<uint32_t> words((keys.size() + 31) / 32);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (starts_piece(sorted(), static_cast<int64_t>(i))) words[i / 32] |= 1u << (i % 32);
    }
    return words;
  }

  std::map<int32_t, float> sum() const {
    const int64_t count = static_cast<int64_t>(keys.size());
    const std::vector<uint32_t> words = starts();
    std::vector<float> partials(static_cast<size_t>(slots_of(count)));
    std::set<int64_t> taken;
    std::map<int32_t, float> sums;
    for (int64_t place = 0; place < count; ++place) {
      if (!(words[place / 32] >> (place % 32) & 1)) continue;
      const int64_t end = end_of_piece(words.data(), count, place);
      REQUIRE(end - place <= kPieceRows);
      REQUIRE(keys[place] == keys[end - 1]);
      float sum = -0.0f;
      for (int64_t i = place; i < end; ++i) sum += values[i];
      const bool first = starts_segment(sorted(), place);
      if (first && (end == count || keys[end] != keys[place])) {
        REQUIRE(sums.emplace(keys[place], sum).second);
      } else {
        const int64_t slot = slot_of_piece(place, first);
        REQUIRE(slot < slots_of(count));
        REQUIRE(taken.insert(slot).second);
        partials[slot] = sum;
      }
    }
    for (int64_t mark = 0; mark < count; mark += kPieceRows) {
      int64_t start = 0;
      if (!is_mark(sorted(), mark, &start)) continue;
      REQUIRE(starts_segment(sorted(), start));
      const int64_t pieces = (end_of(sorted(), start) - start + kPieceRows - 1) / kPieceRows;
      float total = -0.0f;
      for (int64_t group = 0, seen = 0; group < kPieceGroups; ++group) {
        int64_t begin, end;
        pieces_of_group(pieces, group, &begin, &end);
        REQUIRE(begin == std::min(seen, pieces));
        seen = end;
        if (group == kPieceGroups - 1) REQUIRE(end == pieces);
        float sum = -0.0f;
        for (int64_t piece = begin; piece < end; ++piece) {
          const int64_t slot = slot_of_piece(start + piece * kPieceRows, piece == 0);
          REQUIRE(taken.erase(slot) == 1);
          sum += partials[slot];
        }
        if (begin != end) total += sum;
      }
      REQUIRE(sums.emplace(keys[start], total).second);
    }
    CHECK(taken.empty());  // each partial sum has gone into a total
    return sums;
  }
};

std::vector<int32_t> lengths_to_keys(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> keys;
  for (size_t i = 0; i < lengths.size(); ++i)
    keys.insert(keys.end(), static_cast<size_t>(lengths[i]), static_cast<int32_t>(3 * i));
  return keys;
}

HostScatter with_random_values(std::vector<int32_t> keys, unsigned seed) {
  HostScatter work{std::move(keys), {}};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < work.keys.size(); ++i) work.values.push_back(normal(random));
  return work;
}

std::vector<int64_t> random_lengths(std::mt19937* random) {
  std::vector<int64_t> lengths(std::uniform_int_distribution<int>(1, 12)(*random));
  const int64_t around[] = {1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 128 * 33, 128 * 64 + 5};
  for (int64_t& length : lengths)
    length = around[std::uniform_int_distribution<size_t>(0, std::size(around) - 1)(*random)];
  return lengths;
}

}  // namespace

TEST_CASE("scatter: every contribution goes into its destination once, whatever the segments' lengths") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    HostScatter work{lengths_to_keys(random_lengths(&random)), {}};
    work.values.assign(work.keys.size(), 1.0f);
    const auto sums = work.sum();
    std::map<int32_t, float> expected;
    for (const int32_t key : work.keys) expected[key] += 1;
    CHECK(sums == expected);
  }
}

TEST_CASE("scatter: a segment of up to 128 contributions is added one by one") {
  const HostScatter work = with_random_values(lengths_to_keys({128, 5, 128, 1, 77}), 3);
  std::map<int32_t, float> expected;
  for (size_t i = 0; i < work.keys.size(); ++i) expected[work.keys[i]] += work.values[i];
  CHECK(work.sum() == expected);
}

TEST_CASE("scatter: a destination's sum does not depend on what goes to others") {
  const HostScatter alone = with_random_values(std::vector<int32_t>(5000, 40), 11);
  const float expected = alone.sum().at(40);
  for (const int64_t before : {1, 17, 127, 128, 129, 4000}) {
    HostScatter work = alone;
    work.keys.insert(work.keys.begin(), static_cast<size_t>(before), 2);
    work.values.insert(work.values.begin(), static_cast<size_t>(before), 0.1f);
    work.keys.insert(work.keys.end(), 300, 41);
    work.values.insert(work.values.end(), 300, 0.7f);
    CHECK(work.sum().at(40) == expected);
  }
}

TEST_CASE("scatter: the plan's launches cover all places, pieces and columns") {
  for (const int64_t count : {1, 127, 128, 129, 100000, 1000000}) {
    for (const int64_t columns : {1, 3, 4, 31, 100, 512, 1024, 70000}) {
      ScatterWork work{};
      work.keys = {nullptr, count, false};
      work.out_rows = 50000;
      work.columns = work.src_stride = work.out_stride = columns;
      work.alpha = 1;
      const ScatterPlan plan = plan_scatter(ScatterType::float32, work, 132);
      CAPTURE(count);
      CAPTURE(columns);
      CHECK(int64_t{plan.launches[0].grid_x} * plan.launches[0].block >= count);
      CHECK((plan.work.places & (plan.work.places - 1)) == 0);
      CHECK(plan.work.places <= 32);
      const bool several_warps = plan.work.piece_threads > 32;
      CHECK(plan.work.places >= (several_warps ? 1 : 32 / plan.work.piece_threads));
      CHECK(plan.work.piece_threads <= 128);
      CHECK(plan.launches[1].grid_x > 0);
      CHECK(plan.launches[1].grid_x % 2 == (plan.launches[1].grid_x > 2 ? 1 : plan.launches[1].grid_x % 2));
      CHECK((plan.launches[1].kernel == kScatterPiecesVector) == (columns % 4 == 0));
      CHECK((plan.launches[2].grid_x > 0) == (count > kPieceRows));
      CHECK((scatter_partials_bytes(ScatterType::float32, count, columns) > 0) == (count > kPieceRows));
    }
  }
  ScatterWork empty{};
  empty.columns = 4;
  for (const ScatterLaunch& launch : plan_scatter(ScatterType::float32, empty, 132).launches) CHECK(launch.grid_x == 0);
}
