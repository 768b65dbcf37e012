// Which state a resume has lost, by what was recorded: each is planted in a training of three parameters and named.
#include "lib/lost_state.h"

#include <doctest/doctest.h>

#include <functional>

#include "lib/diff.h"
#include "tests/support/run_builder.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

using Texts = std::vector<std::string>;
constexpr int64_t kResumed = 4, kEnd = 7;

// What is done to a record of the resumed run: by phase, tensor and step (kPrologueStep: the load).
struct Changes {
  std::function<Value(int64_t step, const std::string& tensor, uint64_t seed)> tensor = [](int64_t, const std::string&, uint64_t seed) {
    return value(seed);
  };
  std::function<double(int64_t step, const std::string& name, double number)> scalar = [](int64_t, const std::string&, double number) {
    return number;
  };
  bool loads_momentum = true;
};

uint64_t seed_of(int64_t step, const std::string& tensor) { return std::hash<std::string>{}(tensor) + static_cast<uint64_t>(step + 10) * 97; }

void put_state(RankBuilder* rank, int64_t at, int64_t of, const Changes& changes, bool momentum) {
  const auto put = [&](Role role, const std::string& name) { rank->add(role, name, changes.tensor(at, name, seed_of(of, name))); };
  put(Role::parameter, "logit_scale");
  put(Role::parameter, "weight");
  put(Role::other, "running_mean");
  if (momentum) put(Role::optimizer_state, "weight.exp_avg"), put(Role::optimizer_state, "weight.exp_avg_sq");
}

void put_step(RankBuilder* rank, int64_t step, const Changes& changes) {
  const auto put = [&](Role role, const std::string& name) { rank->add(role, name, changes.tensor(step, name, seed_of(step, name))); };
  rank->step(step).at(Phase::state);
  put(Role::rng, "torch.rng");
  rank->at(Phase::data);
  put(Role::batch, "batch");
  rank->forward("loss");
  put(Role::loss, "loss");
  rank->at(Phase::optimizer);
  rank->scalar("lr", changes.scalar(step, "lr", 0.1 / static_cast<double>(step + 1)));
  rank->scalar("betas.0", changes.scalar(step, "betas.0", 0.9));
  rank->scalar("scale", changes.scalar(step, "scale", 65536));
  rank->at(Phase::optimizer, "head");
  put_state(rank, step, step, changes, true);
  rank->at(Phase::optimizer, "kept").flags(kRecordEval);
  put(Role::parameter, "ema");
  rank->flags(0);
}

struct Found {
  Texts states;
  Verdict verdict;  // straight against resumed
};

Found find(const Changes& changes, bool repeats = true, bool is_resume = false) {
  const TemporaryFolder folder;
  RunBuilder straight(1), stopped(1), resumed(1);
  const Changes none;
  straight.rank(0).prologue().at(Phase::load, "head");
  put_state(&straight.rank(0), kPrologueStep, -1, none, false);
  for (int64_t step = 0; step < kEnd; ++step) put_step(&straight.rank(0), step, none);
  for (int64_t step = 0; step < kResumed; ++step) put_step(&stopped.rank(0), step, none);
  resumed.rank(0).prologue().at(Phase::load, "head");
  put_state(&resumed.rank(0), kPrologueStep, kResumed - 1, changes, changes.loads_momentum);
  for (int64_t step = kResumed; step < kEnd; ++step) put_step(&resumed.rank(0), step, changes);
  const Run a = Run::open(straight.write(folder / "a")), b = Run::open(stopped.write(folder / "b")), c = Run::open(resumed.write(folder / "c"));
  DiffOptions options;
  options.first_step = kResumed;
  options.is_resume = is_resume;
  return {lost_states({repeats ? &a : nullptr, &b, &c, kResumed}), diff(a, c, options)};
}

Texts states(const Changes& changes, bool repeats = true) { return find(changes, repeats).states; }

// One tensor is another one from a step on.
Changes changed(const std::string& name, int64_t from, int64_t to = kEnd) {
  Changes changes;
  changes.tensor = [=](int64_t step, const std::string& tensor, uint64_t seed) {
    return value(tensor == name && step >= from && step <= to ? seed + 1 : seed);
  };
  return changes;
}

Changes changed_scalar(const std::string& name, int64_t from) {
  Changes changes;
  changes.scalar = [=](int64_t step, const std::string& scalar, double number) { return scalar == name && step >= from ? 2 * number : number; };
  return changes;
}

}  // namespace

TEST_CASE("nothing is lost, nothing is named") { CHECK(states({}).empty()); }

TEST_CASE("what was loaded is held against what was there at the stop, by what it is and not by its name") {
  const auto loaded = [](const char* name) { return states(changed(name, kPrologueStep, kPrologueStep)); };
  CHECK(loaded("weight.exp_avg") == Texts{"momentum (weight.exp_avg of head)"});
  CHECK(loaded("weight.exp_avg_sq") == Texts{"second moments (weight.exp_avg_sq of head)"});
  CHECK(loaded("weight") == Texts{"weights (weight of head)"});
  CHECK(loaded("running_mean") == Texts{"buffers (running_mean of head)"});
  CHECK(loaded("logit_scale") == Texts{"weights (logit_scale of head)"});  // no loss scale
}

TEST_CASE("a buffer that was not restored is where the runs part, if the step behind the load differs at all") {
  const Found found = find(changed("running_mean", kPrologueStep));
  REQUIRE(found.verdict.first.has_value());
  CHECK(found.verdict.first->in_prologue);
  CHECK(found.verdict.first->tensor == "running_mean");
  CHECK(found.verdict.cause.cls == "state_restore");
  const Found rewritten =
      find(changed("running_mean", kPrologueStep, kPrologueStep));  // a buffer that nobody reads again
  CHECK(rewritten.verdict.outcome == Outcome::identical);
}

TEST_CASE("a buffer that one rank saved and all have loaded is none that was lost") {
  const TemporaryFolder folder;
  // Two ranks whose running means differ, as of DistributedDataParallel, which broadcasts rank 0's before each forward.
  const auto write = [&](const char* name, int64_t first, bool loads_own, bool zeros, bool broadcasts = true) {
    RunBuilder run(2);
    for (int rank = 0; rank < 2; ++rank) {
      const auto mean = [&](int64_t step, int of) {
        return value(static_cast<uint64_t>(step + 10) * 97 + static_cast<uint64_t>(of));
      };
      RankBuilder& at = run.rank(rank);
      at.prologue().at(Phase::load, "head").add(Role::parameter, "weight", value(static_cast<uint64_t>(100 + first)));
      at.add(Role::other, "running_mean",
             zeros ? Value{value(0).layout, {}, {}} : mean(first - 1, loads_own ? rank : 0));
      for (int64_t step = first; step < kEnd; ++step) {
        // In a resumed run the generator is lost.
        at.step(step).at(Phase::state).state("torch.rng", Role::rng, first > 0 ? 5 : 4);
        if (broadcasts)
          at.collective("broadcast", "", "world", {0, 1}).output("output", mean(step - 1 + (first > 0 ? 50 : 0), 0));
        at.at(Phase::optimizer, "head")
            .add(Role::parameter, "weight", value(static_cast<uint64_t>(101 + step) + (first > 0 ? 50 : 0)));
        at.add(Role::other, "running_mean", mean(step + (first > 0 ? 50 : 0), rank));
      }
    }
    return run.write(folder / name);
  };
  const Run straight = Run::open(write("a", 0, true, false));
  const Run stopped = Run::open(write("b", 0, true, false));
  const Run resumed = Run::open(write("c", kResumed, false, false));
  CHECK(lost_states({&straight, &stopped, &resumed, kResumed}) == Texts{"random-number generator (torch.rng)"});
  const Verdict v = diff(straight, resumed);
  REQUIRE(v.first.has_value());
  CHECK(v.first->tensor == "torch.rng");
  const Run reset = Run::open(write("d", kResumed, false, true));
  CHECK(lost_states({&straight, &stopped, &reset, kResumed}).at(0) == "buffers (running_mean of head)");
  CHECK(diff(straight, reset).first->tensor == "running_mean");
  // Where nobody broadcasts them it was lost: rank 1 has another's.
  const Run alone = Run::open(write("e", 0, true, false, false)),
            given = Run::open(write("f", kResumed, false, false, false));
  CHECK(lost_states({&alone, &alone, &given, kResumed}).at(0) == "buffers (running_mean of head)");
  const Verdict lost = diff(alone, given);
  CHECK(lost.first->tensor == "running_mean");
  CHECK(lost.first->rank == 1);
}

TEST_CASE("a resume that has loaded nothing of the other's state is told at its load where it is known to be one") {
  Changes all;
  all.tensor = [](int64_t step, const std::string&, uint64_t seed) {
    return value(step == kPrologueStep || step >= kResumed ? seed + 1 : seed);
  };
  const Found known = find(all, true, true);
  REQUIRE(known.verdict.first.has_value());
  CHECK(known.verdict.first->in_prologue);
  CHECK(known.verdict.cause.cls == "state_restore");
  const Found unknown = find(all);  // it may be another training
  REQUIRE(unknown.verdict.first.has_value());
  CHECK_FALSE(unknown.verdict.first->in_prologue);
}

TEST_CASE("weights that no step trains are in no load: what they are behind the first step names them") {
  CHECK(states(changed("ema", kResumed)) == Texts{"weights that no step trains (ema of kept)"});
  CHECK(states(changed("ema", kResumed + 1)).empty());
  Changes both = changed("ema", kResumed);  // follows from the weights
  both.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    return value((tensor == "ema" || tensor == "weight") && step >= kResumed ? seed + 1 : seed);
  };
  CHECK(states(both).empty());
}

TEST_CASE("a loss's scale that was not restored is where the runs part, and no bit of the loss that flipped") {
  Changes changes = changed_scalar("scale", kResumed);
  changes.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    return value(step >= kResumed && (tensor == "loss" || tensor == "weight") ? seed + 1 : seed);
  };
  const Found found = find(changes);
  REQUIRE(found.verdict.first.has_value());
  CHECK(found.verdict.first->tensor == "scale");
  CHECK(found.verdict.cause.cls == "state_restore");
  CHECK_FALSE(found.verdict.first->pointing.has_value());
}

TEST_CASE("a loss's scale that was lowered since a gradient is not finite is what follows from it") {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, bool broken) {
    RunBuilder run(1);
    RankBuilder& rank = run.rank(0);
    for (int64_t step = 0; step < 3; ++step) {
      const bool now = broken && step == 1;
      rank.step(step).backward("fc").add(Role::gradient, "weight.grad", now ? with_nan(9) : value(9));
      rank.at(Phase::optimizer).scalar("scaler.scale", now ? 512 : 1024);  // recorded when it has been updated
    }
    return run.write(folder / name);
  };
  const Verdict v = diff(Run::open(write("a", false)), Run::open(write("b", true)), {});
  REQUIRE(v.first.has_value());
  CHECK(v.first->layer == "fc");
}

TEST_CASE("an optimizer that begins anew has no state to compare: what is missing is named") {
  Changes changes;
  changes.loads_momentum = false;
  CHECK(states(changes) == Texts{"momentum (weight.exp_avg of head: not restored)", "second moments (weight.exp_avg_sq of head: not restored)"});
}

TEST_CASE("weights of another type, and weights that went through a narrower one") {
  Changes other;
  other.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    return value(seed, {{4, 8}, step == kPrologueStep && tensor == "weight" ? DType::bf16 : DType::f32});
  };
  CHECK(states(other) == Texts{"dtype (weight of head: f32 became bf16)"});
  Changes narrow;
  narrow.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    return step == kPrologueStep && (tensor == "weight" || tensor == "logit_scale") ? through_bf16(seed) : value(seed);
  };
  const Found found = find(narrow);
  CHECK(found.states == Texts{"dtype (logit_scale of head: rounded to bf16)"});
  // No weight agrees, but the momentum does, which the other run did not begin with: so it is a resume, and its load differs.
  REQUIRE(found.verdict.first.has_value());
  CHECK(found.verdict.first->in_prologue);
  CHECK(found.verdict.first->layer == "head");
  CHECK(found.verdict.cause.cls == "state_restore");
  // One that is not rounded but another one: then it was no conversion.
  narrow.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    if (step == kPrologueStep && tensor == "weight") return value(seed + 1);
    return step == kPrologueStep && tensor == "logit_scale" ? through_bf16(seed) : value(seed);
  };
  CHECK(states(narrow) == Texts{"weights (logit_scale of head)"});
}

TEST_CASE("a schedule shows in the rate of the first step, or of the next where the optimizer kept a copy") {
  CHECK(states(changed_scalar("lr", kResumed)) == Texts{"schedule (learning rate) (lr)"});
  CHECK(states(changed_scalar("lr", kResumed + 1)) == Texts{"schedule (learning rate) (lr)"});
}

TEST_CASE("a loss scale shows when it is used, also steps later (its tracker was lost)") {
  CHECK(states(changed_scalar("scale", kResumed)) == Texts{"loss scale (scale)"});
  CHECK(states(changed_scalar("scale", kResumed + 2)) == Texts{"loss scale (scale)"});
  CHECK(states(changed_scalar("betas.0", kResumed)) == Texts{"settings of the optimizer (betas.0)"});
}

TEST_CASE("a batch of another step while the generators agree: the position in the data, at the resume or an epoch later") {
  for (const int64_t from : {kResumed, kResumed + 2}) {
    Changes changes;
    changes.tensor = [=](int64_t step, const std::string& tensor, uint64_t seed) {
      return value(step >= from && tensor == "batch" ? seed_of(step - from, tensor) : seed);
    };
    CHECK(states(changes) == Texts{"position in the data (batch)"});
  }
}

TEST_CASE("a batch that the straight run never had may be drawn by a generator that is not recorded: no position is claimed") {
  CHECK(states(changed("batch", kResumed)) == Texts{"data (batch: none that the straight run was seen to have)"});
  CHECK(states(changed("batch", kResumed + 2)) == Texts{"data (batch: none that the straight run was seen to have)"});
}

TEST_CASE("a step count that is off by one is no rounded one, though 257 in bf16 is 256") {
  const auto count = [](float number) {
    Value counted = value(static_cast<uint64_t>(number), {{}, DType::f32});
    counted.stats.absmax = number;
    return counted;
  };
  const TemporaryFolder folder;
  RunBuilder stopped(1), resumed(1);
  stopped.rank(0).step(kResumed - 1);
  stopped.rank(0).at(Phase::optimizer, "head").add(Role::optimizer_state, "weight.step", count(257));
  resumed.rank(0).prologue().at(Phase::load, "head").add(Role::optimizer_state, "weight.step", count(256));
  resumed.rank(0).step(kResumed).at(Phase::optimizer, "head").add(Role::optimizer_state, "weight.step", count(257));
  const Run b = Run::open(stopped.write(folder / "b")), c = Run::open(resumed.write(folder / "c"));
  CHECK(lost_states({nullptr, &b, &c, kResumed}) == Texts{"step count of the optimizer (weight.step of head)"});
}

TEST_CASE("a generator that was lost draws another batch: the position is named only if that batch is one of the other run's") {
  Changes changes;
  changes.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    return value(step >= kResumed && (tensor == "torch.rng" || tensor == "batch") ? seed + 1 : seed);
  };
  CHECK(states(changes) == Texts{"random-number generator (torch.rng)"});
  changes.tensor = [](int64_t step, const std::string& tensor, uint64_t seed) {
    if (step >= kResumed && tensor == "batch") return value(seed_of(step - kResumed, tensor));  // from the begin on
    return value(step >= kResumed && tensor == "torch.rng" ? seed + 1 : seed);
  };
  CHECK(states(changes) == Texts{"random-number generator (torch.rng)", "position in the data (batch)"});
}

TEST_CASE("a fault that strikes later is no lost state, and a command that does not repeat itself shows no more than its load") {
  CHECK(states(changed("torch.rng", kResumed + 1)).empty());
  CHECK(states(changed("weight", kResumed + 1)).empty());
  CHECK(states(changed("batch", kResumed), false).empty());
  CHECK(states(changed("weight.exp_avg", kPrologueStep, kPrologueStep), false) == Texts{"momentum (weight.exp_avg of head)"});
}
