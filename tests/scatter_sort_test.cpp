#include "kernels/scatter_sort.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/scatter_launch.h"

using namespace forkpoint;
using namespace forkpoint::scatter;

namespace {

// The kernels' algorithm on the host: chunk by chunk, in an order of chunks that is none.
struct HostSort {
  std::vector<uint32_t> keys, places, scratch;
  std::vector<int64_t> wide_places;
  SortWork work{};
  bool all_good = true;

  explicit HostSort(const IndexView& index, bool wide = false)
      : keys(static_cast<size_t>(index.count()), 77),
        places(keys.size(), 77),
        scratch(sort_scratch_bytes(index.count()) / 4, 77),
        wide_places(keys.size(), 77) {
    work.index = index;
    work.keys = keys.data();
    work.places = wide ? static_cast<void*>(wide_places.data()) : places.data();
    work.scratch = scratch.data();
    work.wide_places = wide;
    run();
  }

  uint32_t key(const SortWork& one, int64_t place) {
    if (!one.from_index) return one.keys_in[place];
    bool good = true;
    const uint32_t key = one.index.key_at(static_cast<uint32_t>(place), &good);
    all_good = all_good && good;
    return key;
  }

  void run() {
    const SortPlan plan = plan_sort(work);
    REQUIRE(plan.digit_count <= kMostDigits);
    REQUIRE(plan.blocks <= kMostChunks);
    for (int d = 0; d < plan.digit_count; ++d) {
      const SortWork& one = plan.digits[d];
      REQUIRE(one.bits <= kMostDigitBits);
      REQUIRE(one.bits >= 1);
      const size_t bins = size_t{1} << one.bits;
      REQUIRE(plan.blocks * bins <= scratch.size() - 2 * keys.size());  // and the other buffers lie behind
      std::vector<uint32_t> next(plan.blocks * bins);
      const auto digit = [&](int64_t place) { return key(one, place) >> one.shift & (bins - 1); };
      const auto end_of = [&](int64_t b) { return std::min((b + 1) * one.chunk, one.index.count()); };
      REQUIRE(plan.blocks * one.chunk >= one.index.count());
      REQUIRE(one.chunk % kSortTile == 0);
      for (int64_t b = 0; b < plan.blocks; ++b)
        for (int64_t p = b * one.chunk; p < end_of(b); ++p) ++next[b * bins + digit(p)];
      uint32_t sum = 0;
      for (size_t bin = 0; bin < bins; ++bin)
        for (int64_t b = 0; b < plan.blocks; ++b) sum += std::exchange(next[b * bins + bin], sum);
      REQUIRE(sum == one.index.count());
      for (int64_t b = plan.blocks - 1; b >= 0; --b) move(one, b * one.chunk, end_of(b), next.data() + b * bins, digit);
    }
  }

  template <typename Digit>
  void move(const SortWork& one, int64_t begin, int64_t end, uint32_t* next, Digit digit) {
    for (int64_t p = begin; p < end; ++p) {
      const uint32_t to = next[digit(p)]++;
      const uint32_t place = one.from_index ? static_cast<uint32_t>(p) : one.places_in[p];
      one.keys_out[to] = key(one, p);
      if (one.widens)
        static_cast<int64_t*>(one.places_out)[to] = place;
      else
        static_cast<uint32_t*>(one.places_out)[to] = place;
    }
  }
};

IndexView line(const std::vector<int64_t>& index, int64_t rows, uint32_t flags = kIndexWide, int64_t padding = -1) {
  return {index.data(), {0, 1, 0}, 1, static_cast<int64_t>(index.size()), 1, rows, padding, flags};
}

std::vector<int64_t> random_index(size_t count, int64_t low, int64_t high) {
  std::mt19937_64 random(count);
  std::vector<int64_t> index(count);
  for (int64_t& i : index) i = std::uniform_int_distribution<int64_t>(low, high - 1)(random);
  return index;
}

void check_sorted(const HostSort& sort, const std::vector<uint32_t>& keys, bool wide) {
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  size_t wrong = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t place = wide ? sort.wide_places[i] : sort.places[i];
    wrong += sort.keys[i] != keys[order[i]] || place != order[i];
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("scatter sort: the stable permutation, for any number of rows and places") {
  for (const int64_t rows : {1, 2, 1023, 1024, 1025, 50000, 1 << 20, (1 << 20) + 1, 1 << 30, INT32_MAX}) {
    for (const size_t count : {1, 31, 4096, 4097, 100000, 600000}) {
      if (count > 100000 && rows < 50000) continue;
      const std::vector<int64_t> index = random_index(count, 0, std::min<int64_t>(rows, 3 * count));
      CAPTURE(rows);
      CAPTURE(count);
      for (const bool wide : {false, true})
        check_sorted(HostSort(line(index, rows), wide), {index.begin(), index.end()}, wide);
    }
  }
}

TEST_CASE("scatter sort: what is no row, or padding, comes last, and is an error only where that is asked for") {
  const std::vector<int64_t> index = {3, -1, 7, 8, 3, INT64_MAX, INT64_MIN, 0, 7, -8, int64_t{1} << 32};
  HostSort left_out(line(index, 8, kIndexWide, 3));
  CHECK(left_out.all_good);
  check_sorted(left_out, {8, 8, 7, 8, 8, 8, 8, 0, 7, 8, 8}, false);
  HostSort wrapped(line(index, 8, kIndexWide | kIndexWrap));
  check_sorted(wrapped, {3, 7, 7, 8, 3, 8, 8, 0, 7, 0, 8}, false);
  const std::vector<int64_t> good = {3, 0, 7, 7};
  CHECK(HostSort(line(good, 8, kIndexWide | kIndexCheck)).all_good);
  for (const int64_t bad : {int64_t{8}, int64_t{-1}, int64_t{1} << 32, INT64_MIN}) {
    const std::vector<int64_t> one = {3, bad, 7, 7};
    CHECK_FALSE(HostSort(line(one, 8, kIndexWide | kIndexCheck)).all_good);
  }
  const std::vector<int64_t> ends = {-8, 7};
  CHECK(HostSort(line(ends, 8, kIndexWide | kIndexCheck | kIndexWrap)).all_good);
  const std::vector<int64_t> before = {-9, 7};
  CHECK_FALSE(HostSort(line(before, 8, kIndexWide | kIndexCheck | kIndexWrap)).all_good);
}

TEST_CASE("scatter sort: where rows fill their bits, what is left out still has a key of its own") {
  std::vector<int64_t> index(2000, 1023);
  index[5] = 1024, index[6] = 0;
  std::vector<uint32_t> keys(index.begin(), index.end());
  check_sorted(HostSort(line(index, 1024)), keys, false);
  index[5] = keys[5] = 1022;  // all are rows: a digit less is enough
  check_sorted(HostSort(line(index, 1024, kIndexWide | kIndexCheck)), keys, false);
  SortWork work{};
  work.index = line(index, 1024, kIndexWide | kIndexCheck);
  CHECK(plan_sort(work).digit_count == 1);
  work.index.flags = kIndexWide;
  CHECK(plan_sort(work).digit_count == 2);
}

TEST_CASE("scatter sort: an index of three dimensions, spread along any of them, 32 or 64 bits wide") {
  const int64_t blocks = 3, length = 70, columns = 5, rows = 11;
  for (unsigned spread = 0; spread < 8; ++spread) {
    const int64_t sizes[] = {spread & 1 ? 1 : blocks, spread & 2 ? 1 : length, spread & 4 ? 1 : columns};
    const std::vector<int64_t> wide = random_index(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2]), 0, rows);
    const std::vector<int32_t> narrow(wide.begin(), wide.end());
    IndexView index{wide.data(), {spread & 1 ? 0 : sizes[1] * sizes[2], spread & 2 ? 0 : sizes[2], spread & 4 ? 0 : 1},
                    blocks,      length,
                    columns,     rows,
                    -1,          kIndexWide};
    std::vector<uint32_t> keys;
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t l = 0; l < length; ++l)
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t at = ((b % sizes[0]) * sizes[1] + l % sizes[1]) * sizes[2] + c % sizes[2];
          keys.push_back(static_cast<uint32_t>((b * rows + wide[at]) * columns + c));
        }
    CAPTURE(spread);
    check_sorted(HostSort(index), keys, false);
    index.data = narrow.data();
    index.flags = 0;
    check_sorted(HostSort(index), keys, false);
  }
}

TEST_CASE("scatter sort: parts of the scratch do not overlap, and nothing is launched for nothing") {
  for (const int64_t count : {1, 128, 129, 4096, 100000}) {
    for (const int64_t columns : {0, 1, 7, 1024}) {
      const ScatterScratch at = lay_out_scratch(ScatterType::float64, count, columns);
      const size_t begins[] = {at.keys, at.places, at.sort, at.starts, at.partials, at.bytes};
      const size_t words = static_cast<size_t>(count) * 4;
      const size_t sizes[] = {words, words, sort_scratch_bytes(count), scatter_starts_bytes(count),
                              scatter_partials_bytes(ScatterType::float64, count, columns)};
      for (int i = 0; i < 5; ++i) {
        CHECK(begins[i] % 256 == 0);
        CHECK(begins[i] + sizes[i] <= begins[i + 1]);
      }
    }
  }
  const std::vector<int64_t> tile(kSortTile), more(kSortTile + 1);
  SortWork one{};
  one.index = line(tile, 5);
  CHECK(plan_sort(one).digits[0].alone);
  CHECK(plan_sort(one).blocks == 1);
  one.index = line(more, 5);
  CHECK_FALSE(plan_sort(one).digits[0].alone);
  SortWork nothing{};
  CHECK(plan_sort(nothing).blocks == 0);
  CHECK(sort_scratch_bytes(0) == 0);
}
