// From facts to a cause class, without runs.
#include <doctest/doctest.h>

#include <algorithm>

#include "lib/cause.h"

using namespace forkpoint;

namespace {

bool holds(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

CauseFacts facts_of(Phase phase, Role role, const std::string& layer, const std::string& tensor) {
  CauseFacts facts;
  facts.site.phase = phase, facts.site.role = role, facts.site.layer = layer, facts.site.tensor = tensor;
  facts.first.step = 7, facts.first.rank = 2;
  facts.first.phase = phase, facts.first.layer = layer, facts.first.tensor = tensor;
  facts.layout_a.dtype = facts.layout_b.dtype = DType::f32;
  facts.layout_a.shape = facts.layout_b.shape = {4, 8};
  facts.digest_a = {1, 2}, facts.digest_b = {3, 4};
  facts.stats_a = {1, 0, 5}, facts.stats_b = {1.5, 0, 6};
  facts.world_size = 4;
  facts.run_b = "runs/bad";
  facts.command = "train --seed 1";
  return facts;
}

CauseFacts op_facts() {
  CauseFacts facts = facts_of(Phase::forward, Role::output, "blocks.3.fc", "output");
  facts.inputs_agree = {"input", "weight"};
  facts.agreeing_ranks = {0, 1, 3};
  return facts;
}

}  // namespace

TEST_CASE("an op whose inputs agree is nondeterministic, and what remains is said") {
  const Cause cause = decide_cause(op_facts());
  CHECK(cause.cls == "nondeterministic_op");
  for (const char* cls :
       {"unordered_accumulation", "algorithm_choice", "precision_or_formula", "hardware_or_sporadic"}) {
    CHECK(holds(cause.class_candidates, cls));
  }
  CHECK(holds(cause.evidence, "this record agrees on ranks 0, 1, 3"));
  CHECK(cause.next == "forkpoint show runs/bad --steps 7:7 --ranks 2 --layer 'blocks.3.fc'");
}

TEST_CASE("one flipped bit on one rank moves the hardware up, and never convicts it") {
  CauseFacts facts = op_facts();
  facts.pointing = Pointing{17, {2, 1}, 1 << 20, 20, 1};
  const Cause cause = decide_cause(facts);
  CHECK(cause.cls == "nondeterministic_op");
  CHECK(cause.class_candidates.at(0) == "hardware_or_sporadic");
  CHECK(cause.class_candidates.size() >= 4);
  CHECK(holds(cause.evidence, "consistent with a flipped bit"));
}

TEST_CASE("what differs on all ranks at once is not the hardware") {
  CauseFacts facts = op_facts();
  facts.everyone = true;
  facts.pointing = Pointing{17, {2, 1}, 1 << 20, 20, 1};
  CHECK_FALSE(holds(decide_cause(facts).class_candidates, "hardware_or_sporadic"));
}

TEST_CASE("a value that repeats the step before is a captured constant or a stale buffer") {
  CauseFacts facts = op_facts();
  facts.stale_b = true;
  const Cause cause = decide_cause(facts);
  CHECK(cause.class_candidates.at(0) == "rng_state");
  CHECK(holds(cause.class_candidates, "stream_race"));
}

TEST_CASE("a random op keeps its generator among the candidates") {
  CauseFacts facts = op_facts();
  facts.site.op = "native_dropout";
  CHECK(decide_cause(facts).class_candidates.at(0) == "rng_state");
}

TEST_CASE("what gives its input on in one run alone is switched off there, and no op that does not repeat") {
  CauseFacts facts = op_facts();
  facts.passed_on_a = facts.passed_on_b = true;
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
  facts.passed_on_a = false;
  CHECK(decide_cause(facts).cls == "unknown");
  CHECK(decide_cause(facts).class_candidates.at(0) == "structure");
  CHECK(holds(decide_cause(facts).class_candidates, "rng_state"));
  facts.site.layer = "blocks.3.drop";
  const Cause cause = decide_cause(facts);
  CHECK(cause.cls == "structure");
  CHECK(holds(cause.evidence, "in run B its output is its input"));
  facts.pointing = Pointing{17, {2, 1}, 1 << 20, 20, 1};  // one word in run A: that is no layer that was switched off
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
}

TEST_CASE("an input of which nobody saw what made it may be another formula's") {
  CauseFacts facts = facts_of(Phase::forward, Role::input, "fc2", "input");
  CHECK(holds(decide_cause(facts).class_candidates, "precision_or_formula"));
  facts.last_seen = "step 7, forward, fc1: output";
  CHECK_FALSE(holds(decide_cause(facts).class_candidates, "precision_or_formula"));
}

TEST_CASE("an input of another length may have been computed so, one of another type was not") {
  CauseFacts facts = facts_of(Phase::forward, Role::input, "expert", "input");
  facts.layout_differs = true;
  facts.layout_a.shape = {6, 16}, facts.layout_b.shape = {5, 16};
  CHECK(decide_cause(facts).cls == "unknown");
  CHECK(holds(decide_cause(facts).class_candidates, "nondeterministic_op"));
  CHECK(holds(decide_cause(facts).class_candidates, "structure"));
  facts.layout_b.shape = {6, 4, 4};
  CHECK(decide_cause(facts).cls == "structure");
}

TEST_CASE("an op whose inputs were not recorded is not called nondeterministic on that alone") {
  CauseFacts facts = op_facts();
  facts.inputs_agree.clear();
  CHECK(decide_cause(facts).cls == "unknown");
  CHECK(holds(decide_cause(facts).class_candidates, "stream_race"));
  facts.step_inputs_agree = true;
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
}

TEST_CASE("an op of which an input is in one run only is not called nondeterministic") {
  CauseFacts facts = op_facts();
  facts.inputs_one_sided = {"mask"};
  CHECK(decide_cause(facts).cls == "unknown");
}

TEST_CASE("an environment explains a difference that is everywhere and from the start, and no other") {
  CauseFacts facts = op_facts();
  facts.environment = {"NCCL_ALGO: Ring in run A, Tree in run B"};
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
  facts.everyone = true;
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
  facts.first_compared_step = true;
  CHECK(decide_cause(facts).cls == "environment");
}

TEST_CASE("equal sums of words are told, as consistent with another order") {
  CauseFacts facts = op_facts();
  facts.stats_b = facts.stats_a;
  const Cause cause = decide_cause(facts);
  CHECK(holds(cause.evidence, "consistent with the same values in another order"));
  CHECK(cause.cls == "nondeterministic_op");
}

TEST_CASE("a derived scalar is not a hyperparameter") {
  CauseFacts facts = facts_of(Phase::optimizer, Role::scalar, "", "grad_norm");
  facts.site.kind = Kind::scalar;
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
  facts.site.tensor = "max_norm";
  CHECK(decide_cause(facts).cls == "hyperparameter");
}

TEST_CASE("a scalar behind a load that both runs made is left open unless it is the first step") {
  CauseFacts facts = facts_of(Phase::optimizer, Role::scalar, "", "lr");
  facts.site.kind = Kind::scalar;
  facts.loaded = Loaded::by_both;
  CHECK(decide_cause(facts).cls == "hyperparameter");
  CHECK(decide_cause(facts).class_candidates.size() == 2);
  facts.first_compared_step = true;
  CHECK(decide_cause(facts).cls == "state_restore");
}

TEST_CASE("a generator that was right at the load was changed after it") {
  CauseFacts facts = facts_of(Phase::state, Role::rng, "", "cpu.rng");
  facts.loaded = Loaded::by_both, facts.first_compared_step = true;
  facts.equals_rank = "rank 0";
  CHECK(decide_cause(facts).cls == "state_restore");
  CHECK(holds(decide_cause(facts).evidence, "rank 0"));
  facts.rng_agreed_at_load = true;
  CHECK(decide_cause(facts).cls == "rng_state");
}

TEST_CASE(
    "replicas that drift apart in the update point to a missing synchronisation only where none was seen to work") {
  CauseFacts facts = facts_of(Phase::optimizer, Role::parameter, "norm", "weight");
  facts.gradients_recorded = true;
  facts.everyone = true;
  facts.replicas = 4, facts.replica_values_b = 4;
  CHECK(decide_cause(facts).cls == "missing_sync");
  facts.collectives_recorded = true;
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
  facts.collective_in_one_run = true;
  CHECK(decide_cause(facts).cls == "missing_sync");
}

TEST_CASE("what no gradient belongs to was not computed by the optimizer from the gradients that agree") {
  CauseFacts facts = facts_of(Phase::optimizer, Role::parameter, "teacher.fc", "bias");
  facts.gradients_recorded = true;
  CHECK(decide_cause(facts).cls == "nondeterministic_op");
  facts.rests = true;
  const Cause cause = decide_cause(facts);
  CHECK(cause.cls == "unknown");
  CHECK(holds(cause.class_candidates, "overwritten_input"));
  CHECK(holds(cause.class_candidates, "hyperparameter"));
  CHECK(holds(cause.evidence, "what wrote it (an average of the weights, a copy, a stray write) was not observed"));
}

TEST_CASE("an input that holds the value of another, equal tensor was overwritten or read too early") {
  CauseFacts facts = facts_of(Phase::backward, Role::input, "fc", "saved");
  facts.last_seen = "step 7, forward, fc: output";
  facts.equals_other = "step 7, forward, fc2: output";
  const Cause cause = decide_cause(facts);
  CHECK(cause.cls == "unknown");
  CHECK(cause.class_candidates == std::vector<std::string>{"overwritten_input", "stream_race"});
  CHECK(holds(cause.evidence, "fc2: output, which agrees in both runs"));
}

TEST_CASE("every cause names its next command, with the load's phase for what was loaded") {
  CauseFacts facts = facts_of(Phase::load, Role::optimizer_state, "fc", "weight.exp_avg");
  facts.first.in_prologue = true;
  facts.loaded = Loaded::by_one;
  facts.digest_b = {}, facts.stats_b = {};
  const Cause cause = decide_cause(facts);
  CHECK(cause.cls == "state_restore");
  CHECK(holds(cause.evidence, "run B is that of zeros"));
  CHECK(cause.next == "forkpoint show runs/bad --ranks 2 --layer 'fc' --phase load");
}
