#include "lib/anomalies.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/support/verdict_check.h"

namespace forkpoint {
namespace {

Anomalies anomalies_of(const RunBuilder& run, const AnomalyOptions& options = {}) {
  const TemporaryFolder folder;
  return find_anomalies(Run::open(run.write(folder / "run")), options);
}

// A tensor of this magnitude.
Value sized(double magnitude, uint64_t seed = 1, uint64_t nonfinite = 0) {
  Value out = value(seed);
  out.stats.absmax = static_cast<float>(magnitude);
  out.stats.nonfinite = nonfinite;
  return out;
}

// One rank whose gradient has the magnitude that `gradient_of` says, with a loss of about 2 unless told.
RunBuilder run_of(
    int64_t steps, const std::function<double(int64_t)>& gradient_of,
    const std::function<double(int64_t)>& loss_of = [](int64_t) { return 2.0; }) {
  RunBuilder run(1);
  for (int64_t step = 0; step < steps; ++step) {
    RankBuilder& rank = run.rank(0).step(step);
    rank.forward("fc").output("output", sized(1.0 + 0.01 * static_cast<double>(step % 3)));
    rank.at(Phase::forward).scalar("loss", loss_of(step), Role::loss);
    rank.backward("fc").add(Role::gradient, "weight.grad", sized(gradient_of(step)));
    rank.at(Phase::optimizer, "fc").add(Role::parameter, "weight", sized(0.5));
  }
  return run;
}
double wobble(int64_t step) { return 0.01 * (1 + 0.5 * std::sin(static_cast<double>(step) * 1.7)); }

}  // namespace

TEST_CASE("a run in order is nothing anomalous, and the line says in what") {
  const Anomalies anomalies = anomalies_of(run_of(12, wobble));
  CHECK(headline(anomalies) == "nothing anomalous in 12 steps of 1 rank (48 tensors looked at)");
  CHECK(exit_code(anomalies) == 0);
  CHECK(anomalies.judged > 0);
}

TEST_CASE("the first value that became non-finite is named with its rank, not those that a collective reached") {
  RunBuilder run(4);
  const std::vector<int> members = {0, 1, 2, 3};
  for (int rank = 0; rank < 4; ++rank) {
    for (int64_t step = 0; step < 14; ++step) {
      const uint64_t own = rank == 1 && step == 12 ? 2 : 0, all = step == 12 ? 3 : 0, after = step >= 12 ? 32 : 0;
      RankBuilder& builder = run.rank(rank).step(step);
      builder.at(Phase::forward).scalar("loss", step > 12 ? std::nan("") : 2.5, Role::loss);
      builder.backward("blocks.3.mlp.fc1").input("grad_output", sized(0.1)).output("grad_input", sized(0.1, 1, own));
      builder.add(Role::gradient, "weight.grad", sized(0.1, 1, own));
      builder.collective("all_reduce", "blocks.3.mlp.fc1", "world", members).input("weight.grad", sized(0.1, 1, own));
      builder.output("weight.grad", sized(0.1, 1, all));
      builder.at(Phase::optimizer, "blocks.3.mlp.fc1").add(Role::parameter, "weight", sized(0.1, 1, after));
    }
  }
  const Anomalies anomalies = anomalies_of(run);
  CHECK(headline(anomalies) ==
        "first non-finite value at step 12, rank 1, backward, blocks.3.mlp.fc1: grad_input (2 of 32 elements)");
  CHECK(exit_code(anomalies) == 1);
  REQUIRE(anomalies.loss);
  CHECK(anomalies.loss->at.step == 13);
  CHECK(anomalies.loss->ranks == members);
  CHECK(anomalies.loss_before == 2.5);
  REQUIRE(anomalies.chain.size() == 4);  // backward, collective, optimizer of step 12; the loss
  CHECK(anomalies.chain[0].ranks == std::vector<int>{1});
  CHECK(anomalies.chain[1].phase == Phase::collective);
  CHECK(anomalies.chain[1].ranks == members);
  CHECK(to_json(anomalies)["first_nonfinite"]["rank"] == 1);
}

TEST_CASE("a sum that overflows is the collective's own, on all ranks") {
  RunBuilder run(2);
  for (int rank = 0; rank < 2; ++rank) {
    RankBuilder& builder = run.rank(rank).step(0);
    builder.collective("all_reduce", "fc", "world", {0, 1})
        .input("weight.grad", sized(3e38))
        .output("weight.grad", sized(0, 1, 4));
  }
  const Anomalies anomalies = anomalies_of(run);
  REQUIRE(anomalies.nonfinite);
  CHECK(anomalies.nonfinite->at.rank == -1);
  CHECK(anomalies.nonfinite->at.phase == Phase::collective);
}

TEST_CASE("an op's input comes before its output, whatever was recorded first") {
  RunBuilder run(1);
  run.rank(0).step(0).forward("fc").output("output", with_nan(1)).input("input", with_nan(2));
  CHECK(anomalies_of(run).nonfinite->at.tensor == "input");
}

TEST_CASE("a gradient that leaves its history is named, with its median") {
  const Anomalies anomalies = anomalies_of(run_of(
      40, [](int64_t step) { return step == 30 ? 0.9 : wobble(step); },
      [](int64_t step) { return step < 32 ? 2.0 : 6.0; }));
  REQUIRE(anomalies.magnitude);
  CHECK(!anomalies.nonfinite);
  CHECK(headline(anomalies).starts_with(
      "first magnitude out of its own history at step 30, rank 0, backward, fc: weight.grad (0.9, "));
  CHECK(anomalies.magnitude->usual == doctest::Approx(0.01).epsilon(0.2));
  REQUIRE(anomalies.loss);
  CHECK(anomalies.loss->at.step == 32);
  CHECK(anomalies.loss_before == 2.0);
}

TEST_CASE("a burst of a gradient that nothing follows is said and not counted, unless it is out of all proportion") {
  const auto burst = [](double size, int64_t loss_step) {
    return anomalies_of(run_of(
        60, [=](int64_t step) { return step == 30 ? size : wobble(step); },
        [=](int64_t step) { return step == loss_step ? 6.0 : 2.0; }));
  };
  const Anomalies idle = burst(0.9, -1);
  CHECK(!idle.found());
  CHECK(exit_code(idle) == 0);
  CHECK(holds(idle.notes, "gradients burst in 1 step, first in step 30"));
  CHECK(burst(0.9, 38).magnitude->at.step == 30);
  CHECK(burst(0.9, 39).magnitude->at.tensor == "loss");  // too late to be its consequence
  CHECK(burst(1e5, -1).found());
}

TEST_CASE("what changes magnitude in good order is no anomaly") {
  const std::vector<std::function<double(int64_t)>> good = {
      [](int64_t step) { return wobble(step) * (step < 20 ? 1 : 2); },                   // the loss scale doubles
      [](int64_t step) { return wobble(step) * (step < 20 ? 65536 : 4096); },            // and is cut down
      [](int64_t step) { return 1e-8 * static_cast<double>((step + 1) * (step + 1)); },  // Adam's moments, warm-up
      [](int64_t step) { return step < 20 ? 0.0 : wobble(step); },                       // frozen, then not
      [](int64_t step) { return step % 5 == 0 ? 0.0 : wobble(step); },                   // no gradient now and then
      [](int64_t step) { return step % 7 == 0 ? 0.8 : wobble(step); },                   // as large before
      [](int64_t) { return 0.25; },
      [](int64_t step) { return step < 20 ? 1e-30 : 1e-22; },        // both are nothing
      [](int64_t step) { return step == 3 ? 50.0 : wobble(step); },  // before there is a history
  };
  for (size_t i = 0; i < good.size(); ++i) CHECK_MESSAGE(!anomalies_of(run_of(60, good[i])).found(), i);
}

TEST_CASE(
    "a mask of -infinity that reaches nothing is said and not counted; a NaN that spreads from the first step is "
    "found") {
  const auto with_mask = [](double loss) {
    RunBuilder run(1);
    for (int64_t step = 0; step < 3; ++step) {
      RankBuilder& rank = run.rank(0).step(step);
      rank.forward("attn").input("bias", sized(1, 1, 16)).output("output", sized(1));
      rank.at(Phase::forward).scalar("loss", loss, Role::loss);
    }
    return run;
  };
  const Anomalies masked = anomalies_of(with_mask(2.0));
  CHECK(!masked.found());
  CHECK(holds(masked.notes, "forward, attn: bias is not finite"));
  const Anomalies spread = anomalies_of(with_mask(std::nan("")));
  REQUIRE(spread.nonfinite);
  CHECK(spread.nonfinite->at.tensor == "bias");
}

TEST_CASE("gradients that overflow in a step which the gradient scaler skips are its business") {
  const auto with_scaler = [](uint64_t nan_in_weight) {
    RunBuilder run(1);
    for (int64_t step = 0; step < 3; ++step) {
      RankBuilder& rank = run.rank(0).step(step);
      rank.at(Phase::forward).scalar("loss", 2.0, Role::loss);
      rank.backward("fc").add(Role::gradient, "weight.grad", sized(6e4, 1, step == 1 ? 5 : 0));
      rank.at(Phase::optimizer).scalar("skipped", step == 1 ? 1 : 0);
      rank.at(Phase::optimizer, "fc").add(Role::parameter, "weight", sized(1, 1, step == 1 ? nan_in_weight : 0));
    }
    return run;
  };
  const Anomalies good = anomalies_of(with_scaler(0));
  CHECK(!good.found());
  CHECK(holds(good.notes, "skipped step 1"));
  CHECK(anomalies_of(with_scaler(1)).nonfinite->at.tensor == "weight.grad");
}

TEST_CASE("evaluation is told apart") {
  RunBuilder run(1);
  run.rank(0).step(0).flags(kRecordEval).forward("fc").output("output", with_nan(1)).flags(0);
  run.rank(0).forward("fc").output("output", value(2));
  const Anomalies anomalies = anomalies_of(run);
  CHECK(!anomalies.found());
  CHECK(exit_code(anomalies) == 0);
  REQUIRE(anomalies.evaluation);
}

TEST_CASE("integers and hyperparameters have no magnitude to leave") {
  RunBuilder run(1);
  for (int64_t step = 0; step < 30; ++step) {
    Value tokens = value(1, {{4, 8}, DType::i64});
    tokens.stats.absmax = step == 20 ? 5e4f : 10.0f;
    run.rank(0).step(step).at(Phase::data).add(Role::batch, "tokens", tokens);
    run.rank(0).at(Phase::optimizer).scalar("lr", step == 20 ? 1.0 : 1e-4);
  }
  CHECK(!anomalies_of(run).found());
}

TEST_CASE("the line never speaks for what was lost or not recorded") {
  RunBuilder gap = run_of(12, wobble), missing(2), every = run_of(12, wobble);
  gap.rank(0).gap(5, 6, "ring full for 10000 ms");
  const Anomalies lost = anomalies_of(gap);
  CHECK(exit_code(lost) == 2);
  CHECK(headline(lost).find("lost: rank 0, steps 5-6: ring full for 10000 ms") != std::string::npos);
  for (int rank = 0; rank < 2; ++rank)
    run_of(3, wobble), missing.rank(rank).step(0).forward("fc").output("output", value(1));
  missing.leave_out(1);
  CHECK(headline(anomalies_of(missing)).find("rank 1 is missing") != std::string::npos);
  every.every(10);
  const Anomalies sparse = anomalies_of(every);
  CHECK(exit_code(sparse) == 0);
  CHECK(headline(sparse).find("only every 10th step was recorded") != std::string::npos);
  RunBuilder coarse(1, Level::step);
  coarse.rank(0).step(0).at(Phase::forward).scalar("loss", 2, Role::loss);
  const std::string line = headline(anomalies_of(coarse));
  CHECK(line.find("level step") != std::string::npos);
  CHECK(line.find("no magnitude was judged") != std::string::npos);
  RunBuilder died = run_of(3, wobble);
  died.rank(0).die();
  CHECK(exit_code(anomalies_of(died)) == 2);
}

TEST_CASE("where names are masked, skipped steps cannot be told, and that is said") {
  RunBuilder run = run_of(12, wobble);
  CHECK(!holds(anomalies_of(run).left_out, "gradient scaler skipped"));
  run.manifest().names_masked = true;
  CHECK(holds(anomalies_of(run).left_out, "gradient scaler skipped"));
}

}  // namespace forkpoint
