#include "lib/recompute.h"

#include <doctest/doctest.h>

#include "tests/support/verdict_check.h"

namespace forkpoint {
namespace {

constexpr uint8_t kFirst = 0, kSecond = kRecordRecompute;

// One step of one rank, checked.
RecomputeCheck check_of(const std::function<void(RankBuilder*)>& step) {
  RunBuilder builder(1);
  step(&builder.rank(0).step(0));
  const TemporaryFolder folder;
  const Run run = Run::open(builder.write(folder / "run"));
  StepColumns columns;
  run.streams()[0]->read_step(0, &columns);
  RecomputeCheck check;
  check_recompute(*run.streams()[0], columns, 0, &check);
  return check;
}

void call(RankBuilder* rank, uint8_t flags, const std::string& layer, uint64_t in, uint64_t out) {
  rank->flags(flags).forward(layer).input("input", value(in)).output("output", value(out)).flags(0);
}

}  // namespace

TEST_CASE("a recomputation that repeats the first forward is no finding") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    call(rank, kFirst, "fc", 1, 2);
    call(rank, kSecond, "fc", 1, 2);
  });
  CHECK(check.compared == 2);
  CHECK(check.mismatches.empty());
}

TEST_CASE("an output whose recomputed inputs agree is named, and what follows from it is counted") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    call(rank, kFirst, "fc", 1, 2);
    call(rank, kFirst, "dropout", 2, 3);
    call(rank, kFirst, "fc2", 3, 4);
    call(rank, kSecond, "fc", 1, 2);
    call(rank, kSecond, "dropout", 2, 30);
    call(rank, kSecond, "fc2", 30, 40);
  });
  REQUIRE(check.mismatches.size() == 1);
  const RecomputeMismatch& mismatch = check.mismatches[0];
  CHECK(recompute_headline(mismatch) == "recompute mismatch at step 0, rank 0, forward, dropout: output");
  CHECK(mismatch.inputs_agree == std::vector<std::string>{"input"});
  CHECK(mismatch.differing == 3);
  CHECK(recompute_cause(mismatch, "runs/a").cls == "rng_state");
}

TEST_CASE("a layer whose name says nothing of random numbers leaves more than one class") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    call(rank, kFirst, "fc", 1, 2);
    call(rank, kSecond, "fc", 1, 20);
  });
  REQUIRE(check.mismatches.size() == 1);
  const Cause cause = recompute_cause(check.mismatches[0], "runs/a");
  CHECK(cause.cls == "nondeterministic_op");
  CHECK(holds(cause.class_candidates, "rng_state"));
}

TEST_CASE("an input that differs is what the checkpoint kept, also when the output was recorded first") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    rank->forward("fc").output("output", value(2)).input("input", value(1));
    rank->flags(kSecond).forward("fc").output("output", value(20)).input("input", value(10));
  });
  REQUIRE(check.mismatches.size() == 1);
  CHECK(check.mismatches[0].at.tensor == "input");
  CHECK(holds(recompute_cause(check.mismatches[0], "runs/a").class_candidates, "overwritten_input"));
}

TEST_CASE("a module that is called several times is recomputed in any order") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    call(rank, kFirst, "fc", 1, 2);
    call(rank, kFirst, "fc", 3, 4);
    call(rank, kSecond, "fc", 3, 4);
    call(rank, kSecond, "fc", 1, 2);
  });
  CHECK(check.compared == 4);
  CHECK(check.mismatches.empty());
  const RecomputeCheck twice = check_of([](RankBuilder* rank) {  // the value of one call cannot stand for both
    call(rank, kFirst, "fc", 1, 2);
    call(rank, kFirst, "fc", 3, 4);
    call(rank, kSecond, "fc", 1, 2);
    call(rank, kSecond, "fc", 1, 2);
  });
  CHECK(twice.mismatches.size() == 1);
}

TEST_CASE("a pipeline that recomputes when the next micro-step has begun is no finding") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    call(&rank->micro(0), kFirst, "fc", 1, 2);
    call(&rank->micro(1), kFirst, "fc", 3, 4);
    call(&rank->micro(1), kSecond, "fc", 1, 2);
    call(&rank->micro(2), kSecond, "fc", 3, 4);
  });
  CHECK(check.mismatches.empty());
}

TEST_CASE("what has no first forward, and evaluation, is not checked") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    call(rank, kRecordEval, "fc", 1, 2);
    call(rank, kSecond, "fc", 1, 20);
  });
  CHECK(check.compared == 0);
  CHECK(check.unmatched == 2);
  CHECK(check.mismatches.empty());
}

TEST_CASE("another dtype in the recomputation is another formula") {
  const RecomputeCheck check = check_of([](RankBuilder* rank) {
    rank->forward("fc").input("input", value(1)).output("output", value(2));
    rank->flags(kSecond).forward("fc").input("input", value(1)).output("output", value(2, {{4, 8}, DType::bf16}));
  });
  REQUIRE(check.mismatches.size() == 1);
  CHECK(recompute_cause(check.mismatches[0], "runs/a").cls == "precision_or_formula");
}

TEST_CASE("a comparison of two runs says so in a note") {
  const TemporaryFolder folder;
  const auto run_of = [&](const std::string& name, uint64_t recomputed) {
    RunBuilder run(1);
    for (int64_t step = 0; step < 2; ++step) {
      RankBuilder& rank = run.rank(0).step(step);
      call(&rank, kFirst, "dropout", 1, 2);
      call(&rank, kSecond, "dropout", 1, recomputed);
      rank.at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(recomputed));
    }
    return run.write(folder / name);
  };
  const Verdict verdict = diff_folders(run_of("a", 2), run_of("b", 9));
  CHECK(verdict.outcome == Outcome::diverged);
  CHECK_MESSAGE(holds(verdict.notes, "within run B: recompute mismatch at step 0, rank 0, forward, dropout: output"),
                dump(verdict));
  CHECK(!holds(verdict.notes, "within run A"));
}

}  // namespace forkpoint
