// References of forkpoint check: what is in them, what they refuse to be, and what a comparison with one may say.
#include "lib/reference.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "lib/error.h"
#include "tests/support/run_builder.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

// What differs from the same training: the values of one rank from that step on.
struct Change {
  int64_t step = -1;
  int rank = 1;
  std::string what;  // batch | dropout | lr | loss | grad | weight | exp_avg
};

constexpr int64_t kLast = 3;

RunBuilder training(const Change& change = {}) {
  RunBuilder run(2, Level::step);
  run.step_base("step(n)");
  run.manifest().versions = {{"torch", "2.11"}, {"kernel", "6.1"}};
  run.manifest().environment = {{"CUDA_HOME", "/a"}};
  for (int rank = 0; rank < 2; ++rank) {
    RankBuilder& builder = run.rank(rank);
    builder.prologue().at(Phase::load, "fc").add(Role::parameter, "weight", value(1));
    for (int64_t step = 0; step <= kLast; ++step) {
      const auto seed = [&](const std::string& what, uint64_t base) {
        return base + 10 * static_cast<uint64_t>(step) +
               (change.what == what && rank == change.rank && step == change.step ? 5000 : 0);
      };
      const uint64_t own = 1000 * static_cast<uint64_t>(rank);
      builder.step(step).at(Phase::data).add(Role::batch, "tokens", value(seed("batch", own + 100)));
      builder.at(Phase::forward, "drop").state("dropout", Role::rng, seed("dropout", own + 200));
      builder.at(Phase::forward, "loss").scalar("loss", 1.0 / static_cast<double>(seed("loss", own + 3)), Role::loss);
      builder.at(Phase::backward, "fc").add(Role::gradient, "weight.grad", value(seed("grad", own + 300)));
      builder.at(Phase::optimizer, "fc").scalar("lr", 0.1 + (seed("lr", 0) >= 5000 ? 1 : 0));
      builder.add(Role::optimizer_state, "weight.exp_avg", value(seed("exp_avg", 400)));
      builder.add(Role::parameter, "weight", value(seed("weight", 500)));
    }
  }
  return run;
}

MeasuredRun measured(const RunBuilder& run) {
  const TemporaryFolder folder;
  return measure_run(Run::open(run.write(folder / "run")), 0, kLast);
}

ReferenceComparison compared(const RunBuilder& reference, const RunBuilder& run, const std::string& trouble = "") {
  const MeasuredRun good = measured(reference);
  CHECK(good.lost.empty());
  return compare_reference(parse_reference("REF", reference_text(good.reference)), measured(run), trouble);
}

const GroupVerdict& group(const ReferenceComparison& comparison, const std::string& name) {
  const auto found =
      std::find_if(comparison.groups.begin(), comparison.groups.end(), [&](const auto& g) { return g.group == name; });
  REQUIRE(found != comparison.groups.end());
  return *found;
}

bool refused(const std::string& text) {
  try {
    parse_reference("REF", text);
    return false;
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("REF") == 0);
    CHECK_FALSE(error.hint().empty());
    return true;
  }
}

}  // namespace

TEST_CASE("the same training is identical, and every group that was recorded is the same") {
  const ReferenceComparison same = compared(training(), training());
  CHECK(same.verdict.outcome == Outcome::identical);
  CHECK(headline(same.verdict) == "identical: 58 records in 4 steps on 2 ranks agree (level step)");
  CHECK(same.tensors_compared == 4);
  for (const GroupVerdict& found : same.groups) {
    CHECK(found.group != kRestingGroup);  // it has none
    const bool none = found.group == "collectives" || found.group == "other";
    CHECK_MESSAGE((found.state == (none ? GroupState::absent : GroupState::same)), found.group);
  }
}

TEST_CASE("what a job that ends by itself leaves behind its last step is no second step of that number") {
  RunBuilder run = training();
  for (int rank = 0; rank < 2; ++rank) {
    run.rank(rank).step(kLast).at(Phase::state, "kept").flags(kRecordEval).add(Role::parameter, "weight", value(9));
  }
  const MeasuredRun found = measured(run);
  INFO(found.lost.size() << (found.lost.empty() ? "" : found.lost[0]));
  CHECK(found.lost.empty());
  const Verdict verdict = compared(training(), run).verdict;
  CHECK(verdict.outcome == Outcome::identical);
  CHECK(std::ranges::count(verdict.coverage.limits,
                           "what the job left behind its last step: references end with that") == 1);
}

TEST_CASE("one value that differs in any group, in any step, is found at its step and rank") {
  const std::pair<const char*, const char*> groups[] = {
      {"batch", "data"},         {"dropout", "generators"},      {"loss", "loss"},        {"grad", "gradients"},
      {"lr", "hyperparameters"}, {"exp_avg", "optimizer state"}, {"weight", "parameters"}};
  for (const auto& [what, name] : groups) {
    for (const int64_t step : {int64_t{0}, int64_t{2}}) {
      CAPTURE(what);
      const ReferenceComparison found = compared(training(), training({step, 1, what}));
      CHECK(found.verdict.outcome == Outcome::diverged);
      REQUIRE(found.verdict.first);
      CHECK(found.verdict.first->step == step);
      CHECK(found.verdict.first->rank == 1);
      CHECK(found.verdict.first->tensor == name);
      CHECK(found.verdict.ranks_diverged == std::vector<int>{1});
      CHECK(group(found, name).state == GroupState::differs);
      const auto differing = std::count_if(found.groups.begin(), found.groups.end(),
                                           [](const auto& g) { return g.state == GroupState::differs; });
      CHECK(differing == 1);
    }
  }
}

TEST_CASE("an average of the weights is compared as the last step left it, where both sides hold it") {
  const auto with_average = [](uint64_t seed) {
    RunBuilder run = training();
    if (seed == 0) return run;
    for (int rank = 0; rank < 2; ++rank) {
      run.rank(rank)
          .at(Phase::optimizer, "kept.Net")
          .flags(kRecordEval)
          .add(Role::parameter, "weight", value(rank == 1 ? seed : 70));
    }
    return run;
  };
  CHECK(compared(with_average(70), with_average(70)).verdict.outcome == Outcome::identical);
  CHECK(group(compared(with_average(70), with_average(70)), kRestingGroup).state == GroupState::same);
  CHECK(compared(with_average(70), with_average(0)).verdict.outcome == Outcome::identical);
  CHECK(compared(with_average(0), with_average(70)).verdict.outcome == Outcome::identical);
  const Verdict v = compared(with_average(70), with_average(71)).verdict;
  CHECK(v.outcome == Outcome::diverged);
  REQUIRE(v.first);
  CHECK(v.first->step == kLast);
  CHECK(v.first->rank == 1);
  CHECK(v.first->layer == "kept.Net");
}

TEST_CASE("in the last step the tensor is named, with both digests") {
  for (const auto& [what, tensor] : {std::pair("weight", "weight"), std::pair("exp_avg", "weight.exp_avg")}) {
    const ReferenceComparison found = compared(training(), training({kLast, 0, what}));
    REQUIRE(found.verdict.first);
    CHECK(headline(found.verdict) == std::string("diverged at step 3, rank 0, optimizer, fc: ") + tensor);
    CHECK(found.verdict.first->before.size() == 32);
    CHECK(found.verdict.first->before != found.verdict.first->after);
    REQUIRE(found.tensors.size() == 1);
    CHECK(found.tensors[0].find("rank 0") != std::string::npos);
  }
}

TEST_CASE("what only came in by a collective is not named before the rank whose own values differ") {
  RunBuilder reference = training(), run = training({2, 1, "grad"});
  for (RunBuilder* builder : {&reference, &run}) {
    for (int rank = 0; rank < 2; ++rank) {
      builder->rank(rank)
          .step(4)
          .collective("all_reduce", "fc", "world", {0, 1})
          .output("weight.grad", value(builder == &run ? 8 : 7));
      if (builder == &run && rank == 1)
        builder->rank(rank).at(Phase::backward, "fc").add(Role::gradient, "x.grad", value(12));
      else
        builder->rank(rank).at(Phase::backward, "fc").add(Role::gradient, "x.grad", value(11));
    }
  }
  const TemporaryFolder folder;
  const MeasuredRun a = measure_run(Run::open(reference.write(folder / "a")), 4, 4),
                    b = measure_run(Run::open(run.write(folder / "b")), 4, 4);
  const ReferenceComparison found = compare_reference(a.reference, b, "");
  REQUIRE(found.verdict.first);
  CHECK(headline(found.verdict) == "diverged at step 4, rank 1, gradients");
  CHECK(found.verdict.also_first.empty());
  CHECK(found.verdict.ranks_diverged == std::vector<int>{0, 1});
}

TEST_CASE("values of two ranks that differ by themselves in one step are both firsts") {
  RunBuilder reference = training(), run = training();
  for (RunBuilder* builder : {&reference, &run}) {
    const bool other = builder == &run;
    for (int rank = 0; rank < 2; ++rank) {
      builder->rank(rank).step(4).at(Phase::forward, "loss").scalar("loss", other && rank == 0 ? 2 : 1, Role::loss);
      builder->rank(rank).at(Phase::backward, "fc").add(Role::gradient, "x.grad", value(other && rank == 1 ? 12 : 11));
      builder->rank(rank).at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(other ? 14 : 13));
    }
  }
  const TemporaryFolder folder;
  const MeasuredRun a = measure_run(Run::open(reference.write(folder / "a")), 4, 4),
                    b = measure_run(Run::open(run.write(folder / "b")), 4, 4);
  const ReferenceComparison found = compare_reference(a.reference, b, "");
  CHECK(headline(found.verdict) == "diverged at step 4, rank 0, loss");
  CHECK(found.verdict.first->before == "1");
  CHECK(found.verdict.first->after == "2");
  REQUIRE(found.verdict.also_first.size() == 1);
  CHECK(found.verdict.also_first[0].rank == 1);
  CHECK(found.verdict.also_first[0].tensor == "gradients");
}

TEST_CASE("other records are no other values: incomparable, and no group is clean that was not compared") {
  RunBuilder fewer = training();
  fewer.drop(2, "lr");
  const ReferenceComparison found = compared(training(), fewer);
  CHECK(found.verdict.outcome == Outcome::incomparable);
  CHECK(found.verdict.reason.find("step 2 holds other records") != std::string::npos);
  CHECK(group(found, "hyperparameters").state == GroupState::differs);
  // Both at once: the value is what counts, and the other is said.
  RunBuilder both = training({3, 1, "loss"});
  both.drop(2, "lr");
  const ReferenceComparison diverged = compared(training(), both);
  CHECK(diverged.verdict.outcome == Outcome::diverged);
  CHECK(diverged.verdict.first->step == 3);
  REQUIRE(diverged.verdict.notes.size() == 1);
  CHECK(diverged.verdict.notes[0].find("from step 2 on other records") != std::string::npos);
}

TEST_CASE("a run that lost something is never identical; what differs in its whole steps is still a difference") {
  const auto check_incomparable = [](const RunBuilder& run, const std::string& trouble = "") {
    const ReferenceComparison found = compared(training(), run, trouble);
    CHECK(found.verdict.outcome == Outcome::incomparable);
    CHECK(found.verdict.reason.find("other records") == std::string::npos);  // what was lost is no other record
    for (const GroupVerdict& of : found.groups) CHECK_MESSAGE(of.state != GroupState::same, of.group);
  };
  RunBuilder gap = training();
  gap.rank(1).gap(1, 1, "ring full");
  check_incomparable(gap);
  RunBuilder nowhere = training();
  nowhere.rank(0).gap(kPrologueStep, kPrologueStep, "ring full");
  check_incomparable(nowhere);
  RunBuilder missing = training();
  missing.leave_out(1);
  check_incomparable(missing);
  RunBuilder dead = training();
  dead.rank(0).die();
  check_incomparable(dead);
  RunBuilder shorter = training();
  shorter.keep_steps({0, 1, 2});
  check_incomparable(shorter);
  check_incomparable(training(), "the command was killed by signal 9");
  RunBuilder limit = training();
  limit.rank(0).limit("graphs captured before recording began");
  check_incomparable(limit);

  RunBuilder both = training({2, 1, "grad"});
  both.rank(1).gap(1, 1, "ring full");
  const ReferenceComparison found = compared(training(), both);
  CHECK(found.verdict.outcome == Outcome::diverged);
  CHECK(found.verdict.first->step == 2);
  CHECK(found.verdict.gaps.size() >= 1);
  // In the step with the Gap nothing is a difference.
  RunBuilder within = training({1, 1, "grad"});
  within.rank(1).gap(1, 1, "ring full");
  CHECK(compared(training(), within).verdict.outcome == Outcome::incomparable);
}

TEST_CASE(
    "where digests differ and something they depend on does too, nothing is said to have diverged; equal ones are "
    "equal") {
  RunBuilder other = training(), faulty = training({2, 1, "grad"});
  for (RunBuilder* run : {&other, &faulty}) run->manifest().versions["torch"] = "2.12";
  const ReferenceComparison equal = compared(training(), other);
  CHECK(equal.verdict.outcome == Outcome::identical);
  CHECK(headline(equal.verdict).find("although torch is 2.11 in the reference, 2.12 here") != std::string::npos);
  const ReferenceComparison differs = compared(training(), faulty);
  CHECK(differs.verdict.outcome == Outcome::incomparable);
  CHECK(differs.verdict.reason.find("at step 2, rank 1, gradients, but torch is 2.11") != std::string::npos);
  // A kernel of the system or a folder changes no number.
  RunBuilder irrelevant = training({2, 1, "grad"});
  irrelevant.manifest().versions["kernel"] = "6.9";
  irrelevant.manifest().environment["CUDA_HOME"] = "/b";
  CHECK(compared(training(), irrelevant).verdict.outcome == Outcome::diverged);
  // Another variable that counts.
  irrelevant.manifest().environment["OMP_NUM_THREADS"] = "3";
  CHECK(compared(training(), irrelevant).verdict.outcome == Outcome::incomparable);
}

TEST_CASE("another level or world size is incomparable, and no group is compared") {
  const ReferenceComparison level = [] {
    RunBuilder run(2, Level::layer);
    run.step_base("step(n)");
    for (int rank = 0; rank < 2; ++rank) {
      for (int64_t step = 0; step <= kLast; ++step)
        run.rank(rank).step(step).forward("fc").scalar("loss", 1, Role::loss);
    }
    return compared(training(), run);
  }();
  CHECK(level.verdict.outcome == Outcome::incomparable);
  CHECK(level.verdict.reason.find("another level: step, here layer") != std::string::npos);
  for (const GroupVerdict& of : level.groups)
    CHECK_MESSAGE((of.state == GroupState::unknown || of.state == GroupState::absent), of.group);
}

TEST_CASE("a reference has an entry a line, which ranks that agree share") {
  const std::string text = reference_text(measured(training()).reference);
  const auto lines_with = [&](const std::string& what) {
    int lines = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, text.find('\n', at))) ++lines;
    return lines;
  };
  CHECK(lines_with("\"tensor\":\"weight\",\"ranks\":\"0, 1\"") == 1);
  CHECK(lines_with("\"step\":2,\"ranks\":\"0, 1\"") == 1);
  CHECK(lines_with("\"step\":2,\"ranks\":\"0\"") == 1);
  CHECK(lines_with("\"step\":2,\"ranks\":\"1\"") == 1);
  CHECK(lines_with("\"loss_value\":\"0.043478260869565216\"") == 1);  // 1 / (3 + 10 * 2)
  CHECK(text.back() == '\n');
  CHECK(text == reference_text(parse_reference("REF", text)));
  // Where a replica differs, it has a line of its own.
  const std::string apart = reference_text(measured(training({kLast, 1, "weight"})).reference);
  CHECK(apart.find("\"tensor\":\"weight\",\"ranks\":\"1\"") != std::string::npos);
}

TEST_CASE("an edited or damaged reference is refused, wherever it was; other line ends are not an edit") {
  const std::string text = reference_text(measured(training()).reference);
  for (size_t at = 0; at < text.size(); at += 5) {  // some of every field, over the entries
    std::string edited = text;
    edited[at] = static_cast<char>(edited[at] ^ 1);
    bool same = false;
    try {
      same = reference_text(parse_reference("REF", edited)) == text;
    } catch (const Error&) {
      continue;
    }
    CHECK_MESSAGE(same, "byte " << at << " of " << text.size());
  }
  for (size_t size = 0; size + 2 < text.size(); size += 97) CHECK_MESSAGE(refused(text.substr(0, size)), size);
  std::string windows;
  for (const char c : text) windows += c == '\n' ? std::string("\r\n") : std::string(1, c);
  CHECK_FALSE(refused(windows));
  CHECK(refused("<<<<<<< HEAD\n" + text));
  CHECK(refused("{}"));
  CHECK(refused("[]"));
}

TEST_CASE("a reference of another schema says which") {
  std::string text = reference_text(measured(training()).reference);
  text.replace(text.find("\"forkpoint_reference\": 2"), 24, "\"forkpoint_reference\": 1");
  try {
    parse_reference("REF", text);
    FAIL("it was accepted");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("schema 1; this forkpoint reads schema 2") != std::string::npos);
  }
}

TEST_CASE("a reference without a digest, a step or a rank cannot be: nothing would differ from it") {
  const Reference whole = measured(training()).reference;
  CHECK_FALSE(refused(reference_text(whole)));
  Reference none = whole;
  none.steps.clear(), none.tensors.clear();
  CHECK(refused(reference_text(none)));
  Reference no_step = whole;
  no_step.steps.erase({2, 1});
  CHECK(refused(reference_text(no_step)));
  Reference no_rank = whole;
  std::erase_if(no_rank.steps, [](const auto& entry) { return entry.first.second == 1; });
  CHECK(refused(reference_text(no_rank)));
  Reference no_sum = whole;
  no_sum.steps[{2, 1}].erase(kReferenceAll);
  CHECK(refused(reference_text(no_sum)));
  Reference no_record = whole;
  for (auto& [place, fields] : no_record.steps) fields[kReferenceAll] = "0 00000000000000000000000000000000";
  CHECK(refused(reference_text(no_record)));
  RunBuilder empty(1, Level::step);
  for (int64_t step = 0; step <= kLast; ++step) empty.rank(0).step(step);
  CHECK(measured(empty).lost.size() >= 1);
}

TEST_CASE("what a new reference changes is said: steps, tensors and what they depend on") {
  const Reference before = measured(training()).reference;
  CHECK(changes_of_reference(before, before).empty());
  RunBuilder run = training({kLast, 1, "weight"});
  run.manifest().versions["torch"] = "2.12";
  const std::vector<std::string> changes = changes_of_reference(before, measured(run).reference);
  REQUIRE(changes.size() == 3);
  CHECK(changes[0] == "torch is 2.11 in the reference, 2.12 now");
  CHECK(changes[1] == "1 of 5 steps differ, from step 3 on: parameters");
  CHECK(changes[2] == "1 of 1 tensors of parameters differ: fc: weight");
}
