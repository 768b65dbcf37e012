// Generators that are recorded only where somebody seeded them, and always in a run that was attached: what of them is
// held against what.
#include "lib/generators.h"

#include "tests/support/run_generator.h"
#include "tests/support/verdict_check.h"

using namespace forkpoint;

namespace {

enum class Seeding { seen, unseen, unknown };

// state: of the generator in both steps, where it is recorded.
RunBuilder run_of(Seeding seeding, uint64_t state, bool recorded = true) {
  RunBuilder run(1);
  RankBuilder& rank = run.rank(0);
  rank.prologue().at(Phase::load, "fc").state("weight", Role::parameter, 1);
  for (int64_t step = 0; step < 2; ++step) {
    rank.step(step).at(Phase::state).state("torch.rng", Role::rng, 5);
    if (recorded && (seeding != Seeding::unseen || step > 0)) rank.state("python.rng", Role::rng, state);
    rank.at(Phase::optimizer, "fc").state("weight", Role::parameter, 2 + static_cast<uint64_t>(step));
  }
  if (seeding == Seeding::unseen)
    rank.limit("the state of Python's generator, which was not seen to be seeded before the first step");
  if (seeding == Seeding::unknown) rank.limit("whether Python's generator was seeded before the recording began");
  return run;
}

// state: 0 for none that is recorded.
Verdict diff_of(Seeding a, uint64_t state_a, Seeding b, uint64_t state_b) {
  const TemporaryFolder folder;
  return diff_folders(run_of(a, state_a, state_a != 0).write(folder / "a"),
                      run_of(b, state_b, state_b != 0).write(folder / "b"));
}

}  // namespace

TEST_CASE("a generator that both runs, or one of them, have seen to be seeded is compared") {
  for (const Seeding other : {Seeding::seen, Seeding::unknown}) {
    CHECK(diff_of(Seeding::seen, 7, other, 7).outcome == Outcome::identical);
    CHECK(diff_of(other, 7, Seeding::seen, 7).outcome == Outcome::identical);
    const Verdict v = diff_of(Seeding::seen, 7, other, 8);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).tensor == "python.rng");
    CHECK(diff_of(other, 8, Seeding::seen, 7).outcome == Outcome::diverged);
  }
  const Verdict one = diff_of(Seeding::seen, 7, Seeding::unseen, 0);  // only one of the two programs seeds it
  CHECK(one.outcome == Outcome::diverged);
  CHECK(first_of(one).tensor == "python.rng");
}

TEST_CASE("one that an attached run recorded without knowing whether it was ever seeded says nothing by itself") {
  for (const Seeding other : {Seeding::unseen, Seeding::unknown}) {
    for (const bool swap : {false, true}) {
      const uint64_t state = other == Seeding::unseen ? 0 : 8;
      const Verdict v = swap ? diff_of(other, state, Seeding::unknown, 7) : diff_of(Seeding::unknown, 7, other, state);
      INFO(dump(v));
      CHECK(v.outcome == Outcome::identical);
      CHECK(holds(v.coverage.limits, "whether Python's generator was seeded before the recording began"));
    }
  }
  CHECK(diff_of(Seeding::unseen, 0, Seeding::unseen, 0).outcome == Outcome::identical);
}

TEST_CASE("one that was seeded only behind the first step is compared from there on") {
  CHECK(diff_of(Seeding::unseen, 7, Seeding::unseen, 7).outcome == Outcome::identical);
  const Verdict v = diff_of(Seeding::unseen, 7, Seeding::unseen, 8);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(is_at(first_of(v), 1, 0, Phase::state, "", "python.rng"));
}

TEST_CASE("one that a run has no word on and no record of was not seeded in it") {
  for (const bool swap : {false, true}) {  // NumPy's, imported behind the first step
    const Verdict v =
        swap ? diff_of(Seeding::seen, 0, Seeding::unknown, 7) : diff_of(Seeding::unknown, 7, Seeding::seen, 0);
    INFO(dump(v));
    CHECK_FALSE(v.first);
  }
}

TEST_CASE("under masked names nobody can tell which generator it is: those that may be nobody's are left out") {
  const auto masked = [](uint64_t state, bool unknown) {
    RunBuilder run(1);
    RankBuilder& rank = run.rank(0);
    rank.step(0).at(Phase::state).state("~12ab", Role::rng, state);
    rank.at(Phase::optimizer, "~fc").add(Role::parameter, "~weight", value(3));
    if (unknown) rank.limit("whether Python's generator was seeded before the recording began");
    run.manifest().names_masked = true;
    return run;
  };
  const TemporaryFolder folder;
  const auto diff = [&](uint64_t a, uint64_t b, bool unknown) {
    static int number = 0;
    const std::string name = std::to_string(++number);
    return diff_folders(masked(a, unknown).write(folder / ("a" + name)),
                        masked(b, unknown).write(folder / ("b" + name)));
  };
  CHECK_FALSE(diff(1, 2, true).first);
  CHECK(diff(1, 2, false).outcome == Outcome::diverged);
}
