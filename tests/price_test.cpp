#include "lib/price.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

namespace forkpoint {
namespace {

using Set = std::vector<size_t>;

bool holds(const Set& kept, const Set& needed) {
  return std::all_of(needed.begin(), needed.end(),
                     [&](size_t knob) { return std::find(kept.begin(), kept.end(), knob) != kept.end(); });
}

}  // namespace

TEST_CASE("a step takes from its begin to that of the next, on the rank that takes longest") {
  const std::vector<StepBegins> ranks = {{{4, 1'000'000}, {5, 3'000'000}, {6, 4'000'000}, {7, 9'000'000}},
                                         {{4, 71'000'000}, {5, 72'000'000}, {6, 75'500'000}, {7, 76'000'000}}};
  CHECK(step_times_ms(ranks, 4, 7) == std::vector<double>{2, 3.5, 5});
  CHECK(step_times_ms(ranks, 5, 6) == std::vector<double>{3.5});
  CHECK(step_times_ms(ranks, 4, 9) == std::vector<double>{2, 3.5, 5});  // those that began
  CHECK(step_times_ms({{{4, 1}, {6, 2}}}, 4, 6).empty());               // one is not known: neither of its neighbours is
  CHECK(step_times_ms({ranks[0], {}}, 4, 7).empty());                   // nor is a step of which a rank said nothing
  CHECK(step_times_ms({}, 4, 7).empty());
}

TEST_CASE("medians of odd and even numbers") {
  CHECK(median({5}) == 5);
  CHECK(median({9, 1, 5}) == 5);
  CHECK(median({9, 1, 5, 6}) == 5.5);
  const ArmTime time = arm_time({10, 12, 11});
  CHECK(time.median_ms == 11);
  CHECK(time.low_ms == 10);
  CHECK(time.high_ms == 12);
}

TEST_CASE("a difference counts only where runs are apart by more than they spread") {
  const ArmTime fast = arm_time({10, 10.2, 10.1});
  CHECK(differ(fast, arm_time({11, 11.1, 11.2}), 3, 3));
  CHECK(differ(arm_time({11, 11.1, 11.2}), fast, 3, 3));
  CHECK_FALSE(differ(fast, arm_time({10.15, 10.3, 10.25}), 3, 3));  // they overlap
  CHECK_FALSE(differ(fast, arm_time({10.21, 10.4, 10.22}), 3, 3));  // apart, by less than the spread
  CHECK_FALSE(differ(fast, arm_time({10.3, 14, 10.4}), 3, 3));      // one arm is all noise
  CHECK_FALSE(differ(arm_time({10, 10.1}), arm_time({20, 20.1}), 2, 2));  // two runs each say too little of the noise
  CHECK_FALSE(differ(fast, fast, 3, 3));
}

TEST_CASE("the search finds what is needed, whatever that is, and nothing else") {
  constexpr size_t kCount = 9;
  for (unsigned mask = 1; mask < (1u << kCount); ++mask) {
    Set needed;
    for (size_t knob = 0; knob < kCount; ++knob) {
      if ((mask >> knob) & 1) needed.push_back(knob);
    }
    CHECK(minimal_knobs(kCount, [&](const Set& kept) { return holds(kept, needed); }) == needed);
  }
}

TEST_CASE("of two knobs that do the same the one that comes first is kept") {
  const auto either = [](const Set& kept) { return holds(kept, {1}) || holds(kept, {6}); };
  CHECK(minimal_knobs(8, either) == Set{1});
  const auto both_or_one = [](const Set& kept) { return holds(kept, {0, 3}) || holds(kept, {7}); };
  CHECK(minimal_knobs(8, both_or_one) == Set{0, 3});
}

TEST_CASE("no set is asked about twice, nor is the empty one or the whole, and few are") {
  std::set<Set> asked;
  const auto repeats = [&](const Set& kept) {
    CHECK(asked.insert(kept).second);
    CHECK_FALSE(kept.empty());
    CHECK(kept.size() < 16);
    return holds(kept, {11});
  };
  CHECK(minimal_knobs(16, repeats) == Set{11});
  CHECK(asked.size() <= 8);
  CHECK(minimal_knobs(1, [](const Set&) -> bool { FAIL("asked"); return false; }) == Set{0});
}

}  // namespace forkpoint
