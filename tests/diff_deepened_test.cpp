// Runs of level step in which some steps were recorded by layer (record --on-trigger deepen).
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "tests/support/verdict_check.h"

namespace forkpoint {
namespace {

struct Deepened {
  std::vector<int64_t> steps;                                                // by layer
  std::function<uint64_t(int64_t step)> output = [](int64_t) { return 0; };  // added to the seed of a layer's output
  std::function<uint64_t(int64_t step)> weight = [](int64_t) { return 0; };
};

Run write(const TemporaryFolder& folder, const std::string& name, const Deepened& what) {
  RunBuilder run(1, Level::step);
  for (int64_t step = 0; step < 10; ++step) {
    const auto seed = static_cast<uint64_t>(step);
    RankBuilder& rank = run.rank(0).step(step);
    if (std::find(what.steps.begin(), what.steps.end(), step) != what.steps.end()) {
      rank.forward("fc1").input("input", value(100 + seed)).output("output", value(200 + seed + what.output(step)));
    }
    rank.at(Phase::forward).scalar("loss", 2.0 + static_cast<double>(step), Role::loss);
    rank.at(Phase::optimizer, "fc1").add(Role::parameter, "weight", value(400 + seed + what.weight(step)));
  }
  return Run::open(run.write(folder / name));
}

Verdict compare(const Deepened& a, const Deepened& b) {
  const TemporaryFolder folder;
  return diff(write(folder, "a", a), write(folder, "b", b));
}

bool says_so(const Verdict& verdict) {
  return std::any_of(verdict.coverage.limits.begin(), verdict.coverage.limits.end(), [](const std::string& limit) {
    return limit.find("recorded by layer as well") != std::string::npos;
  });
}

}  // namespace

TEST_CASE(
    "steps that one run recorded by layer and the other did not are equal, and it is said what was not compared") {
  for (const bool swapped : {false, true}) {
    const Deepened deep{{4, 5}}, plain{};
    const Verdict verdict = swapped ? compare(plain, deep) : compare(deep, plain);
    CHECK(verdict.outcome == Outcome::identical);
    CHECK(verdict.coverage.level == "step");
    CHECK(says_so(verdict));
  }
}

TEST_CASE("what both runs recorded by layer is compared at their level, and that is said") {
  Deepened a{{3, 4, 5}}, b{{4, 5, 6}};
  b.output = [](int64_t step) { return step == 5 ? 7 : 0; };
  const Verdict verdict = compare(a, b);
  CHECK(verdict.outcome == Outcome::identical);
  CHECK(verdict.coverage.level == "step");
  CHECK(says_so(verdict));
  CHECK_FALSE(says_so(compare({}, {})));
}

TEST_CASE("a difference of level step in a step that one run recorded by layer is found") {
  Deepened a{{4, 5}}, b;
  b.weight = [](int64_t step) { return step >= 5 ? 9 : 0; };
  const Verdict verdict = compare(a, b);
  CHECK(verdict.outcome == Outcome::diverged);
  REQUIRE(verdict.first);
  CHECK(verdict.first->step == 5);
  CHECK(verdict.first->tensor == "weight");
}

}  // namespace forkpoint
