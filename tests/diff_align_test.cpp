// Runs that do not line up: cut, recording, damaged, resumed, of other lengths, levels, ranks and step bases.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/support/run_generator.h"
#include "tests/support/verdict_check.h"

using namespace forkpoint;

namespace {

SmallTraining of_steps(int64_t steps, int64_t first_step = 0) {
  SmallTraining training;
  training.steps = steps;
  training.first_step = first_step;
  return training;
}

const Hook kLateFault = fault({2, 1, Phase::forward, "blocks.1.fc", "output", Content::bit_flipped});

}  // namespace

TEST_CASE("a run that ended earlier is incomparable, and says where and how far it agrees") {
  for (const bool swap : {false, true}) {
    const Verdict v = swap ? Pair(of_steps(3), of_steps(5)).diff() : Pair(of_steps(5), of_steps(3)).diff();
    INFO(dump(v));
    CHECK(v.outcome == Outcome::incomparable);
    CHECK(exit_code(v.outcome) == 2);
    CHECK(v.reason == (swap ? "run A ended at step 2, run B goes on to step 4; the 3 common steps are equal"
                            : "run B ended at step 2, run A goes on to step 4; the 3 common steps are equal"));
    CHECK(headline(v) == "incomparable: " + v.reason);
  }
}

TEST_CASE("a divergence in the common part of a shorter run is still found") {
  SmallTraining faulty = of_steps(4);
  faulty.hook = kLateFault;
  const Verdict v = Pair(of_steps(6), faulty).diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 1, Phase::forward, "blocks.1.fc", "output"));
  CHECK(holds(v.notes, "run B ended at step 3"));
}

TEST_CASE("--steps makes runs of other lengths comparable where both have the steps") {
  DiffOptions options;
  options.first_step = 0, options.last_step = 2;
  const Verdict v = Pair(of_steps(5), of_steps(3)).diff(options);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(v.coverage.steps_compared == 3);
  options.last_step = 3;
  CHECK(Pair(of_steps(5), of_steps(3)).diff(options).outcome == Outcome::incomparable);
  options.first_step = 7, options.last_step = 9;
  const Verdict none = Pair(of_steps(5), of_steps(3)).diff(options);
  INFO(dump(none));
  CHECK(none.outcome == Outcome::incomparable);
}

TEST_CASE("a run that died or is still recording is never identical") {
  for (const bool diverges : {false, true}) {
    Pair pair(of_steps(4), of_steps(4));
    if (diverges) {
      SmallTraining faulty = of_steps(4);
      faulty.hook = kLateFault;
      pair.b = Pair(faulty, faulty).b;
    }
    for (int rank = 0; rank < 4; ++rank) pair.b.rank(rank).die();
    pair.b.manifest().state = RunState::died;
    pair.b.manifest().end_reason = "killed by signal 9";
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(v.outcome == (diverges ? Outcome::diverged : Outcome::incomparable));
    if (diverges) CHECK(is_at(first_of(v), 2, 1, Phase::forward, "blocks.1.fc", "output"));
    else CHECK(v.reason.find("killed by signal 9") != std::string::npos);
  }
}

TEST_CASE("one rank that died in the middle makes the run incomparable, not another structure") {
  SmallTraining longer = of_steps(4), shorter = of_steps(3);
  Pair pair(longer, longer);
  RunBuilder cut(4);
  plant(&cut, shorter);
  pair.b.rank(2) = cut.rank(2).die();
  const Verdict v = pair.diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK_FALSE(v.gaps.empty());
}

TEST_CASE("a missing rank is incomparable unless the others diverged") {
  for (const bool diverges : {false, true}) {
    SmallTraining b;
    if (diverges) b.hook = kLateFault;
    Pair pair({}, b);
    pair.b.leave_out(3);
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(v.outcome == (diverges ? Outcome::diverged : Outcome::incomparable));
    CHECK(
        (v.reason.find("no hash stream of rank 3") != std::string::npos || holds(v.notes, "no hash stream of rank 3")));
  }
  Pair neither({}, {});
  neither.a.leave_out(1);
  neither.b.leave_out(1);
  const Verdict v = neither.diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  DiffOptions options;
  options.ranks = {0, 2, 3};
  CHECK(neither.diff(options).outcome == Outcome::incomparable);  // a run with a missing rank is not whole
}

TEST_CASE("--ranks compares those ranks only, and says so") {
  SmallTraining faulty;
  faulty.collectives = true;
  faulty.hook = fault({3, 1, Phase::optimizer, "blocks.1.fc", "weight"});  // the last step: nobody else is reached
  DiffOptions options;
  options.ranks = {0, 2};
  const Verdict v = Pair({}, faulty).diff(options);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.coverage.limits, "only ranks 0, 2 of 4"));
  options.ranks = {9};
  CHECK(Pair({}, faulty).diff(options).outcome == Outcome::incomparable);
}

TEST_CASE("lost records make equal runs incomparable, and a divergence behind them says that it may lie there") {
  for (const bool diverges : {false, true}) {
    SmallTraining b;
    if (diverges) b.hook = kLateFault;
    Pair pair({}, b);
    pair.b.rank(0).gap(1, 1, "ring full for 10000 ms");
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(v.gaps == std::vector<std::string>{"run B, rank 0, step 1: ring full for 10000 ms"});
    if (diverges) {
      CHECK(is_at(first_of(v), 2, 1, Phase::forward, "blocks.1.fc", "output"));
      CHECK(v.reason.find("may lie in a gap") != std::string::npos);
    } else {
      CHECK(v.outcome == Outcome::incomparable);
      CHECK(v.reason.find("ring full") != std::string::npos);
    }
  }
  SmallTraining early;
  early.hook = fault({0, 1, Phase::forward, "blocks.1.fc", "output"});
  Pair pair({}, early);
  pair.b.rank(0).gap(3, 3, "ring full");
  CHECK(pair.diff().reason.find("may lie in a gap") == std::string::npos);  // it came later
}

TEST_CASE("records lost in a gap are neither another structure nor, by shifted calls, another value") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    RankBuilder& rank = run->rank(0);
    rank.step(0).forward("shared");
    if (run == &a) rank.output("output", value(1));  // lost in B, so that B's first call is A's second
    rank.output("output", value(2));
    rank.forward("head").output("output", value(3));
  }
  b.rank(0).gap(0, 0, "ring full");
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
}

TEST_CASE("a damaged frame is found before identical is said, wherever it lies") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.ranks = 2, options.steps = 3, options.records_per_step = 50;
  generate_run(folder / "a", options);
  generate_run(folder / "b", options);
  REQUIRE(diff_folders(folder / "a", folder / "b").outcome == Outcome::identical);
  const std::string file = folder / ("b/" + stream_file_name(1));
  const auto size = static_cast<std::streamoff>(std::filesystem::file_size(file));
  for (std::streamoff at = 0; at < size; at += std::max<std::streamoff>(1, size / 97)) {
    char byte = 0;
    {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(at).read(&byte, 1);
      const char changed = static_cast<char>(byte ^ 0x40);
      stream.seekp(at).write(&changed, 1);
    }
    try {
      const Verdict v = diff_folders(folder / "a", folder / "b");
      INFO("byte " << at << "\n" << dump(v));
      CHECK(v.outcome == Outcome::incomparable);
    } catch (const std::exception&) {  // refused to open: as good
    }
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(at).write(&byte, 1);
  }
  CHECK(diff_folders(folder / "a", folder / "b").outcome == Outcome::identical);
}

TEST_CASE("a run cut anywhere is never identical and never another training") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.ranks = 1, options.steps = 3, options.records_per_step = 40;
  generate_run(folder / "a", options);
  const std::string file = folder / ("a/" + stream_file_name(0));
  const auto size = std::filesystem::file_size(file);
  for (uintmax_t keep = 1; keep < size; keep += std::max<uintmax_t>(1, size / 60)) {
    std::filesystem::remove_all(folder / "b");
    std::filesystem::copy(folder / "a", folder / "b");
    std::filesystem::resize_file(folder / ("b/" + stream_file_name(0)), keep);
    try {
      const Verdict v = diff_folders(folder / "a", folder / "b");
      INFO("cut at " << keep << "\n" << dump(v));
      CHECK(v.outcome == Outcome::incomparable);
    } catch (const std::exception&) {
    }
  }
}

TEST_CASE("a resumed run is compared from its first step on, and with the state that it loaded") {
  const Verdict v = Pair(of_steps(6), of_steps(6, 3)).diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.notes, "run B begins at step 3: compared from there on"));
  CHECK(v.coverage.steps_compared == 3);
  const Verdict swapped = Pair(of_steps(6, 3), of_steps(6)).diff();
  INFO(dump(swapped));
  CHECK(swapped.outcome == Outcome::identical);
}

TEST_CASE("a resumed run that carries nothing of its load is incomparable, but for --steps") {
  SmallTraining resumed = of_steps(6, 3);
  resumed.prologue = false;
  const Verdict v = Pair(of_steps(6), resumed).diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("--steps 3:") != std::string::npos);
  DiffOptions options;
  options.first_step = 3;
  CHECK(Pair(of_steps(6), resumed).diff(options).outcome == Outcome::identical);
}

TEST_CASE("a run of which only later steps were recorded is not taken for a resume") {
  // Its prologue is its initial state, which is not the other run's state at the end of step 2.
  for (const bool swap : {false, true}) {
    Pair pair(of_steps(6), of_steps(6));
    (swap ? pair.a : pair.b).keep_steps({3, 4, 5});
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(v.outcome == Outcome::incomparable);
    CHECK(v.reason.find("--steps 3:N") != std::string::npos);
    DiffOptions options;
    options.first_step = 3;
    CHECK(pair.diff(options).outcome == Outcome::identical);
  }
  SmallTraining faulty = of_steps(6);
  faulty.hook = fault({4, -1, Phase::optimizer, "", "lr"});
  Pair pair(of_steps(6), faulty);
  pair.b.keep_steps({3, 4, 5});
  const Verdict v = pair.diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 4, -1, Phase::optimizer, "", "lr"));
  CHECK(v.cause.cls == "hyperparameter");
  CHECK(holds(v.cause.class_candidates, "state_restore"));  // it may have resumed after all
}

TEST_CASE(
    "two runs of which only later steps were recorded are compared there, and steps between are said to be unseen") {
  Pair equal(of_steps(6), of_steps(6));
  equal.a.keep_steps({4, 5});
  equal.b.keep_steps({4, 5});
  CHECK(equal.diff().outcome == Outcome::identical);
  SmallTraining faulty = of_steps(6);
  faulty.hook = fault({2, 1, Phase::optimizer, "blocks.1.fc", "weight"});
  Pair pair(of_steps(6), faulty);
  pair.a.keep_steps({0, 5});
  pair.b.keep_steps({0, 5});
  const Verdict v = pair.diff();
  INFO(dump(v));
  CHECK(first_of(v).step == 5);
  CHECK(v.cause.cls == "unknown");
  CHECK(holds(v.cause.evidence, "4 steps from step 1 on were not recorded before it"));

  SmallTraining coarse = of_steps(6);
  coarse.level = Level::step;
  faulty.level = Level::step;
  faulty.hook = fault({5, 1, Phase::forward, "blocks.1.fc", "output"});
  Pair sparse(coarse, faulty);
  CHECK(sparse.diff().cause.cls == "nondeterministic_op");
  sparse.a.keep_steps({0, 5});
  sparse.b.keep_steps({0, 5});
  CHECK(sparse.diff().cause.cls == "unknown");
}

TEST_CASE("a load of which a part was not recorded does not make the runs identical") {
  Pair pair(of_steps(6), of_steps(6, 3));
  pair.b.drop(kPrologueStep, "weight.exp_avg");
  const Verdict v = pair.diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("run B recorded no load of 3 tensors of the other run's state on rank 0 (first: blocks.0.fc: "
                      "weight.exp_avg)") != std::string::npos);
  Pair other(of_steps(6), of_steps(6, 3));
  other.a.drop(2, "weight.exp_avg");
  CHECK(other.diff().outcome == Outcome::incomparable);
}

TEST_CASE("momentum that a resume lost is named at the load") {
  for (const bool swap : {false, true}) {
    SmallTraining lost = of_steps(6, 3);
    lost.hook = fault({kPrologueStep, 1, Phase::load, "blocks.1.fc", "weight.exp_avg", Content::zero});
    const Verdict v = swap ? Pair(lost, of_steps(6)).diff() : Pair(of_steps(6), lost).diff();
    INFO(dump(v));
    CHECK(is_at(first_of(v), 3, 1, Phase::load, "blocks.1.fc", "weight.exp_avg"));
    CHECK(first_of(v).in_prologue);
    CHECK(v.also_first.empty());
    CHECK(v.cause.cls == "state_restore");
    CHECK(holds(v.cause.evidence, swap ? "digest in run A is that of zeros" : "digest in run B is that of zeros"));
  }
}

TEST_CASE("momentum that one of two resumes lost is named at the load") {
  SmallTraining lost = of_steps(6, 3);
  lost.hook = fault({kPrologueStep, 1, Phase::load, "blocks.1.fc", "weight.exp_avg", Content::zero});
  const Verdict v = Pair(of_steps(6, 3), lost).diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 3, 1, Phase::load, "blocks.1.fc", "weight.exp_avg"));
  CHECK(v.cause.cls == "state_restore");
}

TEST_CASE("a scalar that differs behind a resume is a state that was not restored") {
  SmallTraining resumed = of_steps(6, 3);
  resumed.hook = fault({4, -1, Phase::optimizer, "", "lr"});
  const Verdict v = Pair(of_steps(6), resumed).diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 4, -1, Phase::optimizer, "", "lr"));
  CHECK(v.cause.cls == "state_restore");
}

TEST_CASE("a generator that differs at the first step behind a load was not restored, later it is a generator fault") {
  SmallTraining resumed = of_steps(6, 3);
  resumed.hook = fault({3, 2, Phase::state, "", "dropout.rng"});
  const Verdict at_load = Pair(of_steps(6), resumed).diff();
  INFO(dump(at_load));
  CHECK(at_load.cause.cls == "state_restore");
  CHECK(at_load.cause.class_candidates == std::vector<std::string>{"state_restore", "rng_state"});
  resumed.hook = fault({4, 2, Phase::state, "", "dropout.rng"});
  CHECK(Pair(of_steps(6), resumed).diff().cause.cls == "rng_state");
}

TEST_CASE("initial weights that differ are the initial state") {
  const Verdict v = diff_with({}, fault({kPrologueStep, -1, Phase::load, "blocks.0.fc", "weight"}));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 0, -1, Phase::load, "blocks.0.fc", "weight"));
  CHECK(first_of(v).in_prologue);
  CHECK(v.cause.cls == "initial_state");
}

TEST_CASE("without the initial state, a difference in the first step is not blamed on the step alone") {
  SmallTraining base;
  base.prologue = false;
  const Verdict v = diff_with(base, fault({0, -1, Phase::forward, "blocks.0.fc", "weight"}));
  INFO(dump(v));
  CHECK(v.cause.cls == "unknown");
  CHECK(holds(v.cause.class_candidates, "initial_state"));
  CHECK(holds(v.cause.evidence, "may have begun before"));
}

TEST_CASE("a prologue that only one run recorded is not equal") {
  SmallTraining without;
  without.prologue = false;
  const Verdict v = Pair({}, without).diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
}

TEST_CASE("runs at two levels are compared at the coarser one, without their trees") {
  SmallTraining fine, coarse;
  coarse.level = Level::step;
  const Verdict equal = Pair(fine, coarse).diff();
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  CHECK(equal.coverage.level == "step");
  CHECK(holds(equal.coverage.limits, "run A is at level layer, run B at level step"));
  CHECK(equal.coverage.records_compared == 4 * (6 + 4 * (3 + 3 * (1 + 2 + 2) + 1)));
  coarse.hook = kLateFault;
  const Verdict v = Pair(fine, coarse).diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 1, Phase::forward, "", "loss"));
}

TEST_CASE("collectives that stand in other layers at level step are not compared with those of a finer run") {
  SmallTraining fine, coarse;
  coarse.level = Level::step;
  Pair pair(fine, coarse);
  pair.b.collectives_under("model");
  const Verdict equal = pair.diff();
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::incomparable);  // not identical: a collective of one run alone looks the same
  CHECK(equal.reason.find("collectives were not compared: at level step they stand in other layers") != std::string::npos);
  CHECK(equal.coverage.records_compared == 4 * (6 + 4 * (3 + 3 * (1 + 2) + 1)));
  coarse.hook = kLateFault;
  Pair faulty(fine, coarse);
  faulty.b.collectives_under("model");
  CHECK(faulty.diff().outcome == Outcome::diverged);
  Pair same_level(fine, fine);
  same_level.b.collectives_under("model");
  CHECK(same_level.diff().outcome != Outcome::identical);
}

TEST_CASE("what layers are handed is not compared with a run at level launch, which may have left it to the launches") {
  SmallTraining layer, launch;
  launch.level = Level::launch;
  const Verdict whole = Pair(layer, layer).diff(), equal = Pair(layer, launch).diff();
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  CHECK(equal.coverage.level == "layer");
  CHECK(holds(equal.coverage.limits, "launches were not compared, nor what layers were handed"));
  // Of 4 ranks, 4 steps and 3 layers: input, weight and grad_output.
  CHECK(equal.coverage.records_compared + 4 * 4 * 3 * 3 == whole.coverage.records_compared);
  launch.hook = fault({2, 1, Phase::forward, layer_name(1), "output"});
  const Verdict v = Pair(layer, launch).diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 2, 1, Phase::forward, layer_name(1), "output"));
}

TEST_CASE("every n-th step: the common ones are compared, and the runs are not called identical") {
  Pair pair(of_steps(4), of_steps(4));
  pair.b.every(2);
  const Verdict v = pair.diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("run A records every step, run B every 2 steps") != std::string::npos);
}

TEST_CASE("unknown step bases are aligned by content, never by hope") {
  SUBCASE("equal initial weights make the first steps the same step") {
    Pair pair(of_steps(4), of_steps(4));
    pair.a.step_base("unknown");
    pair.b.step_base("unknown");
    CHECK(pair.diff().outcome == Outcome::identical);
  }
  SUBCASE("a batch that occurs once aligns a run that was attached later") {
    SmallTraining late = of_steps(4, 2);
    late.prologue = false;
    RunBuilder a(4), b(4);
    plant(&a, of_steps(4));
    RunBuilder renumbered(4);
    plant(&b, late);
    b.step_base("unknown");
    Pair pair(of_steps(4), late);
    pair.b.step_base("unknown");
    DiffOptions options;
    options.first_step = 2;
    const Verdict v = pair.diff(options);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.notes, "B's first batch is that of A's step 2"));
  }
  SUBCASE("other batches and no initial state cannot be aligned") {
    SmallTraining base = of_steps(4);
    base.prologue = false;
    SmallTraining other = base;
    other.hook = fault({-1, -1, Phase::data, "", "tokens"});
    Pair pair(base, other);
    pair.a.step_base("unknown");
    pair.b.step_base("unknown");
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(v.outcome == Outcome::incomparable);
    CHECK(v.reason.find("step base") != std::string::npos);
    CHECK(v.coverage.records_compared == 0);
  }
  SUBCASE("one batch over and over says nothing about the step") {
    SmallTraining base = of_steps(4);
    base.prologue = false;
    base.hook = [](const Moment& at, Content* content) {
      if (at.phase == Phase::data) content->id = 4711 + static_cast<uint64_t>(at.rank);
    };
    Pair pair(base, base);
    pair.b.step_base("unknown");
    CHECK(pair.diff().outcome == Outcome::incomparable);
  }
}

TEST_CASE("a batch found elsewhere says where, and by which factor") {
  SmallTraining other = of_steps(6);
  std::vector<Content> batches(4 * 6);
  SmallTraining probe = of_steps(6);
  probe.hook = [&](const Moment& at, Content* content) {
    if (at.phase == Phase::data) batches[static_cast<size_t>(at.step * 4 + at.rank)] = *content;
  };
  Pair(probe, probe);
  other.hook = [&](const Moment& at, Content* content) {
    if (at.phase == Phase::data && at.step >= 4) *content = batches[static_cast<size_t>((at.step - 3) * 4 + at.rank)];
  };
  const Verdict v = Pair(of_steps(6), other).diff();
  INFO(dump(v));
  CHECK(is_at(first_of(v), 4, -1, Phase::data, "", "tokens"));
  CHECK(v.cause.cls == "data_order");
  CHECK(holds(v.cause.evidence, "is run A's batch of step 1, micro-step 0, rank 0 (3 steps before): step 4 / 4"));
}

TEST_CASE("another environment is always told, and is the cause only where it explains the difference") {
  const auto with_environment = [](const Hook& hook) {
    SmallTraining b;
    b.hook = hook;
    Pair pair({}, b);
    pair.a.manifest().environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8";
    pair.b.manifest().environment["CUBLAS_WORKSPACE_CONFIG"] = ":0:0";
    pair.b.manifest().versions["nccl"] = "2.28.9";
    return pair.diff();
  };
  const Verdict equal = with_environment({});
  CHECK(equal.outcome == Outcome::identical);
  CHECK(holds(equal.notes, "environment: CUBLAS_WORKSPACE_CONFIG: :4096:8 in run A, :0:0 in run B"));
  CHECK(holds(equal.notes, "version of nccl: (not set) in run A, 2.28.9 in run B"));
  const Verdict explains = with_environment(fault({0, -1, Phase::forward, "blocks.0.fc", "output"}));
  INFO(dump(explains));
  CHECK(explains.cause.cls == "environment");
  const Verdict later = with_environment(fault({2, 1, Phase::forward, "blocks.0.fc", "output"}));
  INFO(dump(later));
  CHECK(later.cause.cls == "nondeterministic_op");
  CHECK(later.cause.class_candidates.at(0) == "algorithm_choice");
}

TEST_CASE("a program without steps begins to differ in its own phases, and its start need not be to blame") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    RankBuilder& rank = run->rank(0).prologue().forward("fc");
    for (uint64_t call = 0; call < 3; ++call) {
      rank.input("weight", value(100 + call + (run == &b && call == 2 ? 50 : 0)))
          .output("output", value(200 + call + (run == &b && call == 2 ? 50 : 0)));
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(first_of(v).phase == Phase::forward);
  CHECK(v.cause.cls != "initial_state");
  CHECK(v.cause.next.find("--phase forward") != std::string::npos);
}

TEST_CASE("what a launcher sets for its ranks is no other environment where only the attached run shows it") {
  for (const bool attached : {false, true}) {
    Pair pair({}, {});
    pair.b.manifest().environment["OMP_NUM_THREADS"] = "1";
    pair.a.manifest().environment["NCCL_ALGO"] = "Ring";
    if (attached) pair.b.manifest().notes.push_back(std::string(kAttachedNote) + "steps 0 to 3");
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(holds(v.notes, "environment: OMP_NUM_THREADS") != attached);
    CHECK(holds(v.notes, "environment: NCCL_ALGO: Ring in run A, (not set) in run B"));
  }
}

TEST_CASE("masked names on one side cannot be matched, and that is what is said") {
  Pair pair({}, {});
  pair.b.manifest().names_masked = true;
  const Verdict v = pair.diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("masked") != std::string::npos);
}

TEST_CASE("a process that recorded nothing keeps its run from being identical") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) run->rank(0).step(0).forward("fc").output("output", value(1));
  const TemporaryFolder folder;
  const std::string run_a = a.write(folder / "a"), run_b = b.write(folder / "b");
  CHECK(diff_folders(run_a, run_b).outcome == Outcome::identical);
  std::ofstream(run_b + "/" + refusal_file_name(0, 77)) << "process 77, rank 0: nothing is recorded of it: taken\n";
  const Verdict v = diff_folders(run_a, run_b);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("process 77, rank 0") != std::string::npos);
}

TEST_CASE("a rank that was asked for and that neither run has recorded is missed") {
  RunBuilder a(2), b(2);
  for (RunBuilder* run : {&a, &b}) {
    run->manifest().ranks = {0};
    run->rank(0).step(0).forward("fc").output("output", value(1));
    run->leave_out(1);
  }
  const TemporaryFolder folder;
  const std::string run_a = a.write(folder / "a"), run_b = b.write(folder / "b");
  const Verdict v = diff_folders(run_a, run_b);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.coverage.limits, "only rank 0 of 2"));
  DiffOptions options;
  options.ranks = {0, 1};
  const Verdict asked = diff_folders(run_a, run_b, options);
  CHECK(asked.outcome == Outcome::incomparable);
  CHECK(asked.reason.find("rank 1 was asked for") != std::string::npos);
}

TEST_CASE("a copy torn between two runs is never identical, though every frame's checksum is right") {
  RunBuilder a, x;
  for (RunBuilder* run : {&a, &x}) {
    for (int64_t step = 0; step < 3; ++step) {
      run->rank(0).step(step).forward("fc").output("output", value(static_cast<uint64_t>(run == &a ? step : step + 50)));
    }
  }
  const TemporaryFolder folder;
  const std::string run_a = a.write(folder / "a"), run_x = x.write(folder / "x"), run_torn = a.write(folder / "torn");
  const auto read = [](const std::string& run) {
    std::ifstream file(run + "/rank-00000.fkp", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string whole = read(run_a), other = read(run_x);
  REQUIRE(whole.size() == other.size());
  CHECK(diff_folders(run_a, run_x).outcome == Outcome::diverged);
  int torn_inside = 0;
  for (size_t cut = 0; cut < whole.size(); cut += 4) {
    const std::string mixed = other.substr(0, cut) + whole.substr(cut);
    std::ofstream(run_torn + "/rank-00000.fkp", std::ios::binary) << mixed;
    if (mixed == whole) continue;
    ++torn_inside;
    // Only what is no record may differ: the header says who wrote the file.
    if (diff_folders(run_a, run_torn).outcome != Outcome::identical) continue;
    DiffOptions full;
    full.full_scan = true;
    INFO(cut);
    CHECK(diff_folders(run_a, run_torn, full).outcome == Outcome::identical);
  }
  CHECK(torn_inside > 50);
}

TEST_CASE("steps that were asked for and that no run has reached are missed") {
  RunBuilder a, b;
  for (RunBuilder* run : {&a, &b}) {
    for (int64_t step = 0; step < 3; ++step) run->rank(0).step(step).forward("fc").output("output", value(1));
  }
  const TemporaryFolder folder;
  const std::string run_a = a.write(folder / "a"), run_b = b.write(folder / "b");
  DiffOptions options;
  options.first_step = 1, options.last_step = 2;
  CHECK(diff_folders(run_a, run_b, options).outcome == Outcome::identical);
  options.last_step = 9;
  const Verdict v = diff_folders(run_a, run_b, options);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("steps up to 9 were asked for, but the runs end with step 2") != std::string::npos);
}

TEST_CASE("empty runs are incomparable") {
  Pair nothing(of_steps(0), of_steps(0));
  const Verdict v = nothing.diff();
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  Pair half(of_steps(3), of_steps(0));
  CHECK(half.diff().outcome == Outcome::incomparable);
}

TEST_CASE("a coverage limit of both runs is printed with the verdict, one of a single run forbids identical") {
  Pair pair({}, {});
  for (int rank = 0; rank < 4; ++rank) {
    pair.a.rank(rank).limit("graph captured before attach");
    pair.b.rank(rank).limit("graph captured before attach");
  }
  const Verdict both = pair.diff();
  CHECK(both.outcome == Outcome::identical);
  CHECK(holds(both.coverage.limits, "graph captured before attach"));
  pair.b.rank(1).limit("library X not followed");
  const Verdict one = pair.diff();
  CHECK(one.outcome == Outcome::incomparable);
  CHECK(one.reason.find("library X not followed (declared in run B only)") != std::string::npos);
  CHECK(holds(one.coverage.limits, "library X not followed (declared in run B only)"));
}

TEST_CASE("that modules which rest were not seen forbids identical only where the other run has recorded some") {
  const auto rests = [](RunBuilder* run, int rank, const char* layer) {
    run->rank(rank).at(Phase::optimizer, layer).flags(kRecordEval).add(Role::parameter, "weight", value(7)).flags(0);
  };
  for (const bool swap : {false, true}) {
    Pair pair(of_steps(3), of_steps(3));
    RunBuilder &attached = swap ? pair.b : pair.a, &other = swap ? pair.a : pair.b;
    attached.rank(1).limit("modules that were made before the recording began, as long as nobody calls them");
    const Verdict v = pair.diff();
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.coverage.limits, swap ? "(declared in run B only)" : "(declared in run A only)"));
    rests(&other, 0, "kept");
    const Verdict more = pair.diff();
    INFO(dump(more));
    CHECK(more.outcome == Outcome::incomparable);
    CHECK(more.reason.find("not seen: modules that were made before the recording began") != std::string::npos);
    rests(&attached, 0, "kept");
    CHECK(pair.diff().outcome == Outcome::identical);
    rests(&other, 0, "kept2");  // it holds some itself, but not all
    CHECK(pair.diff().outcome == Outcome::incomparable);
  }
}

TEST_CASE("what one run did behind its last step is nothing to steps that are named, and something to whole runs") {
  Pair pair(of_steps(4), of_steps(4));
  pair.a.rank(0).limit("records and launches made after the end of the last step are not kept");
  CHECK(pair.diff().outcome == Outcome::incomparable);
  DiffOptions options;
  options.first_step = 1, options.last_step = 2;
  const Verdict v = pair.diff(options);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
}

namespace {

// Steps first .. 5 of a job that sets itself up with broadcasts, sends each batch to its ranks before the forward and one
// message in it. What is at 0 is as it always is.
struct Sending {
  int64_t first = 0;
  int set_up = 3;
  uint64_t batch = 0, message = 0, used = 0;  // of step 3: other values; used: of what the forward is handed
  uint64_t past = 0;                // a shift of the set-up's values
  bool metric = false;              // is sent around behind step 2
  const char* metric_op = "all_reduce";
  bool loads = true;
};

RunBuilder sending_run(const Sending& options) {
  RunBuilder run;
  RankBuilder& rank = run.rank(0);
  const auto weight = [&](int64_t step) {
    rank.at(Phase::optimizer).state("weight", Role::parameter, 100 + static_cast<uint64_t>(step));
  };
  const auto send = [&](uint64_t seed, const char* op = "broadcast") {
    rank.collective(op, "", "world", {0, 1}).scalar("root", 0).input("input", value(seed)).output("output", value(seed));
  };
  if (options.loads) rank.prologue().at(Phase::load).state("weight", Role::parameter, 100 + static_cast<uint64_t>(options.first));
  for (int64_t step = options.first; step < 6; ++step) {
    const auto seed = static_cast<uint64_t>(step);
    rank.step(step).flags(kRecordAhead);
    for (int i = 0; step == options.first && i < options.set_up; ++i) send(500 + static_cast<uint64_t>(i) + options.past);
    if (options.metric && step == 3) send(450, options.metric_op);
    send(600 + seed + (step == 3 ? options.batch : 0));
    rank.flags(0)
        .forward("fc")
        .input("input", value(600 + seed + (step == 3 ? options.used : 0)))
        .output("output", value(800 + seed));
    send(700 + seed + (step == 3 ? options.message : 0));
    weight(step + 1);
  }
  return run;
}

Verdict diff_sending(const Sending& a, const Sending& b) {
  const TemporaryFolder folder;
  return diff_folders(sending_run(a).write(folder / "a"), sending_run(b).write(folder / "b"));
}

}  // namespace

TEST_CASE("what a resumed job sends around to set itself up is not compared with the other's training, and is named") {
  for (const bool swap : {false, true}) {
    Sending straight, resumed{.first = 3, .past = 50};
    const Verdict v = swap ? diff_sending(resumed, straight) : diff_sending(straight, resumed);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.notes, "9 records of collectives that one run alone called ahead of step 3 were compared with nothing"));
    CHECK(v.reason.starts_with("every record that both runs have agrees"));
    CHECK(v.coverage.records_compared == 3 * 9 + 1);
  }
}

TEST_CASE("what the straight job did between two steps, before the other was resumed there, is not missed in that one") {
  const Sending straight{.metric = true}, resumed{.first = 3};
  for (const bool swap : {false, true}) {
    const Verdict v = swap ? diff_sending(resumed, straight) : diff_sending(straight, resumed);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.notes, "12 records of collectives that one run alone called ahead of step 3"));  // 3 of them the metric
  }
  // Of two that begin together it is another structure.
  CHECK(diff_sending(straight, {}).outcome == Outcome::diverged);
}

TEST_CASE("a replay that begins where another run was attached has set itself up, and that one has not") {
  const TemporaryFolder folder;
  RunBuilder attached = sending_run({.first = 3, .set_up = 0, .loads = false}), replayed = sending_run({.first = 3});
  const Verdict v = diff_folders(attached.write(folder / "a"), replayed.write(folder / "b"));
  INFO(dump(v));
  CHECK_FALSE(v.first);
  CHECK(holds(v.notes, "9 records of collectives that one run alone called ahead of step 3"));
}

TEST_CASE(
    "calls ahead of a resumed run's first step that hold other values may be others: they are not said to be equal, "
    "nor to differ") {
  for (const bool swap : {false, true}) {
    const auto diff = [&](const Sending& straight, const Sending& resumed) {
      return swap ? diff_sending(resumed, straight) : diff_sending(straight, resumed);
    };
    const Verdict batch = diff({}, {.first = 3, .batch = 1000});  // another batch, or a call of the set-up
    INFO(dump(batch));
    CHECK(batch.outcome == Outcome::incomparable);
    CHECK(
        batch.reason.find("hold other values in each run (first broadcast: input, rank 0): they may be other calls") !=
        std::string::npos);
    CHECK_FALSE(batch.first);
    // A metric that is sent as the set-up is, by as many calls or others.
    for (const int set_up : {1, 3}) {
      const Verdict metric = diff({.metric = true, .metric_op = "broadcast"}, {.first = 3, .set_up = set_up});
      INFO(dump(metric));
      CHECK(metric.outcome == Outcome::incomparable);
      CHECK_FALSE(metric.first);
    }
    // What comes of another batch decides.
    const Verdict used = diff({}, {.first = 3, .batch = 1000, .used = 1000});
    INFO(dump(used));
    CHECK(used.outcome == Outcome::diverged);
    CHECK(is_at(first_of(used), 3, 0, Phase::forward, "fc", "input"));
    CHECK(holds(used.cause.evidence,
                "the first divergence may lie before it: 2 records of collectives called ahead of step 3"));
  }
  const Verdict message = diff_sending({.message = 1000}, {.first = 3});
  INFO(dump(message));
  CHECK(message.outcome == Outcome::diverged);
  CHECK(first_of(message).step == 3);
  CHECK(first_of(message).op == "broadcast");
}

TEST_CASE("jobs that begin together and set themselves up in other ways are not the same") {
  const Verdict more = diff_sending({}, {.set_up = 4});
  INFO(dump(more));
  CHECK(more.outcome == Outcome::diverged);
  const Verdict other = diff_sending({}, {.past = 50});
  INFO(dump(other));
  CHECK(other.outcome == Outcome::diverged);
  CHECK(first_of(other).step == 0);
}
