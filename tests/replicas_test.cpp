#include "lib/replicas.h"

#include <doctest/doctest.h>

#include "lib/digest.h"
#include "tests/support/verdict_check.h"

namespace forkpoint {
namespace {

Verdict replicas_of(const RunBuilder& run, const DiffOptions& options = {}) {
  const TemporaryFolder folder;
  return diff_replicas(Run::open(run.write(folder / "run")), options);
}

Verdict replicas_of(const SmallTraining& training, const DiffOptions& options = {}) {
  RunBuilder run(training.ranks, training.level);
  plant(&run, training);
  return replicas_of(run, options);
}

// Facts are of every rank in the builder; here each rank has its own, written by hand.
class PlacedRun {
 public:
  using Facts = std::vector<std::pair<std::string, std::string>>;
  explicit PlacedRun(std::vector<Facts> facts) : facts_(std::move(facts)) {}

  // value_of(rank, step) of one tensor of one layer, from the load (step -1) on.
  struct Tensor {
    std::string layer, name;
    Role role = Role::parameter;
    std::function<Value(int rank, int64_t step)> value_of;
  };
  bool masked = false;
  Verdict compare(const std::vector<Tensor>& tensors, int64_t steps = 3, bool prologue = true) const {
    const TemporaryFolder folder;
    const std::string directory = folder / "run";
    Manifest manifest;
    manifest.state = RunState::whole, manifest.world_size = static_cast<int>(facts_.size());
    manifest.step_base = "step(n)", manifest.names_masked = masked;
    create_run(directory, manifest);
    for (size_t rank = 0; rank < facts_.size(); ++rank)
      write(directory, static_cast<int>(rank), tensors, steps, prologue);
    write_manifest(directory, manifest);
    return diff_replicas(Run::open(directory));
  }

 private:
  void write(const std::string& directory, int rank, const std::vector<Tensor>& tensors, int64_t steps,
             bool prologue) const {
    StreamHeader header;
    header.rank = rank, header.world_size = static_cast<int>(facts_.size()), header.step_base = "step(n)";
    header.facts = facts_[static_cast<size_t>(rank)];
    const auto writer = HashStreamWriter::create(directory + "/" + stream_file_name(rank), header);
    for (int64_t step = prologue ? kPrologueStep : 0; step < steps; ++step) {
      writer->begin_step(step);
      for (const Tensor& tensor : tensors) {
        const Value value = tensor.value_of(rank, step);
        if (value.layout.shape.empty()) continue;  // this rank does not hold it
        Site site{step == kPrologueStep ? Phase::load : Phase::optimizer,
                  Kind::tensor,
                  tensor.role,
                  tensor.layer,
                  "",
                  tensor.name,
                  ""};
        Record record;
        record.site = writer->site_id(site), record.layout = writer->layout_id(value.layout);
        record.digest = value.digest, record.stats = value.stats;
        writer->append(record, 128);
      }
      writer->end_step();
    }
    writer->finish();
  }

  std::vector<Facts> facts_;
};

uint64_t seed_of(int64_t step, int of = 0) { return static_cast<uint64_t>(100 + step * 10 + of); }

std::vector<PlacedRun::Facts> data_parallel(int ranks) {
  std::vector<PlacedRun::Facts> facts;
  for (int rank = 0; rank < ranks; ++rank) facts.push_back({{"dp_rank", std::to_string(rank)}});
  return facts;
}
std::vector<PlacedRun::Facts> tensor_parallel() {  // tp 2, dp 2
  return {{{"tp_rank", "0"}, {"dp_rank", "0"}},
          {{"tp_rank", "1"}, {"dp_rank", "0"}},
          {{"tp_rank", "0"}, {"dp_rank", "1"}},
          {{"tp_rank", "1"}, {"dp_rank", "1"}}};
}

}  // namespace

TEST_CASE("a run whose replicas stay in sync is identical, though batches, activations and generators differ") {
  for (const Level level : {Level::step, Level::layer}) {
    const Verdict verdict = replicas_of(SmallTraining{.level = level});
    CHECK_MESSAGE(verdict.outcome == Outcome::identical, dump(verdict));
    CHECK(headline(verdict).starts_with("identical between replicas: "));
    CHECK(verdict.coverage.ranks_compared == 4);
    CHECK(verdict.coverage.steps_compared == 4);
    CHECK(verdict.coverage.frames_verified > 0);
  }
}

TEST_CASE("a rank that keeps its own gradient is named, at the collective, as missing sync") {
  const Verdict verdict = replicas_of(SmallTraining{.hook = keep_own_gradient(2, 3, layer_name(1))});
  CHECK(verdict.outcome == Outcome::diverged);
  CHECK_MESSAGE(is_at(first_of(verdict), 2, 3, Phase::collective, layer_name(1), "weight.grad"), dump(verdict));
  CHECK(verdict.cause.cls == "missing_sync");
  CHECK(verdict.cause.class_candidates.empty());
  CHECK(holds(verdict.cause.evidence, "rank 3 still holds its own input"));
  CHECK(holds(verdict.cause.evidence, "3 of 4 ranks hold the same, rank 3 does not"));
  CHECK(verdict.ranks_diverged == std::vector<int>{3});
  CHECK(verdict.propagated > 0);
}

TEST_CASE("without recorded collectives the parameters show it, one step after which they were alike") {
  const Verdict verdict =
      replicas_of(SmallTraining{.collectives = false, .hook = keep_own_gradient(2, 1, layer_name(0))});
  CHECK(verdict.outcome == Outcome::diverged);
  CHECK_MESSAGE(first_of(verdict).step == 2, dump(verdict));
  CHECK(first_of(verdict).rank == 1);
  CHECK(first_of(verdict).layer == layer_name(0));
  CHECK(verdict.cause.cls == "missing_sync");
}

TEST_CASE("what is sent around ahead of a step is held against the other ranks as well") {
  for (const bool wrong : {false, true}) {
    RunBuilder run(2);
    for (int rank = 0; rank < 2; ++rank) {
      RankBuilder& at = run.rank(rank);
      for (uint64_t step = 0; step < 3; ++step) {
        at.step(static_cast<int64_t>(step)).flags(kRecordAhead).collective("broadcast", "", "world", {0, 1});
        at.output("output", value(wrong && step == 1 && rank == 1 ? 900 : 500 + step));
        at.flags(0).at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(600 + step));
      }
    }
    const Verdict v = replicas_of(run);
    INFO(dump(v));
    CHECK(v.outcome == (wrong ? Outcome::diverged : Outcome::identical));
    if (wrong) CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "output"));  // of two nobody is in the majority
  }
}

TEST_CASE("a parameter that changes after a good update is no missing sync") {
  const Verdict verdict = replicas_of(SmallTraining{.hook = fault({.step = 1,
                                                                   .rank = 2,
                                                                   .phase = Phase::optimizer,
                                                                   .layer = layer_name(0),
                                                                   .tensor = "weight",
                                                                   .form = Content::bit_flipped})});
  CHECK_MESSAGE(is_at(first_of(verdict), 1, 2, Phase::optimizer, layer_name(0), "weight"), dump(verdict));
  CHECK(verdict.cause.cls == "hardware_or_sporadic");
  CHECK(first_of(verdict).pointing.has_value());
}

TEST_CASE("a weight that a layer took with other values on one rank was written to before the update, not by it") {
  for (const int written : {0, 1, 2}) {  // 2: and the step before was not recorded
    RunBuilder run(3, Level::layer);
    for (int rank = 0; rank < 3; ++rank) {
      RankBuilder& at = run.rank(rank);
      for (uint64_t step = 0; step < 3; ++step) {
        if (written == 2 && step == 1) continue;
        const bool other = step == 2 && rank == 1;
        at.step(static_cast<int64_t>(step)).at(Phase::forward, "fc");
        at.add(Role::input, "weight", value(other && written ? 900 : step == 0 ? 1 : 600 + step - 1));
        at.at(Phase::optimizer, "fc").add(Role::gradient, "weight.grad", value(300 + step));
        at.add(Role::parameter, "weight", value(other ? 901 : 600 + step));
      }
    }
    const Verdict v = replicas_of(run);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(is_at(first_of(v), 2, 1, Phase::optimizer, "fc", "weight"));
    CHECK(v.cause.cls == (written == 0 ? "nondeterministic_op" : written == 1 ? "overwritten_input" : "unknown"));
    if (written == 1) CHECK(holds(v.cause.evidence, "they were the same at the end of the step before"));
  }
}

TEST_CASE("a gradient that differs behind reductions of buckets that left the same is no missing sync for certain") {
  for (const bool recorded : {false, true}) {
    RunBuilder run(3, Level::layer);
    for (int rank = 0; rank < 3; ++rank) {
      RankBuilder& at = run.rank(rank);
      for (uint64_t step = 0; step < 3; ++step) {
        at.step(static_cast<int64_t>(step));
        if (recorded) at.collective("all_reduce", "", "world", {0, 1, 2}).output("output", value(200 + step));
        at.at(Phase::optimizer, "fc")
            .add(Role::gradient, "weight.grad", value(step == 2 && rank == 1 ? 900 : 300 + step));
        at.add(Role::parameter, "weight", value(step == 2 && rank == 1 ? 901 : 600 + step));
      }
    }
    const Verdict v = replicas_of(run);
    INFO(dump(v));
    CHECK(is_at(first_of(v), 2, 1, Phase::optimizer, "fc", "weight.grad"));
    CHECK(v.cause.cls == (recorded ? "unknown" : "missing_sync"));
    const auto& classes = v.cause.class_candidates;
    CHECK(std::count(classes.begin(), classes.end(), "overwritten_input") == 1);
    CHECK(std::count(classes.begin(), classes.end(), "missing_sync") == 1);
  }
}

TEST_CASE("another learning rate on one rank is a hyperparameter") {
  const Verdict verdict =
      replicas_of(SmallTraining{.hook = fault({.step = 2, .rank = 1, .phase = Phase::optimizer, .tensor = "lr"})});
  CHECK_MESSAGE(first_of(verdict).step == 2, dump(verdict));
  CHECK(verdict.cause.cls == "hyperparameter");
}

TEST_CASE("ranks that began apart are an initial state, unless the first step finds them alike") {
  const Hook apart = [](const Moment& moment, Content* content) {
    if (moment.step == kPrologueStep && moment.rank == 1 && moment.tensor == "weight") content->id += 77;
  };
  const Verdict verdict = replicas_of(SmallTraining{.hook = apart});
  CHECK(verdict.outcome == Outcome::diverged);
  CHECK(first_of(verdict).in_prologue);
  CHECK(verdict.cause.cls == "initial_state");

  const PlacedRun run(data_parallel(2));  // as DDP does it: sent from rank 0 before the first step
  const Verdict sent = run.compare({{"fc", "weight", Role::parameter, [](int rank, int64_t step) {
                                       return value(seed_of(step, step < 0 ? rank : 0));
                                     }}});
  CHECK_MESSAGE(sent.outcome == Outcome::identical, dump(sent));
  CHECK(holds(sent.coverage.limits, "not alike when loaded"));
}

TEST_CASE("pipeline stages hold other layers under the same names and are not compared") {
  const std::vector<PlacedRun::Facts> facts = {{{"pp_rank", "0"}, {"dp_rank", "0"}},
                                               {{"pp_rank", "1"}, {"dp_rank", "0"}},
                                               {{"pp_rank", "0"}, {"dp_rank", "1"}},
                                               {{"pp_rank", "1"}, {"dp_rank", "1"}}};
  const auto weight = [](int fault_rank) {
    return [=](int rank, int64_t step) {
      return value(seed_of(step, rank % 2 + (rank == fault_rank && step == 2 ? 5 : 0)));
    };
  };
  const Verdict good = PlacedRun(facts).compare({{"layers.0", "weight", Role::parameter, weight(-1)}});
  CHECK_MESSAGE(good.outcome == Outcome::identical, dump(good));
  CHECK(holds(good.coverage.limits, "pp_rank"));
  const Verdict bad = PlacedRun(facts).compare({{"layers.0", "weight", Role::parameter, weight(3)}});
  CHECK(bad.outcome == Outcome::diverged);
  CHECK(first_of(bad).step == 2);
  CHECK((bad.ranks_diverged == std::vector<int>{1, 3}));
}

TEST_CASE(
    "a norm's weight is on every tensor-parallel rank; what is cut is compared within the data-parallel ranks only") {
  const auto cut = [](int rank, int64_t step) { return value(seed_of(step, rank % 2)); };
  const auto norm = [](bool drifts) {
    return [=](int rank, int64_t step) { return value(seed_of(step, drifts && step >= 0 ? 6 + rank % 2 : 6), {{32}}); };
  };
  const PlacedRun run(tensor_parallel());
  const Verdict good =
      run.compare({{"fc", "weight", Role::parameter, cut}, {"final_norm", "weight", Role::parameter, norm(false)}});
  CHECK_MESSAGE(good.outcome == Outcome::identical, dump(good));
  const Verdict bad = run.compare(
      {{"fc", "weight", Role::parameter, cut}, {"final_norm", "weight", Role::parameter, norm(true)}}, 3, false);
  CHECK(bad.outcome == Outcome::diverged);
  CHECK_MESSAGE(first_of(bad).layer == "final_norm", dump(bad));
  CHECK(first_of(bad).step == 0);
  CHECK(bad.cause.cls == "missing_sync");
}

TEST_CASE("shards are replicas where their boxes are the same") {
  const auto box = [](int fault_rank) {
    return [=](int rank, int64_t step) {
      return shard(seed_of(step, rank == fault_rank && step == 1 ? 9 : 0), {8, 4}, {rank % 2 * 4, 0}, {4, 4});
    };
  };
  const PlacedRun run(std::vector<PlacedRun::Facts>(4));
  const Verdict good = run.compare({{"fc", "weight", Role::parameter, box(-1)}});
  CHECK(good.outcome == Outcome::identical);
  const Verdict bad = run.compare({{"fc", "weight", Role::parameter, box(2)}});
  CHECK(bad.outcome == Outcome::diverged);
  CHECK_MESSAGE((bad.ranks_diverged == std::vector<int>{0, 2}), dump(bad));
}

TEST_CASE("values that were never alike on ranks of which nothing is known are incomparable, never a desync") {
  const PlacedRun run(std::vector<PlacedRun::Facts>(2));
  const auto own = [](int rank, int64_t step) { return value(seed_of(step, rank)); };
  const auto zero_first = [](int rank, int64_t step) { return step < 0 ? zeros() : value(seed_of(step, rank)); };
  const Verdict verdict =
      run.compare({{"fc", "weight", Role::parameter, own}, {"fc", "bias", Role::parameter, zero_first}});
  CHECK(verdict.outcome == Outcome::incomparable);
  CHECK_MESSAGE(verdict.reason.find("dp_rank") != std::string::npos, dump(verdict));

  const auto shared = [](int, int64_t step) { return value(seed_of(step, 8)); };
  const auto expert = [](int rank, int64_t step) {
    return value(step < 0 ? 1 : seed_of(step, rank));
  };  // begun with one seed
  const Verdict experts = run.compare(
      {{"norm", "weight", Role::parameter, shared}, {"mlp.experts.0.fc1", "weight", Role::parameter, expert}});
  CHECK_MESSAGE(experts.outcome == Outcome::incomparable, dump(experts));
  CHECK(experts.reason.find("expert") != std::string::npos);
}

TEST_CASE("what one data-parallel coordinate says is not believed where nothing was ever alike") {
  const auto own = [](int rank, int64_t step) { return value(seed_of(step, rank)); };
  const Verdict verdict = PlacedRun(data_parallel(2)).compare({{"flat", "weight", Role::parameter, own}});
  CHECK_MESSAGE(verdict.outcome == Outcome::incomparable, dump(verdict));
}

TEST_CASE("a sharded optimizer's own state is not taken for a desync") {
  const auto shared = [](int, int64_t step) { return value(seed_of(step, 8)); };
  const auto own = [](int rank, int64_t step) { return step < 0 ? zeros() : value(seed_of(step, rank)); };
  const Verdict verdict =
      PlacedRun(data_parallel(2))
          .compare({{"fc", "weight", Role::parameter, shared}, {"fc", "weight.exp_avg", Role::optimizer_state, own}});
  CHECK_MESSAGE(verdict.outcome == Outcome::identical, dump(verdict));
  CHECK(holds(verdict.coverage.limits, "sharded optimizer"));
}

TEST_CASE("a parameter that only some ranks hold is compared among those") {
  const auto some = [](int fault_rank) {
    return [=](int rank, int64_t step) {
      if (rank == 1) return Value{};
      return value(seed_of(step, rank == fault_rank && step == 1 ? 3 : 0));
    };
  };
  const auto frozen = [](int, int64_t) { return value(4); };
  const PlacedRun run(data_parallel(4));
  const Verdict good =
      run.compare({{"a", "weight", Role::parameter, some(-1)}, {"b", "weight", Role::parameter, frozen}});
  CHECK(good.outcome == Outcome::identical);
  const Verdict bad =
      run.compare({{"a", "weight", Role::parameter, some(3)}, {"b", "weight", Role::parameter, frozen}});
  CHECK_MESSAGE(first_of(bad).rank == 3, dump(bad));
  CHECK(first_of(bad).layer == "a");
}

TEST_CASE("replicas that differ in the sign of a zero are not equal, and it is said") {
  const Value zero = zeros();
  Value negative = zero;
  std::vector<float> data(32, 0.0f);
  data[3] = -0.0f;
  negative.digest = digest_bytes(data.data(), data.size() * 4, DType::f32).digest;
  const auto weight = [](int, int64_t step) { return value(seed_of(step)); };
  const auto bias = [&](int rank, int64_t step) { return rank == 1 && step == 2 ? negative : zero; };
  const Verdict verdict =
      PlacedRun(data_parallel(3))
          .compare({{"fc", "weight", Role::parameter, weight}, {"fc", "bias", Role::parameter, bias}});
  CHECK(verdict.outcome == Outcome::diverged);
  CHECK_MESSAGE(holds(verdict.cause.evidence, "only signs of zeros differ"), dump(verdict));
}

TEST_CASE("a missing rank, a cut step and a Gap forbid the word identical, and hide no desync before them") {
  SmallTraining training;
  RunBuilder missing(4), cut(4), gap(4), hidden(4);
  for (RunBuilder* run : {&missing, &cut, &gap}) plant(run, training);
  missing.leave_out(3);
  cut.rank(1).die();
  gap.rank(2).gap(1, 1, "ring full for 10000 ms");
  CHECK(replicas_of(missing).reason.find("rank 3 is missing") != std::string::npos);
  for (const RunBuilder* run : {&missing, &cut, &gap}) CHECK(replicas_of(*run).outcome == Outcome::incomparable);
  CHECK(replicas_of(gap).reason.find("ring full") != std::string::npos);
  training.hook = keep_own_gradient(1, 0, layer_name(2));
  plant(&hidden, training);
  hidden.leave_out(3);
  CHECK(replicas_of(hidden).outcome == Outcome::diverged);
}

TEST_CASE("a run of one rank has no replica") {
  CHECK(replicas_of(SmallTraining{.ranks = 1}).outcome == Outcome::incomparable);
}

TEST_CASE("--steps and --ranks narrow what is compared") {
  const SmallTraining training{.hook = keep_own_gradient(2, 3, layer_name(1))};
  DiffOptions early, others;
  early.last_step = 1, others.ranks = {0, 1, 2};
  CHECK(replicas_of(training, early).outcome == Outcome::identical);
  const Verdict verdict = replicas_of(training, others);  // they share the reduced gradient
  CHECK_MESSAGE(verdict.outcome == Outcome::identical, dump(verdict));
}

TEST_CASE("a recompute mismatch is a finding of its own") {
  RunBuilder run(2);
  for (int rank = 0; rank < 2; ++rank) {
    run.rank(rank).prologue().add(Role::parameter, "weight", value(1));
    for (int64_t step = 0; step < 4; ++step) {
      RankBuilder& builder = run.rank(rank).step(step);
      const auto own = [&](int of) { return seed_of(step, of + rank); };
      builder.forward("blocks.2.dropout").input("input", value(own(0))).output("output", value(own(2)));
      builder.flags(kRecordRecompute).forward("blocks.2.dropout").input("input", value(own(0)));
      builder.output("output", value(step == 3 && rank == 0 ? 5 : own(2))).flags(0);
      builder.at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(seed_of(step, 7)));
    }
  }
  const Verdict verdict = replicas_of(run);
  CHECK(headline(verdict) == "recompute mismatch at step 3, rank 0, forward, blocks.2.dropout: output");
  CHECK(verdict.outcome == Outcome::diverged);
  CHECK(verdict.cause.cls == "rng_state");
}

TEST_CASE("where names are masked, running statistics are not taken for replicas, and the verdict says so") {
  PlacedRun run(data_parallel(2));
  run.masked = true;
  const auto alike = [](int, int64_t step) { return value(seed_of(step)); };
  const auto of_each = [](int rank, int64_t step) { return value(seed_of(step, step == kPrologueStep ? 0 : rank)); };
  const Verdict verdict =
      run.compare({{"~01", "~0a", Role::parameter, alike}, {"~02", "~0b", Role::other, of_each}});
  CHECK_MESSAGE(verdict.outcome == Outcome::identical, dump(verdict));
  CHECK(std::any_of(verdict.coverage.limits.begin(), verdict.coverage.limits.end(),
                    [](const std::string& text) { return text.starts_with("names are masked"); }));
}

TEST_CASE("where names are masked, what was never alike may be an expert's or a sharded optimizer's, and is not judged") {
  PlacedRun run(data_parallel(2));
  run.masked = true;
  const auto alike = [](int, int64_t step) { return value(seed_of(step)); };
  const auto of_each = [](int rank, int64_t step) { return value(seed_of(step, 1 + rank)); };
  const auto lost = [](int rank, int64_t step) { return value(seed_of(step, step == 2 ? rank : 0)); };
  const Verdict never = run.compare({{"~01", "~0a", Role::parameter, alike}, {"~02", "~0b", Role::parameter, of_each}});
  CHECK_MESSAGE(never.outcome == Outcome::incomparable, dump(never));
  CHECK_MESSAGE(never.reason.find("names are masked") != std::string::npos, dump(never));
  const Verdict once = run.compare({{"~01", "~0a", Role::parameter, alike}, {"~02", "~0b", Role::parameter, lost}});
  CHECK_MESSAGE(once.outcome == Outcome::diverged, dump(once));
}

}  // namespace forkpoint
