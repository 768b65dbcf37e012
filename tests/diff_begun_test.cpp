// What a stream holds from before its first step is from before the step at which the process began, which need not be
// recorded: two such moments are not taken for one.
#include "lib/stream_facts.h"

#include "tests/support/run_generator.h"
#include "tests/support/verdict_check.h"

using namespace forkpoint;

namespace {

constexpr int64_t kEnd = 8;

struct Part {
  int64_t begun = 0, first = 0;  // the process began with the one, and is recorded from the other on
  bool loses_momentum = false;   // at its begin
  int64_t altered = -1;          // step whose weight is another one
};

uint64_t seed_of(int64_t step, uint64_t what) { return static_cast<uint64_t>(step + 2) * 31 + what; }

RunBuilder run_of(const Part& part) {
  RunBuilder run(1);
  RankBuilder& rank = run.rank(0);
  rank.prologue().at(Phase::load, "fc").add(Role::parameter, "weight", value(seed_of(part.begun - 1, 1)));
  if (part.begun > 0) {
    const Value momentum = value(seed_of(part.begun - 1, 2));
    rank.add(Role::optimizer_state, "weight.exp_avg", part.loses_momentum ? zeros() : momentum);
  }
  for (int64_t step = part.first; step < kEnd; ++step) {
    rank.step(step).at(Phase::data).add(Role::batch, "batch", value(seed_of(step, 3)));
    rank.at(Phase::optimizer, "fc")
        .add(Role::parameter, "weight", value(seed_of(step, 1) + (step == part.altered ? 1 : 0)));
    rank.add(Role::optimizer_state, "weight.exp_avg", value(seed_of(step, 2)));
  }
  if (part.begun != part.first) run.header().facts.emplace_back(kFirstBegunFact, std::to_string(part.begun));
  return run;
}

Verdict diff_parts(const Part& a, const Part& b, bool named) {
  const TemporaryFolder folder;
  DiffOptions options;
  if (named) options.first_step = std::max(a.first, b.first), options.last_step = kEnd - 1;
  return diff_folders(run_of(a).write(folder / "a"), run_of(b).write(folder / "b"), options);
}

}  // namespace

TEST_CASE("a window of a run from the start and a replay that begins right there: their loads are of two moments") {
  for (const bool swap : {false, true}) {
    const Part window{.begun = 0, .first = 4}, replay{.begun = 4, .first = 4}, longer{.begun = 2, .first = 4};
    for (const Part& other : {replay, longer}) {
      const Verdict v = swap ? diff_parts(other, window, true) : diff_parts(window, other, true);
      INFO(dump(v));
      CHECK(v.outcome == Outcome::identical);
      CHECK_FALSE(v.first);
      CHECK_FALSE(holds(v.notes, kFirstBegunFact));
      // Without steps that are named nobody knows what the two had before.
      const Verdict whole = swap ? diff_parts(other, window, false) : diff_parts(window, other, false);
      INFO(dump(whole));
      CHECK(whole.outcome == Outcome::incomparable);
      CHECK(whole.reason.find("--steps 4:N") != std::string::npos);
    }
    const Part altered{.begun = 4, .first = 4, .altered = 6};
    const Verdict found = swap ? diff_parts(altered, window, true) : diff_parts(window, altered, true);
    CHECK(is_at(first_of(found), 6, 0, Phase::optimizer, "fc", "weight"));
  }
}

TEST_CASE("two windows of processes that began together hold the same moment, and what they loaded is compared") {
  CHECK(diff_parts({.begun = 2, .first = 4}, {.begun = 2, .first = 4}, false).outcome == Outcome::identical);
  const Verdict v = diff_parts({.begun = 2, .first = 4}, {.begun = 2, .first = 4, .loses_momentum = true}, false);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(first_of(v).in_prologue);
  CHECK(first_of(v).tensor == "weight.exp_avg");
}

TEST_CASE("a replay that is recorded later than it began is held against the state at which it began") {
  for (const bool swap : {false, true}) {
    const Part straight, replay{.begun = 4, .first = 6}, lost{.begun = 4, .first = 6, .loses_momentum = true};
    const Verdict v = swap ? diff_parts(replay, straight, false) : diff_parts(straight, replay, false);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.notes, "begins at step 4: compared from step 6 on, and what it loaded with run"));
    const Verdict found = swap ? diff_parts(lost, straight, false) : diff_parts(straight, lost, false);
    INFO(dump(found));
    CHECK(first_of(found).in_prologue);
    CHECK(first_of(found).tensor == "weight.exp_avg");
    CHECK(found.cause.cls == "state_restore");
  }
}
