// Which of the ranks' first differences are origins, and which came through a collective.
#include <algorithm>

#include "tests/support/verdict_check.h"

using namespace forkpoint;

TEST_CASE("after a rollback the first divergence is the first in time, not the one with the lowest step") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    uint64_t weight = 1;
    int ran = 0;
    for (const int64_t step : {0, 1, 2, 3, 1, 2, 3, 4}) {
      if (++ran == 4 && run == &b) weight = 100;  // born in the first step 3; what follows inherits it
      run->rank(0).step(step).forward("fc").input("input", value(7)).output("output", value(weight++));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 3, 0, Phase::forward, "fc", "output"));
}

TEST_CASE("a gradient that differs on one rank is named before the all-reduce spreads it") {
  const Verdict v = diff_with({}, fault({2, 3, Phase::backward, "blocks.0.fc", "weight.grad", Content::bit_flipped}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 3, Phase::backward, "blocks.0.fc", "weight.grad"));
  CHECK(v.also_first.empty());
  CHECK(v.ranks_diverged == std::vector<int>{0, 1, 2, 3});
  CHECK(holds(v.cause.evidence, "ranks 0-2 were reached through all_reduce of blocks.0.fc at step 2, from rank 3"));
  CHECK(holds(v.cause.evidence, "the recorded inputs of this op agree: grad_output"));
}

TEST_CASE("a collective whose inputs agree everywhere and whose output differs alike is the origin, on no one rank") {
  const Verdict v = diff_with({}, fault({1, -1, Phase::collective, "blocks.1.fc", "weight.grad"}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "blocks.1.fc", "weight.grad"));
  CHECK(first_of(v).kind == Kind::collective);
  CHECK(first_of(v).op == "all_reduce");
  CHECK(v.also_first.empty());
  CHECK(v.cause.cls == "reduction_order");
  CHECK(headline(v) == "diverged at step 1, all ranks, collective, blocks.1.fc (all_reduce): weight.grad");
}

TEST_CASE("with two ranks the order of a sum is never the cause") {
  SmallTraining base;
  base.ranks = 2;
  const Verdict v = diff_with(base, fault({1, -1, Phase::collective, "blocks.1.fc", "weight.grad"}));
  INFO(dump(v));
  CHECK(first_of(v).rank == -1);
  CHECK(v.cause.cls == "nondeterministic_op");
  CHECK_FALSE(holds(v.cause.class_candidates, "reduction_order"));
}

TEST_CASE("a rank that keeps its own gradient is named at that collective") {
  const Verdict v = diff_with({}, keep_own_gradient(1, 2, "blocks.1.fc"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 2, Phase::collective, "blocks.1.fc", "weight.grad"));
  CHECK(v.also_first.empty());
  CHECK(v.cause.cls == "missing_sync");
  CHECK(holds(v.cause.evidence, "its own input"));
}

TEST_CASE("all ranks that keep their own gradients are one missing synchronisation") {
  Hook all = keep_own_gradient(1, 0, "blocks.1.fc");
  for (int rank = 1; rank < 4; ++rank) all = both(all, keep_own_gradient(1, rank, "blocks.1.fc"));
  const Verdict v = diff_with({}, all);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "blocks.1.fc", "weight.grad"));
  CHECK(v.cause.cls == "missing_sync");
}

TEST_CASE("a collective's output that differs on one rank only, and is not its input, is that rank's") {
  const Verdict v = diff_with({}, fault({1, 2, Phase::collective, "blocks.1.fc", "weight.grad"}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 2, Phase::collective, "blocks.1.fc", "weight.grad"));
  CHECK(v.cause.cls == "missing_sync");
  CHECK(holds(v.cause.class_candidates, "hardware_or_sporadic"));
  const Verdict bit =
      diff_with({}, fault({1, 2, Phase::collective, "blocks.1.fc", "weight.grad", Content::bit_flipped}));
  CHECK(bit.cause.cls == "nondeterministic_op");
  CHECK(bit.cause.class_candidates.size() > 1);
}

TEST_CASE("a collective with a member that is not in the runs is not blamed") {
  SmallTraining clean, faulty;
  faulty.hook = fault({1, 3, Phase::backward, "blocks.1.fc", "weight.grad", Content::bit_flipped});
  for (const bool by_option : {false, true}) {
    Pair pair(clean, faulty);
    DiffOptions options;
    if (by_option) {
      options.ranks = {0, 1, 2};
    } else {
      pair.a.leave_out(3);
      pair.b.leave_out(3);
    }
    const Verdict v = pair.diff(options);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).kind == Kind::collective);
    CHECK(first_of(v).rank == -1);
    CHECK(v.cause.cls == "unknown");
    CHECK(v.cause.class_candidates.size() > 1);
    CHECK(holds(v.cause.evidence, "the inputs of rank 3 are not known"));
  }
}

TEST_CASE("a difference passes from one step to the next without a new origin") {
  // On rank 1 alone, after the all-reduce: its weights differ from then on, and reach the others a step later.
  const Verdict v = diff_with({}, fault({1, 1, Phase::optimizer, "blocks.2.fc", "weight", Content::bit_flipped}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 1, Phase::optimizer, "blocks.2.fc", "weight"));
  CHECK(v.also_first.empty());
  CHECK(v.ranks_diverged == std::vector<int>{0, 1, 2, 3});
  CHECK(holds(v.notes, "at step 2, from rank 1"));
  CHECK(holds(v.cause.evidence, "gradients and hyperparameters of this step agree"));
}

TEST_CASE("what all ranks do alike without a collective has no rank") {
  const Verdict v = diff_with({}, fault({2, -1, Phase::optimizer, "", "lr"}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, -1, Phase::optimizer, "", "lr"));
  CHECK(first_of(v).kind == Kind::scalar);
  CHECK(v.also_first.empty());
  CHECK(v.cause.cls == "hyperparameter");
  CHECK(v.cause.class_candidates == std::vector<std::string>{"hyperparameter"});
  CHECK(headline(v) == "diverged at step 2, all ranks, optimizer: lr");
}

TEST_CASE("a single rank keeps its number") {
  SmallTraining base;
  base.ranks = 1;
  const Verdict v = diff_with(base, fault({2, -1, Phase::optimizer, "", "lr"}));
  CHECK(first_of(v).rank == 0);
}

TEST_CASE("two independent faults on two ranks in one step are both reported") {
  const Verdict v = diff_with({}, both(fault({1, 3, Phase::forward, "blocks.0.fc", "output", Content::bit_flipped}),
                                       fault({1, 1, Phase::forward, "blocks.2.fc", "output", Content::bit_flipped})));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 3, Phase::forward, "blocks.0.fc", "output"));
  REQUIRE(v.also_first.size() == 1);
  CHECK(is_at(v.also_first[0], 1, 1, Phase::forward, "blocks.2.fc", "output"));
  CHECK(v.also_first[0].pointing.has_value());
}

TEST_CASE("a second fault on a rank that is infected already is not called independent") {
  const Verdict v = diff_with({}, both(fault({1, 3, Phase::forward, "blocks.0.fc", "output"}),
                                       fault({2, 1, Phase::forward, "blocks.2.fc", "output"})));
  INFO(dump(v));
  CHECK(v.also_first.empty());
}

TEST_CASE("a second op of the same rank is reported only where its inputs agree beyond doubt") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("left").input("input", value(1)).output("output", other ? value(12) : value(2));
    rank.forward("right").input("input", value(1)).output("output", other ? value(13) : value(3));
    rank.forward("sum").input("left", other ? value(12) : value(2)).input("right", other ? value(13) : value(3));
    rank.output("output", other ? value(14) : value(4));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "left", "output"));
  REQUIRE(v.also_first.size() == 1);
  CHECK(is_at(v.also_first[0], 0, 0, Phase::forward, "right", "output"));
  CHECK(v.propagated == 3);
}

TEST_CASE("a module around the guilty one is not a second origin") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("mlp").input("input", value(1));
    rank.forward("mlp.fc1").input("input", value(1)).output("output", other ? value(12) : value(2));
    rank.forward("mlp").output("output", other ? value(13) : value(3));
    rank.forward("other").input("hidden", value(7)).output("output", other ? value(15) : value(5));
    // The backward of a layer whose forward differed may have saved what differed.
    rank.backward("mlp.fc1").input("grad_output", value(6)).output("grad_input", other ? value(16) : value(8));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "mlp.fc1", "output"));
  REQUIRE(v.also_first.size() == 1);
  CHECK(v.also_first[0].layer == "other");
}

TEST_CASE("doubt keeps a later op from being called a second origin") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("wrapper").input("input", value(1));
    rank.forward("core.fc").input("input", value(1)).output("output", other ? value(12) : value(2));
    rank.forward("wrapper").output("output", other ? value(13) : value(3));  // around the first, by another name
    rank.forward("core.fc").input("input", value(4)).output("output", other ? value(14) : value(5));  // its second call
    // Nothing is known of what this one's forward saved.
    rank.backward("unseen").input("grad_output", value(6)).output("grad_input", other ? value(16) : value(8));
    rank.at(Phase::optimizer, "fc").input("gradient", value(7)).output("update", other ? value(17) : value(9));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "core.fc", "output"));
  CHECK(v.also_first.empty());
  CHECK(v.propagated == 4);
}

TEST_CASE("an op behind a collective that brought differences in is not a second origin") {
  RunBuilder a(2), b(2);
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    for (int rank = 0; rank < 2; ++rank) {
      RankBuilder& at = run->rank(rank);
      const bool guilty = other && rank == 0;
      at.step(0).forward("one").input("input", value(1)).output("output", guilty ? value(12) : value(2));
      at.collective("all_gather", "gather", "tp", {0, 1})
          .input("x", guilty ? value(12) : value(2))
          .output("x", other ? value(13) : value(3));
      at.forward("two").input("input", value(4)).output("output", other ? value(14) : value(5));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "one", "output"));
  CHECK(v.also_first.empty());
}

TEST_CASE("an input recorded after its op's output is still taken as the earlier one") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    run->rank(0)
        .step(0)
        .forward("fc")
        .output("output", other ? value(12) : value(2))
        .input("input", other ? value(11) : value(1));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  CHECK(first_of(v).tensor == "input");
}

TEST_CASE("a learning rate recorded after the weights it made is still the cause") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    run->rank(0).step(0).at(Phase::backward, "fc").add(Role::gradient, "weight.grad", value(1));
    run->rank(0).at(Phase::optimizer, "fc").add(Role::parameter, "weight", other ? value(12) : value(2));
    run->rank(0).at(Phase::optimizer).scalar("group0.lr", other ? 0.5 : 0.25);
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(first_of(v).tensor == "group0.lr");
  CHECK(first_of(v).before == "0.25");
  CHECK(first_of(v).after == "0.5");
  CHECK(v.cause.cls == "hyperparameter");
}

TEST_CASE("where no collective is recorded, ranks that follow later are not called origins") {
  SmallTraining base;
  base.collectives = false;
  const Verdict v = diff_with(base, fault({1, 2, Phase::forward, "blocks.1.fc", "output", Content::bit_flipped}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 2, Phase::forward, "blocks.1.fc", "output"));
  CHECK(v.also_first.empty());
  CHECK(holds(v.notes, "ranks 0, 1, 3 differ later; no collective is recorded"));
}

TEST_CASE("at level step the first record that shows it is named, and a finer level is advised") {
  SmallTraining base;
  base.level = Level::step;
  const Verdict v = diff_with(base, fault({1, 2, Phase::forward, "blocks.1.fc", "output", Content::bit_flipped}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 2, Phase::forward, "", "loss"));
  CHECK(holds(v.cause.evidence, "level layer would narrow it"));
  CHECK(v.cause.next.find("forkpoint record --level layer --steps 1:1") == 0);
  const Verdict gradient =
      diff_with(base, fault({1, 2, Phase::backward, "blocks.1.fc", "weight.grad", Content::bit_flipped}));
  CHECK(is_at(first_of(gradient), 1, 2, Phase::backward, "blocks.1.fc", "weight.grad"));
}

TEST_CASE("collectives of two groups are told apart though they have one name") {
  // Ranks 0, 1 and ranks 2, 3 reduce within their pair. Rank 2's input differs: rank 0's group is not touched by it.
  RunBuilder a(4), b(4);
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    for (int rank = 0; rank < 4; ++rank) {
      const bool first_group = rank < 2;
      const uint64_t own = 10 + static_cast<uint64_t>(rank);
      RankBuilder& at = run->rank(rank);
      const Value input = other && rank == 2 ? value(own + 100) : value(own);
      const Value output = value((first_group ? 30u : 40u) + (other ? 500 : 0));
      at.step(0).collective("all_reduce", "fc", "tp", first_group ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
      at.input("x", input).output("x", output);
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  // Rank 2's input is an origin; rank 3 is infected; ranks 0 and 1 differ alike, with equal inputs.
  REQUIRE(v.also_first.size() == 1);
  std::vector<Divergence> all = {first_of(v), v.also_first[0]};
  const auto collective = std::find_if(all.begin(), all.end(), [](const Divergence& at) { return at.rank == -1; });
  const auto input = std::find_if(all.begin(), all.end(), [](const Divergence& at) { return at.rank == 2; });
  CHECK(collective != all.end());
  CHECK(input != all.end());
}

TEST_CASE("a receive is not blamed when what was sent differed") {
  RunBuilder a(2), b(2);
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    run->rank(0).step(0).forward("stage0").input("input", value(1)).output("output", other ? value(12) : value(2));
    run->rank(0).collective("send", "", "pp", {0, 1}).input("x", other ? value(12) : value(2));
    run->rank(1).step(0).collective("recv", "", "pp", {0, 1}).output("x", other ? value(12) : value(2));
    run->rank(1)
        .forward("stage1")
        .input("input", other ? value(12) : value(2))
        .output("output", other ? value(13) : value(3));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "stage0", "output"));
  CHECK(v.also_first.empty());
}

TEST_CASE("messages grouped in another way are structure, and the value difference behind them is the verdict") {
  // A reduces 1,000 and 5,000 numbers in two calls, B all 6,000 in one, padded: their elements cannot be told to be the
  // same (see diff_relaid_test for those that can). Two seeds for the sums: another order of adding.
  RunBuilder a(3), b(3);
  for (RunBuilder* run : {&a, &b}) {
    for (int rank = 0; rank < 3; ++rank) {
      RankBuilder& at = run->rank(rank);
      at.step(0).at(Phase::backward, "fc").add(Role::gradient, "weight.grad", value(10 + static_cast<uint64_t>(rank)));
      at.collective("all_reduce", "", "world", {0, 1, 2});
      if (run == &a) {
        at.input("x", value(1, {{1000}, DType::f32})).output("x", value(2, {{1000}, DType::f32}));
        at.input("x", value(3, {{5000}, DType::f32})).output("x", value(4, {{5000}, DType::f32}));
      } else {
        at.input("x", value(5, {{6016}, DType::f32})).output("x", value(6, {{6016}, DType::f32}));
      }
      at.at(Phase::optimizer, "fc").add(Role::parameter, "weight", run == &a ? value(7) : value(8));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, -1, Phase::optimizer, "fc", "weight"));
  CHECK(holds(v.notes, "all_reduce: x is a message of f32[1000] in run A and f32[6016] in run B"));
  REQUIRE_FALSE(v.cause.class_candidates.empty());
  CHECK(v.cause.class_candidates[0] == "reduction_order");
}

TEST_CASE("a broadcast is judged by its source, whatever the other buffers held before") {
  RunBuilder a(3), b(3);
  for (RunBuilder* run : {&a, &b}) {
    for (int rank = 0; rank < 3; ++rank) {
      RankBuilder& at = run->rank(rank);
      at.step(0).collective("broadcast", "fc", "world", {0, 1, 2});
      if (rank == 0) at.input("x", value(1));
      at.output("x", run == &b && rank == 2 ? value(5) : value(1));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 2, Phase::collective, "fc", "x"));
  CHECK(v.cause.cls == "missing_sync");
}
