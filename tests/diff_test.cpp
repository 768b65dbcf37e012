// What two runs of the same job amount to: identical, diverged or incomparable.
#include "tests/support/run_generator.h"
#include "tests/support/verdict_check.h"

using namespace forkpoint;

TEST_CASE("equal runs are identical, record by record and by their trees") {
  for (const bool full_scan : {false, true}) {
    DiffOptions options;
    options.full_scan = full_scan;
    const Verdict v = diff_with({}, {}, options);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(exit_code(v.outcome) == 0);
    // 4 ranks x (6 loaded + 4 steps x (3 + 3 x (3 + 3 + 2 + 2) + 1)) records; the loss, the batch and the generator are
    // the 3
    CHECK(v.coverage.records_compared == 4 * (6 + 4 * (3 + 3 * 10 + 1)));
    CHECK(v.coverage.steps_compared == 4);
    CHECK(v.coverage.ranks_compared == 4);
    CHECK(v.coverage.frames_verified > 2 * 4 * 4);
    CHECK_FALSE(v.first.has_value());
    CHECK(v.cause.cls.empty());
    CHECK(v.propagated == 0);
    CHECK(headline(v) == "identical: 568 records in 4 steps on 4 ranks agree (level layer)");
  }
}

TEST_CASE("another order of arrival is not a difference") {
  GeneratorOptions one;
  one.ranks = 2, one.steps = 4, one.records_per_step = 200, one.shuffle_arrival = true;
  GeneratorOptions other = one;
  other.seed_of_arrival = 2;
  const TemporaryFolder folder;
  generate_run(folder / "a", one);
  generate_run(folder / "b", other);
  DiffOptions options;
  for (const bool full_scan : {false, true}) {
    options.full_scan = full_scan;
    const Verdict v = diff_folders(folder / "a", folder / "b", options);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
  }
}

TEST_CASE("every single changed record is found, wherever it lies") {
  GeneratorOptions clean;
  clean.ranks = 2, clean.steps = 2, clean.records_per_step = 60;
  const TemporaryFolder folder;
  generate_run(folder / "a", clean);
  for (int record = 0; record < clean.records_per_step; record += 3) {
    GeneratorOptions changed = clean;
    changed.fault = GeneratedFault{1, 1, record, false, false};
    const TemporaryFolder other;
    generate_run(other / "b", changed);
    const Verdict v = diff_folders(folder / "a", other / "b");
    INFO(record << dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).step == 1);
    CHECK(v.propagated == 0);
  }
}

TEST_CASE("a bit flipped in an activation is the first divergence, with its place in the tensor") {
  const Verdict v = diff_with({}, fault({2, 1, Phase::forward, "blocks.1.fc", "output", Content::bit_flipped}));
  INFO(dump(v));
  REQUIRE(v.outcome == Outcome::diverged);
  CHECK(exit_code(v.outcome) == 1);
  CHECK(is_at(first_of(v), 2, 1, Phase::forward, "blocks.1.fc", "output"));
  REQUIRE(first_of(v).pointing.has_value());
  CHECK(first_of(v).pointing->word == 17);
  CHECK(first_of(v).pointing->bit == 20);
  CHECK(first_of(v).pointing->tensor_index == std::vector<int64_t>{2, 1});
  CHECK(v.also_first.empty());
  CHECK(v.ranks_diverged == std::vector<int>{0, 1, 2, 3});
  CHECK(v.propagated > 50);
  CHECK(v.cause.cls == "nondeterministic_op");
  CHECK(v.cause.class_candidates.size() > 1);  // one bit alone does not convict the hardware
  CHECK(holds(v.cause.evidence, "input, weight"));
  CHECK(headline(v) == "diverged at step 2, rank 1, forward, blocks.1.fc: output");
}

TEST_CASE("a change that later steps do not show is found all the same") {
  GeneratorOptions clean;
  clean.ranks = 3, clean.steps = 5, clean.records_per_step = 100;
  GeneratorOptions changed = clean;
  changed.fault =
      GeneratedFault{2, 2, find_generated(clean, Phase::forward, generated_layer_name(3), "output"), false, true};
  const TemporaryFolder folder;
  generate_run(folder / "a", clean);
  generate_run(folder / "b", changed);
  const Verdict v = diff_folders(folder / "a", folder / "b");
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 2, Phase::forward, generated_layer_name(3), "output"));
  CHECK(v.ranks_diverged == std::vector<int>{2});
  REQUIRE(first_of(v).pointing.has_value());
  CHECK(first_of(v).pointing->word == 7);
  CHECK(first_of(v).pointing->delta == 32);
}

TEST_CASE("an input that changed between its last record and its use is named as unobserved") {
  const Verdict v = diff_with({}, fault({2, 1, Phase::forward, "blocks.1.fc", "weight", Content::bit_flipped}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 1, Phase::forward, "blocks.1.fc", "weight"));
  CHECK(v.cause.cls == "unknown");
  CHECK(v.cause.class_candidates ==
        std::vector<std::string>{"overwritten_input", "stream_race", "hardware_or_sporadic"});
  CHECK(holds(v.cause.evidence, "step 1, optimizer, blocks.1.fc: weight"));
}

TEST_CASE("an input that still holds the step before is a stale read") {
  SmallTraining base;
  Content old;
  const Hook stale = [&old](const Moment& at, Content* content) {
    if (at.rank != 1 || at.layer != "blocks.1.fc" || at.tensor != "weight" || at.phase != Phase::forward) return;
    if (at.step == 1) old = *content;
    if (at.step == 2) *content = old;
  };
  const Verdict v = diff_with(base, stale);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 1, Phase::forward, "blocks.1.fc", "weight"));
  CHECK(v.cause.cls == "stream_race");
  CHECK(holds(v.cause.evidence, "the step before"));
}

TEST_CASE("a constant that one run has changed is not called a stale read of the other") {
  for (const bool swap : {false, true}) {
    RunBuilder a, b;
    for (RunBuilder* run : {&a, &b}) {
      for (int64_t step = 0; step < 4; ++step) {
        const bool changed = step == 2 && (run == &a) == swap;
        run->rank(0)
            .step(step)
            .forward("frozen")
            .input("weight", changed ? value(9) : value(1))
            .output("output", value(2));
      }
    }
    const TemporaryFolder folder;
    const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
    INFO(dump(v));
    CHECK(is_at(first_of(v), 2, 0, Phase::forward, "frozen", "weight"));
    CHECK(v.cause.cls == "unknown");
    CHECK_FALSE(holds(v.cause.evidence, "moved on"));
  }
}

TEST_CASE("an output that repeats the step before is told, already at the second step") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    for (uint64_t step = 0; step < 4; ++step) {
      run->rank(0).step(static_cast<int64_t>(step)).forward("drop").input("input", value(1));
      run->rank(0).output("output", run == &b ? value(10) : value(10 + step));  // a mask that was captured
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 0, Phase::forward, "drop", "output"));
  CHECK(v.cause.class_candidates.at(0) == "rng_state");
  CHECK(holds(v.cause.evidence, "run B's value repeats that of the step before"));
}

TEST_CASE("a NaN is named where it was born") {
  const Verdict v = diff_with({}, fault({1, 2, Phase::forward, "blocks.2.fc", "output", Content::nan}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 2, Phase::forward, "blocks.2.fc", "output"));
  CHECK(holds(v.cause.evidence, "born here: 1 non-finite"));
  CHECK(holds(v.cause.class_candidates, "uninitialized_memory"));
}

TEST_CASE("another form of the same tensor is a difference of structure, and both forms are said") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    run->rank(0).step(0).forward("fc").input("input", value(1));
    run->rank(0).output("output", run == &a ? value(2) : value(2, {{4, 4}, DType::f32}));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(first_of(v).kind == Kind::structure);
  CHECK(first_of(v).before == "f32[4, 8]");
  CHECK(first_of(v).after == "f32[4, 4]");
  CHECK(v.cause.cls == "structure");
}

TEST_CASE("the same bytes under another shape hide no later value difference") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool is_a = run == &a;
    run->rank(0).step(0).forward("view").output("output", is_a ? value(1) : value(1, {{8, 4}, DType::f32}));
    run->rank(0).forward("fc").input("input", value(1)).output("output", is_a ? value(2) : value(3));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "fc", "output"));
}

TEST_CASE("another shape alone is a divergence of structure, with both forms") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    run->rank(0).step(0).forward("view").output("output", run == &a ? value(1) : value(1, {{8, 4}, DType::f32}));
    run->rank(0).forward("fc").output("output", value(2));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "view", "output"));
  CHECK(first_of(v).before == "f32[4, 8]");
  CHECK(first_of(v).after == "f32[8, 4]");
  CHECK(v.cause.cls == "structure");
  CHECK(
      holds(v.notes,
            "view: output holds the same bytes as f32[4, 8] in run A and f32[8, 4] in run B (1 record, from step 0)"));
}

TEST_CASE("zeros of another length are not equal, though their digests are") {
  RunBuilder a, b;
  a.rank(0).step(0).forward("fc").output("output", zeros({{4, 8}, DType::f32}));
  b.rank(0).step(0).forward("fc").output("output", zeros({{4, 9}, DType::f32}));
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  CHECK(v.outcome == Outcome::diverged);
}

TEST_CASE("records of one run only are named, and the first value difference behind them is the verdict") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    for (int64_t step = 0; step < 3; ++step) {
      RankBuilder& rank = run->rank(0);
      rank.step(step).forward("mm").input("input", value(10 + static_cast<uint64_t>(step))).output("output", value(1));
      if (run == &b) rank.forward("clone").input("input", value(1)).output("output", value(1));
      rank.forward("tanh").input("input", value(1)).output("output", run == &b && step == 1 ? value(3) : value(2));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 0, Phase::forward, "tanh", "output"));
  CHECK(holds(v.notes, "structure: run B only: forward, clone: output (3 records, from step 0)"));
  CHECK(holds(v.cause.evidence, "clone"));
  CHECK(v.cause.cls == "nondeterministic_op");
}

TEST_CASE("records of one run only, with no value difference, are a divergence of structure") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    for (int64_t step = 0; step < 3; ++step) {
      run->rank(0).step(step).forward("mm").output("output", value(1));
      if (run == &b && step == 2) run->rank(0).forward("clone").output("output", value(1));
      run->rank(0).forward("tanh").output("output", value(2));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(is_at(first_of(v), 2, 0, Phase::forward, "clone", "output"));
  CHECK(first_of(v).kind == Kind::structure);
  CHECK(v.cause.cls == "structure");
  CHECK(v.propagated == 0);
}

namespace {

// A step as PyTorch's is recorded from outside: gradients as they accumulate, from level layer on, and as the optimizer
// finds them, at every level.
void train(RunBuilder* run, Level level, int64_t step, uint64_t gradient, uint64_t weight) {
  RankBuilder& rank = run->rank(0);
  rank.step(step).at(Phase::state).state("torch.rng", Role::rng, 100 + static_cast<uint64_t>(step));
  rank.forward("loss").scalar("loss", 1.0 + static_cast<double>(step), Role::loss);
  if (level != Level::step) rank.backward("fc").add(Role::gradient, "weight.grad", value(10));
  rank.at(Phase::optimizer, "fc")
      .add(Role::gradient, "weight.grad", value(gradient))
      .add(Role::parameter, "weight", value(weight));
}

Verdict diff_of(const RunBuilder& a, const RunBuilder& b) {
  const TemporaryFolder folder;
  return diff_folders(a.write(folder / "a"), b.write(folder / "b"));
}

}  // namespace

TEST_CASE("at level step no gradient of a backward pass is missing where only level layer records such") {
  RunBuilder coarse(1, Level::step), fine(1, Level::layer), wrong(1, Level::layer), with(1, Level::step);
  for (int64_t step = 0; step < 3; ++step) {
    train(&coarse, Level::step, step, 10, 2), train(&fine, Level::layer, step, 10, 2);
    train(&wrong, Level::layer, step, step == 1 ? 11 : 10, 2);
    train(&with, Level::layer, step, 10, 2);  // a program that records such by itself, at every level
    with.rank(0).backward("head").add(Role::gradient, "bias.grad", value(7));
  }
  for (const auto& [a, b] : {std::pair(&coarse, &fine), std::pair(&fine, &coarse)}) {
    const Verdict v = diff_of(*a, *b);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(v.coverage.records_compared == 3 * 4);
  }
  const Verdict changed = diff_of(coarse, wrong);
  INFO(dump(changed));
  CHECK(is_at(first_of(changed), 1, 0, Phase::optimizer, "fc", "weight.grad"));
  const Verdict missing = diff_of(with, fine);
  INFO(dump(missing));
  CHECK(missing.outcome == Outcome::diverged);
  CHECK(is_at(first_of(missing), 0, 0, Phase::backward, "head", "bias.grad"));
}

TEST_CASE("a gradient that changed between its accumulation and the optimizer was not computed otherwise") {
  RunBuilder a, b;
  for (int64_t step = 0; step < 3; ++step)
    train(&a, Level::layer, step, 10, 2), train(&b, Level::layer, step, step == 1 ? 11 : 10, 2);
  const Verdict v = diff_of(a, b);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 0, Phase::optimizer, "fc", "weight.grad"));
  CHECK(v.cause.cls == "unknown");
  CHECK(holds(v.cause.class_candidates, "overwritten_input"));
  CHECK(holds(v.cause.evidence, "last recorded as step 1, backward, fc: weight.grad, where the runs agree"));
}

TEST_CASE("what one run leaves out in a step comes before the values that differ a step later") {
  for (const int64_t left_out : {0, 2}) {
    RunBuilder a, b;
    for (RunBuilder* run : {&a, &b}) {
      for (int64_t step = 0; step < 5; ++step) {
        RankBuilder& rank = run->rank(0);
        const bool later = run == &b && step > left_out;
        rank.step(step)
            .at(Phase::state)
            .state("torch.rng", Role::rng, 100 + static_cast<uint64_t>(step) + (later ? 50 : 0));
        rank.forward("loss").scalar("loss", later ? 9.0 : 1.0, Role::loss);
        if (run == &a || step != left_out)
          rank.at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(later ? 3 : 2));
      }
    }
    const Verdict v = diff_of(a, b);
    INFO(dump(v));
    CHECK(is_at(first_of(v), left_out, 0, Phase::optimizer, "fc", "weight"));
    CHECK(first_of(v).kind == Kind::structure);
    CHECK(v.cause.cls == "structure");
    CHECK(holds(v.cause.class_candidates, "rng_state"));
    REQUIRE(v.also_first.size() == 1);
    CHECK(v.also_first[0].tensor == "torch.rng");
  }
}

TEST_CASE("what one run leaves out right before a value that differs is a candidate for its cause, and the first one") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    for (int64_t step = 0; step < 3; ++step) {
      const bool apart = run == &b && step == 1;
      run->rank(0).step(step).backward("fc").add(Role::gradient, "weight.grad", value(10));
      if (!apart) run->rank(0).at(Phase::optimizer).scalar("grad_norm", 4);
      run->rank(0).at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(apart ? 3 : 2));
    }
  }
  const Verdict v = diff_of(a, b);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 0, Phase::optimizer, "fc", "weight"));
  CHECK(v.cause.cls == "structure");
  CHECK(holds(v.cause.class_candidates, "nondeterministic_op"));
  CHECK(holds(v.cause.evidence, "run A alone records optimizer: grad_norm in this step, before it"));
}

TEST_CASE("a layout that differs from another in its strides alone is no difference, and hides none") {
  Value transposed = value(1), changed = flipped(1, 3, 20);
  transposed.layout.strides = changed.layout.strides = {1, 4};
  RunBuilder a, b, same;
  for (RunBuilder* run : {&a, &b, &same}) {
    RankBuilder& rank = run->rank(0);
    if (run == &same) rank.step(0).forward("x").output("first", transposed);  // meets the forms in another order
    else rank.step(0).forward("x").output("first", value(1));
    rank.forward("y").output("output", run == &b ? changed : transposed);
  }
  const TemporaryFolder folder;
  const std::string run_a = a.write(folder / "a");
  DiffOptions full;
  full.full_scan = true;
  CHECK(diff_folders(run_a, same.write(folder / "same"), full).outcome == Outcome::identical);
  const Verdict v = diff_folders(run_a, b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "y", "output"));
  CHECK(first_of(v).kind == Kind::tensor);
  REQUIRE(first_of(v).pointing.has_value());
  CHECK(first_of(v).pointing->word == 3);
}

TEST_CASE("a scalar is called a hyperparameter only when its name says that it is one") {
  const auto class_of = [](const std::string& name) {
    RunBuilder a, b;
    for (RunBuilder* run : {&a, &b}) {
      run->rank(0).step(0).at(Phase::optimizer).scalar("before", 1);
      run->rank(0).at(Phase::optimizer).scalar(name, run == &a ? 1 : 2);
    }
    const TemporaryFolder folder;
    return diff_folders(a.write(folder / "a"), b.write(folder / "b")).cause.cls;
  };
  CHECK(class_of("lr") == "hyperparameter");
  CHECK(class_of("group0.weight_decay") == "hyperparameter");
  CHECK(class_of("perplexity") == "unknown");
  CHECK(class_of("~0123456789abcdef") == "unknown");  // masked
}

TEST_CASE("runs without a record in common are incomparable") {
  RunBuilder a, b;
  a.rank(0).step(0).forward("x").output("output", value(1));
  b.rank(0).step(0).forward("y").output("output", value(1));
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(exit_code(v.outcome) == 2);
}

TEST_CASE("a benign permutation is passed over and the value difference behind it is named") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("moe").input("input", value(1));
    rank.forward("moe.permute").input("input", value(1)).output("output", other ? permuted(2) : value(2));
    rank.forward("moe.expert")
        .input("input", other ? permuted(2) : value(2))
        .output("output", other ? permuted(3) : value(3));
    rank.forward("moe.unpermute").input("input", other ? permuted(3) : value(3)).output("output", value(4));
    rank.forward("moe").output("output", value(4));
    rank.forward("head").input("input", value(4)).output("output", other ? value(6) : value(5));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "head", "output"));
  CHECK(holds(v.notes, "benign permutation"));
}

TEST_CASE("a permutation whose effect goes on is the first divergence") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("moe.permute").input("input", value(1)).output("output", other ? permuted(2) : value(2));
    rank.forward("moe.combine")
        .input("input", other ? permuted(2) : value(2))
        .output("output", other ? value(4) : value(3));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "moe.permute", "output"));
  CHECK(holds(v.cause.evidence, "another order"));
}

TEST_CASE("a permutation that no equal record has taken in may be the cause of what follows") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    const bool other = run == &b;
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("moe.permute").input("input", value(1)).output("output", other ? permuted(2) : value(2));
    // The op that reads it has one recorded input, and it is not this one.
    rank.forward("moe.combine").input("gate", value(5)).output("output", other ? value(4) : value(3));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "moe.permute", "output"));
}

TEST_CASE("a permutation that nothing follows from is said to be one, and is not called identical") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("permute").input("input", value(1)).output("output", run == &b ? permuted(2) : value(2));
    rank.forward("head").output("output", value(4));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(holds(v.cause.evidence, "benign permutation"));
}

TEST_CASE("an evaluation that differs is never put before training, and is reported when training agrees") {
  for (const bool training_differs : {false, true}) {
    RunBuilder a, b;
    for (RunBuilder* run : {&a, &b}) {
      const bool other = run == &b;
      RankBuilder& rank = run->rank(0);
      rank.step(0).forward("fc").flags(kRecordEval).output("output", other ? value(9) : value(8));
      rank.flags(0).output("output", value(1));
      rank.step(1).forward("fc").output("output", training_differs && other ? value(3) : value(2));
    }
    const TemporaryFolder folder;
    const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).step == (training_differs ? 1 : 0));
  }
}

TEST_CASE("a run that evaluates more often is the same training") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("fc");
    if (run == &b) rank.flags(kRecordEval).output("output", value(8)).flags(0);
    rank.output("output", value(1));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
}

TEST_CASE("evaluations of other numbers are told, and are no other training") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("fc").output("output", value(1)).flags(kRecordEval).output("output", value(8));
    if (run == &b) rank.output("output", value(9));
    rank.flags(0);
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.notes, "the runs do not evaluate alike"));
}

TEST_CASE("a recomputation is compared with the other run's recomputation, also when one run has more of them") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("drop").input("input", value(1)).output("output", value(2));
    rank.flags(kRecordRecompute).input("input", value(1)).output("output", run == &b ? value(5) : value(2)).flags(0);
    rank.backward("drop").input("grad_output", value(3)).output("grad_input", run == &b ? value(7) : value(4));
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, 0, Phase::forward, "drop", "output"));
  CHECK(v.cause.class_candidates.at(0) == "rng_state");
  CHECK(holds(v.cause.evidence, "recomputation is not what its own forward gave"));

  RunBuilder c, d;
  for (RunBuilder* run : {&c, &d}) {
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("fc").output("output", value(1));
    if (run == &d) rank.flags(kRecordRecompute).output("output", value(1)).flags(0);
    rank.forward("fc").output("output", value(2));
  }
  const Verdict more = diff_folders(c.write(folder / "c"), d.write(folder / "d"));
  INFO(dump(more));
  CHECK(more.outcome == Outcome::diverged);
  CHECK(more.cause.cls == "structure");  // and not a value difference of the second call
  CHECK_FALSE(holds(more.notes, "run A only"));

  RunBuilder e;
  e.rank(0).step(0).forward("fc").output("output", value(1)).flags(kRecordRecompute).output("output", value(1));
  e.rank(0).flags(0).output("output", value(3));
  const Verdict behind = diff_folders(folder / "c", e.write(folder / "e"));
  INFO(dump(behind));
  CHECK(first_of(behind).kind == Kind::tensor);
  CHECK(behind.propagated == 0);
}

TEST_CASE("micro-steps are told apart") {
  SmallTraining base;
  base.micro_steps = 3;
  const Verdict v = diff_with(base, [](const Moment& at, Content* content) {
    if (at.step == 1 && at.rank == 0 && at.micro == 2 && at.phase == Phase::forward && at.tensor == "output" &&
        at.layer == "blocks.0.fc") {
      content->form = Content::bit_flipped;
    }
  });
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 0, Phase::forward, "blocks.0.fc", "output"));
  CHECK(first_of(v).micro_step == 2);
  CHECK(headline(v) == "diverged at step 1, rank 0, micro-step 2, forward, blocks.0.fc: output");
}

TEST_CASE("the map shows the fork, what follows and what is equal") {
  DiffOptions options;
  options.want_map = true;
  const Verdict v =
      diff_with({}, fault({2, 1, Phase::forward, "blocks.1.fc", "output", Content::bit_flipped}), options);
  REQUIRE(v.map_steps == std::vector<int64_t>{kPrologueStep, 0, 1, 2, 3});
  const auto cell = [&](const std::string& phase, const std::string& layer, size_t column) {
    for (const auto& row : v.map) {
      if (row.phase == phase && row.layer == layer) return row.cells.at(column);
    }
    return Cell::missing;
  };
  CHECK(cell("forward", "blocks.1.fc", 2) == Cell::equal);
  CHECK(cell("forward", "blocks.1.fc", 3) == Cell::diverged);
  CHECK(cell("forward", "blocks.0.fc", 3) == Cell::equal);
  CHECK(cell("forward", "blocks.2.fc", 3) == Cell::propagated);
  CHECK(cell("forward", "blocks.0.fc", 4) == Cell::propagated);
}

TEST_CASE("progress ends at its total") {
  DiffOptions options;
  uint64_t done = 0, total = 0;
  options.progress = [&](uint64_t d, uint64_t t) { done = d, total = t; };
  diff_with({}, {}, options);
  CHECK(total == 4 * 5);
  CHECK(done == total);
}
