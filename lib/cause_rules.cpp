#include "lib/cause_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "lib/diff_collective.h"
#include "lib/diff_step.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Classes = std::vector<std::string>;

bool name_holds(const std::string& text, std::string_view part) {
  const auto at = std::search(text.begin(), text.end(), part.begin(), part.end(), [](char left, char right) {
    return std::tolower(static_cast<unsigned char>(left)) == right;
  });
  return at != text.end();
}

bool is_random_op(const Site& site) { return name_holds(site.op, "drop") || name_holds(site.layer, "drop"); }

// Ops whose GPU kernels add or write with atomics.
bool is_atomic_op(const Site& site) {
  static constexpr std::array<std::string_view, 9> kNames = {"scatter", "index_add", "index_put", "cumsum", "histc",
                                                             "bincount", "embedding", "unpermute", "combine"};
  return std::any_of(kNames.begin(), kNames.end(), [&](std::string_view part) { return name_holds(site.op, part); });
}

void put_first(Classes* classes, const std::string& cls) {
  classes->erase(std::remove(classes->begin(), classes->end(), cls), classes->end());
  classes->insert(classes->begin(), cls);
}

void drop(Classes* classes, const std::string& cls) {
  classes->erase(std::remove(classes->begin(), classes->end(), cls), classes->end());
}

bool is_derived_scalar(const Site& site) {
  return site.role == Role::scalar && (name_holds(site.tensor, "norm") || name_holds(site.tensor, "loss") ||
                                       name_holds(site.tensor, "acc")) &&
         !name_holds(site.tensor, "scale") && !name_holds(site.tensor, "max_norm") && !name_holds(site.tensor, "clip");
}

std::string values(const CauseFacts& facts) {
  return facts.first.before.empty() ? ""
                                    : fmt::format(": {} in run A, {} in run B", facts.first.before, facts.first.after);
}

void decide_batch(const CauseFacts& facts, Cause* cause) {
  decide(cause, "data_order");
  if (facts.layout_differs) cause->class_candidates = {"data_order", "hyperparameter"};  // another batch size
  if (!facts.batch_found.empty()) {
    cause->evidence.push_back("run B's batch " + facts.batch_found);
  } else if (facts.batch_searched) {
    cause->evidence.push_back("run B's batch occurs nowhere in run A's recorded steps");
  }
  if (facts.loaded == Loaded::by_one || facts.loaded == Loaded::by_both)
    cause->evidence.push_back("a checkpoint was loaded before: was the position in the data restored?");
}

void decide_generator(const CauseFacts& facts, Cause* cause) {
  const std::string cls = facts.site.role == Role::rng ? "rng_state" : "data_order";
  if (!facts.equals_rank.empty())
    cause->evidence.push_back(fmt::format("run B holds the state that {} has in run A", facts.equals_rank));
  if (facts.stale_b) cause->evidence.push_back("run B's state is that of the step before: it did not advance");
  const bool at_load = facts.loaded != Loaded::no && (facts.first.in_prologue || facts.first_compared_step);
  if (!at_load) return decide(cause, cls);
  if (facts.loaded == Loaded::maybe) return decide(cause, cls, {cls, "state_restore"});
  if (facts.rng_agreed_at_load) {
    decide(cause, cls);
    cause->evidence.push_back("the state agreed at the load: it was changed between the load and its first use");
  } else {
    decide(cause, "state_restore", {"state_restore", cls});
    cause->evidence.push_back("it differs at the first step after a load");
  }
}

void decide_scalar(const CauseFacts& facts, Cause* cause) {
  cause->evidence.push_back(fmt::format("the scalar {} differs{}", facts.site.tensor, values(facts)));
  if (is_derived_scalar(facts.site)) {
    decide(cause, "nondeterministic_op",
           {"unordered_accumulation", "reduction_order", "algorithm_choice", "precision_or_formula"});
    if (facts.gradients_recorded) cause->evidence.push_back("the recorded gradients of this step agree");
    return;
  }
  if (!facts.site.communicator.empty() && !is_hyperparameter(facts.site)) {  // what a collective was asked to do
    return decide(cause, "structure", {"structure", "hyperparameter"});
  }
  if (facts.loaded == Loaded::by_one && facts.steps_since_begin <= 1) {
    // A schedule that was not restored shows a step later where the optimizer's own copy of the rate was.
    decide(cause, "state_restore",
           facts.steps_since_begin == 0 ? Classes{"state_restore"} : Classes{"state_restore", "hyperparameter"});
    cause->evidence.push_back("one run loaded a checkpoint between the common past and this step");
  } else if (facts.loaded == Loaded::by_one) {
    decide(cause, "hyperparameter", {"hyperparameter", "state_restore"});
    cause->evidence.push_back(fmt::format("one run loaded a checkpoint, and {} behind that agree",
                                          counted(static_cast<uint64_t>(facts.steps_since_begin), "step")));
  } else if (facts.loaded == Loaded::by_both) {
    const bool at_once = facts.first_compared_step || facts.first.in_prologue;
    decide(cause, at_once ? "state_restore" : "hyperparameter", {"state_restore", "hyperparameter"});
    cause->evidence.push_back("both runs began by loading a checkpoint");
  } else if (facts.loaded == Loaded::maybe) {
    decide(cause, facts.start_unseen ? "unknown" : "hyperparameter", {"hyperparameter", "state_restore"});
    cause->evidence.push_back("a run begins behind step 0: whether it loaded a checkpoint is not known");
  } else if (is_hyperparameter(facts.site)) {
    decide(cause, "hyperparameter");
  } else {  // a name that says nothing (or is masked): set from outside, or computed?
    decide(cause, "unknown", {"hyperparameter", "nondeterministic_op", "precision_or_formula"});
  }
}

// Where nothing before was compared, the runs may have differed from before.
void add_unseen_start(const CauseFacts& facts, Classes* classes, Cause* cause) {
  if (!facts.unseen_steps.empty()) {
    cause->evidence.push_back(
        fmt::format("{} not recorded before it: it may have begun there", facts.unseen_steps + " were"));
  }
  if (!facts.start_unseen) return;
  put_first(classes, facts.loaded == Loaded::no ? "initial_state" : "state_restore");
  if (facts.loaded == Loaded::maybe) put_first(classes, "initial_state");
  cause->evidence.push_back("nothing before this step was compared: it may have begun before");
}

Classes op_candidates(const CauseFacts& facts, Cause* cause) {
  Classes classes = {"unordered_accumulation", "algorithm_choice", "precision_or_formula", "hardware_or_sporadic",
                     "uninitialized_memory", "stream_race"};
  if (!facts.rng_agrees) classes.push_back("rng_state");  // it may draw from a generator that was not recorded
  if (facts.everyone && facts.world_size > 1) {
    drop(&classes, "hardware_or_sporadic");  // not on every rank at once
  }
  if (facts.messages_differ && facts.inputs_agree.empty()) {
    put_first(&classes, "reduction_order");
    cause->evidence.push_back(
        "collectives before it carry other messages in the two runs, which alone changes the order of sums");
  }
  if (is_atomic_op(facts.site)) put_first(&classes, "unordered_accumulation");
  if (same_words(facts)) put_first(&classes, "unordered_accumulation");
  if (facts.stats_a.nonfinite == 0 && facts.stats_b.nonfinite > 0) {
    classes = {"hardware_or_sporadic", "precision_or_formula", "uninitialized_memory"};
  } else if (facts.pointing && facts.pointing->bit >= 0 && !facts.everyone) {
    put_first(&classes, "hardware_or_sporadic");
  }
  if (facts.stale_b || facts.stale_a) {
    put_first(&classes, "stream_race");
    put_first(&classes, "rng_state");
    cause->evidence.push_back(
        fmt::format("run {}'s value repeats that of the step before, the other run's does not: a captured "
                    "constant or a stale buffer",
                    facts.stale_b ? 'B' : 'A'));
  }
  if (is_random_op(facts.site)) put_first(&classes, "rng_state");
  if (facts.recompute_parts) {
    put_first(&classes, "rng_state");
    cause->evidence.push_back("run B's recomputation is not what its own forward gave; run A's is");
  }
  if (!facts.environment.empty()) put_first(&classes, "algorithm_choice");
  return classes;
}

}  // namespace

void decide_source(const CauseFacts& facts, Cause* cause) {
  switch (facts.site.role) {
    case Role::batch: return decide_batch(facts, cause);
    case Role::scalar: return decide_scalar(facts, cause);
    default: return decide_generator(facts, cause);
  }
}

void decide_initial_state(const CauseFacts& facts, Cause* cause) {
  const bool state = facts.site.role == Role::optimizer_state;
  const bool zero_b = facts.digest_b == Digest{} && facts.stats_b.absmax == 0 && facts.stats_b.nonfinite == 0;
  const bool zero_a = facts.digest_a == Digest{} && facts.stats_a.absmax == 0 && facts.stats_a.nonfinite == 0;
  if (facts.loaded == Loaded::no || facts.loaded == Loaded::maybe) {
    decide(cause, "initial_state", facts.loaded == Loaded::no ? Classes{} : Classes{"initial_state", "state_restore"});
    cause->evidence.push_back("it differs before the first step");
  } else {
    decide(cause, "state_restore");
    cause->evidence.push_back(
        fmt::format("{} {} of {} differs at the load{}", state ? "the optimizer's" : "the", facts.site.tensor,
                    facts.site.layer.empty() ? "the run" : facts.site.layer,
                    facts.loaded == Loaded::by_one ? " from the state at the end of the step before" : ""));
  }
  if (zero_b != zero_a) {
    cause->evidence.push_back(
        fmt::format("its digest in run {} is that of zeros: not restored, or reset", zero_b ? 'B' : 'A'));
  }
  if (!facts.equals_rank.empty())
    cause->evidence.push_back(fmt::format("run B loaded what {} has in run A", facts.equals_rank));
}

void decide_layout(const CauseFacts& facts, Cause* cause) {
  Classes classes = {"structure"};
  if (facts.layout_a.dtype != facts.layout_b.dtype) {
    classes.push_back("precision_or_formula");
  } else if (facts.site.role == Role::input && facts.layout_a.shape.size() == facts.layout_b.shape.size() &&
             facts.inputs_agree.empty()) {
    // How many rows there are may be what was computed: a router's choice, a mask.
    cause->evidence.push_back("how large it is may depend on values: what chose them was not observed");
    classes.insert(classes.end(), {"nondeterministic_op", "precision_or_formula", "hyperparameter"});
    return decide(cause, "unknown", classes);
  }
  decide(cause, "structure", classes);
}

void decide_collective(const CauseFacts& facts, Cause* cause) {
  if (!facts.collective_judged) {
    decide(cause, "unknown", {"reduction_order", "missing_sync", "nondeterministic_op", "hardware_or_sporadic"});
    cause->evidence.push_back(facts.unknown_members.empty()
                                  ? "what the other side sent was not recorded: the difference may have come with it"
                                  : fmt::format("the inputs of {} are not known: the collective cannot be judged, and "
                                                "the first divergence may lie there",
                                                rank_list(facts.unknown_members)));
    return;
  }
  cause->evidence.push_back(
      facts.inputs_relaid
          ? fmt::format(
                "the inputs of every member ({}) hold the same elements together, in messages that are laid out in "
                "another way: whether each lies where it did was not compared",
                rank_list(facts.members))
          : fmt::format("the recorded inputs agree on every member ({})", rank_list(facts.members)));
  const bool flipped = facts.pointing && facts.pointing->bit >= 0;
  if (facts.keeps_own_input) {
    decide(cause, "missing_sync");
    cause->evidence.push_back("run B's output on this rank is its own input: it was not reduced");
  } else if (facts.outputs_disagree_b) {
    Classes classes = {"missing_sync", "stream_race", "hardware_or_sporadic"};
    if (flipped) put_first(&classes, "hardware_or_sporadic");
    if (facts.everyone) drop(&classes, "hardware_or_sporadic");
    decide(cause, flipped ? "nondeterministic_op" : "missing_sync", classes);
  } else if (facts.alike && is_reduction(facts.site.op) && facts.members.size() > 2) {
    decide(cause, "reduction_order");
    if (facts.inputs_relaid) cause->class_candidates.push_back("nondeterministic_op");  // before it, unseen
    if (facts.outputs_agree_a) cause->evidence.push_back("the members agree with each other in both runs");
  } else if (facts.alike && facts.inputs_relaid) {
    decide(cause, "unknown", {"nondeterministic_op", "overwritten_input", "stream_race"});
    cause->evidence.push_back("elements may have changed places before it, on any member");
  } else if (facts.alike && is_reduction(facts.site.op)) {
    decide(cause, "nondeterministic_op", {"precision_or_formula", "algorithm_choice", "stream_race"});
    cause->evidence.push_back(
        "a sum of two is the same in either order, so the order of the reduction is not the cause");
  } else {
    decide(cause, "nondeterministic_op", {"stream_race", "overwritten_input", "hardware_or_sporadic"});
    if (is_reduction(facts.site.op)) cause->class_candidates.insert(cause->class_candidates.begin(), "reduction_order");
  }
  if (facts.outputs_disagree_b) {
    cause->evidence.push_back("the members hold the same in run A and do not in run B");
  }
}

namespace {

// No optimizer wrote it, so that gradients agree says nothing of it: averages of the weights, teachers, masks.
void decide_resting(const CauseFacts& facts, Cause* cause) {
  cause->evidence.push_back(
      "its layer has no gradient in this step: what wrote it (an average of the weights, a copy, a stray write) was "
      "not observed");
  Classes classes = {"overwritten_input", "hyperparameter", "precision_or_formula", "algorithm_choice", "stream_race",
                     "hardware_or_sporadic"};
  if (facts.everyone && facts.world_size > 1) drop(&classes, "hardware_or_sporadic");
  add_unseen_start(facts, &classes, cause);
  decide(cause, "unknown", classes);
}

// Unscaling, clipping, hooks behind the accumulation and whatever else a program does to gradients by itself.
void decide_changed_gradient(const CauseFacts& facts, Cause* cause) {
  cause->evidence.push_back(fmt::format(
      "its value was last recorded as {}, where the runs agree: it was changed unobserved between there and its use",
      facts.last_seen));
  Classes classes = {"overwritten_input",   "hyperparameter", "precision_or_formula",
                     "nondeterministic_op", "stream_race",    "hardware_or_sporadic"};
  if (facts.everyone && facts.world_size > 1) drop(&classes, "hardware_or_sporadic");
  if (facts.world_size > 1) classes.insert(classes.begin(), {"missing_sync", "reduction_order"});
  decide(cause, "unknown", classes);
}

}  // namespace

bool is_gradient_of_step(const Site& site) {
  return site.kind == Kind::tensor && site.role == Role::gradient && site.phase == Phase::optimizer;
}

void decide_state_or_input(const CauseFacts& facts, Cause* cause) {
  const bool update = facts.site.phase == Phase::optimizer;
  if (facts.replica_values_b > 1 && (update || facts.agreeing_ranks.empty())) {
    cause->evidence.push_back(fmt::format("{} ranks hold it alike in run A; in run B they hold {} values",
                                          facts.replicas, facts.replica_values_b));
  }
  if (facts.stale_b) {
    cause->evidence.push_back("run B's value is that of the step before, though run A's has moved on");
    return update ? decide(cause, "unknown", {"missing_sync", "stream_race", "nondeterministic_op"})
                  : decide(cause, "stream_race");
  }
  if (update) {
    if (facts.gradients_recorded && !is_gradient_of_step(facts.site))
      cause->evidence.push_back("the recorded gradients and hyperparameters of this step agree");
    // One rank alone may as well have been hit by an error; several that drift apart were not kept together.
    const bool drift = facts.replica_values_b > 2 || (facts.replica_values_b == 2 && facts.everyone);
    if (facts.replica_values_b > 1 && (facts.collective_in_one_run || (drift && !facts.collectives_recorded))) {
      return decide(cause, "missing_sync");
    }
    if (facts.loaded == Loaded::by_one && facts.first_compared_step && facts.gradients_recorded) {
      cause->evidence.push_back(
          "it is the first update after a load: state that was not recorded there may not have been restored");
      return decide(cause, "state_restore", {"state_restore", "nondeterministic_op"});
    }
    if (facts.rests) return decide_resting(facts, cause);
    if (is_gradient_of_step(facts.site)) return decide_changed_gradient(facts, cause);
    // What the update read was recorded where it was written last: it may have been changed since.
    Classes classes = {"algorithm_choice", "precision_or_formula", "overwritten_input", "hardware_or_sporadic"};
    if (!facts.gradients_recorded) classes.push_back("unordered_accumulation");
    if (facts.replica_values_b > 1 && !facts.collectives_recorded) classes.push_back("missing_sync");
    if (facts.everyone) drop(&classes, "hardware_or_sporadic");
    add_unseen_start(facts, &classes, cause);
    if (facts.messages_differ) {
      put_first(&classes, "reduction_order");
      cause->evidence.push_back(
          "collectives before it carry other messages in the two runs, which alone changes the order of sums");
    }
    const bool local =
        facts.gradients_recorded && !facts.start_unseen && facts.unseen_steps.empty() && !facts.messages_differ;
    return decide(cause, local ? "nondeterministic_op" : "unknown", classes);
  }
  // Another record that holds the same number says nothing of where this one came from.
  if (facts.site.role == Role::input && (facts.site.kind == Kind::scalar || facts.site.kind == Kind::state)) {
    cause->evidence.push_back("the op was called with another number or setting, which is not computed by a recorded op");
    return decide(cause, "unknown", {"hyperparameter", "structure"});
  }
  cause->evidence.push_back(
      facts.last_seen.empty()
          ? "it is an input, and nothing recorded before it differs: its producer was not observed, or it "
            "was changed unobserved"
          : fmt::format("it is an input; its value was last recorded as {}, where the runs agree: it was "
                        "changed unobserved between there and its use",
                        facts.last_seen));
  Classes classes = {"overwritten_input", "stream_race", "hardware_or_sporadic"};
  if (facts.last_seen.empty()) {  // whatever made it
    classes.insert(classes.end(), {"nondeterministic_op", "precision_or_formula", "algorithm_choice"});
  }
  if (facts.everyone && facts.world_size > 1) drop(&classes, "hardware_or_sporadic");
  if (!facts.equals_other.empty()) {
    cause->evidence.push_back(
        fmt::format("run B's value is that of {}, which agrees in both runs", facts.equals_other));
    drop(&classes, "hardware_or_sporadic");
  }
  if (facts.last_seen.empty()) add_unseen_start(facts, &classes, cause);
  decide(cause, "unknown", classes);
}

void decide_op(const CauseFacts& facts, Cause* cause) {
  Classes classes = op_candidates(facts, cause);
  const bool inputs_known =
      !facts.inputs_agree.empty() && facts.inputs_differ.empty() && facts.inputs_one_sided.empty();
  if (facts.replica_values_b > 1 && facts.site.role == Role::gradient) {
    cause->evidence.push_back(fmt::format("{} ranks hold it alike in run A; in run B they hold {} values",
                                          facts.replicas, facts.replica_values_b));
    if (facts.collective_in_one_run) return decide(cause, "missing_sync");
    if (!facts.collectives_recorded) put_first(&classes, "missing_sync");
  }
  if (facts.other_world) {
    put_first(&classes, "reduction_order");
    drop(&classes, "hardware_or_sporadic");
    return decide(cause, "nondeterministic_op", classes);
  }
  if (facts.site.role == Role::output && facts.passed_on_a != facts.passed_on_b && !facts.pointing) {
    cause->evidence.push_back(
        fmt::format("in run {} its output is its input, in run {} it is not: it does nothing there, as in model.eval() "
                    "or with a probability "
                    "of 0, or something else stands in its place",
                    facts.passed_on_a ? 'A' : 'B', facts.passed_on_a ? 'B' : 'A'));
    if (is_random_op(facts.site))
      return decide(cause, "structure", {"structure", "hyperparameter"});  // its masks never do that
    put_first(&classes, "rng_state");                                      // it may be done at random
    put_first(&classes, "hyperparameter");
    put_first(&classes, "structure");
    return decide(cause, "unknown", classes);
  }
  // What the environment explains differs everywhere and from the start.
  const bool everywhere = facts.everyone || facts.world_size == 1;
  if (!facts.environment.empty() && everywhere && facts.first_compared_step && inputs_known &&
      facts.stats_b.nonfinite == facts.stats_a.nonfinite) {
    for (const std::string& text : facts.environment) cause->evidence.push_back("environment: " + text);
    return decide(cause, "environment", {"environment", "algorithm_choice", "precision_or_formula"});
  }
  if (!inputs_known) {
    classes.push_back("overwritten_input");
    cause->evidence.push_back(facts.step_inputs_agree
                                  ? "no input of this op was recorded; what was recorded before it in this "
                                    "step (batch, weights) agrees"
                                  : "no input of this op was recorded: what produced the difference was not observed");
    add_unseen_start(facts, &classes, cause);
  }
  const bool step_known = facts.step_inputs_agree && facts.unseen_steps.empty();
  decide(cause, inputs_known || step_known ? "nondeterministic_op" : "unknown", classes);
}

}  // namespace forkpoint
