#include "lib/cause.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "lib/cause_rules.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

std::string joined(const std::vector<std::string>& parts) { return fmt::format("{}", fmt::join(parts, ", ")); }

void say_who(const CauseFacts& facts, Cause* cause) {
  if (facts.world_size <= 1 || facts.other_world) return;
  if (facts.everyone) {
    cause->evidence.push_back(facts.collective_output
                                  ? fmt::format("every member's output differs ({})", rank_list(facts.members))
                                  : fmt::format("all {} ranks begin to differ at this record", facts.world_size));
    return;
  }
  if (!facts.alike_ranks.empty()) {
    cause->evidence.push_back(fmt::format("{} also begin to differ at this record", rank_list(facts.alike_ranks)));
  }
  if (!facts.agreeing_ranks.empty()) {
    cause->evidence.push_back(fmt::format("this record agrees on {}", rank_list(facts.agreeing_ranks)));
  }
}

void say_inputs(const CauseFacts& facts, Cause* cause) {
  if (facts.collective_output) return;
  if (!facts.inputs_differ.empty()) {
    cause->evidence.push_back("recorded inputs of the same op that differ: " + joined(facts.inputs_differ));
  }
  if (!facts.inputs_one_sided.empty()) {
    cause->evidence.push_back("recorded inputs of the same op in one run only: " + joined(facts.inputs_one_sided));
  }
  if (!facts.inputs_agree.empty() && facts.site.role != Role::input) {
    cause->evidence.push_back("the recorded inputs of this op agree: " + joined(facts.inputs_agree));
  }
}

std::string amount(const TensorStats& stats) {
  return fmt::format("absmax {:.9g}, {} non-finite", stats.absmax, grouped(stats.nonfinite));
}

void say_values(const CauseFacts& facts, Cause* cause) {
  if (facts.layout_differs) {
    cause->evidence.push_back(fmt::format("its form differs: {} in run A, {} in run B", to_string(facts.layout_a),
                                          to_string(facts.layout_b)));
    return;
  }
  if (facts.relaid) {
    cause->evidence.push_back(
        "its messages are laid out in another way in each run; the elements of all of them together are not the same");
  }
  if (facts.pointing) cause->evidence.push_back(to_sentence(*facts.pointing, facts.layout_a));
  if (facts.pointing_skipped) cause->evidence.push_back("too large to search for a single changed word");
  if (facts.site.kind == Kind::scalar || facts.site.kind == Kind::state) return;
  if (facts.stats_b.nonfinite > 0 && facts.stats_a.nonfinite == 0) {
    cause->evidence.push_back(fmt::format(
        "{} born here: {} non-finite values in run B, none in run A{}", "NaN or Inf", grouped(facts.stats_b.nonfinite),
        facts.inputs_agree.empty() || facts.inputs_nonfinite_b > 0 ? "" : " and none in the inputs"));
  } else if (facts.other_world) {  // statistics of shards were not put together
  } else if (facts.stats_a.absmax != facts.stats_b.absmax || facts.stats_a.nonfinite != facts.stats_b.nonfinite) {
    cause->evidence.push_back(fmt::format("run A: {}; run B: {}", amount(facts.stats_a), amount(facts.stats_b)));
  }
  if (same_words(facts)) {
    cause->evidence.push_back(
        "the sum of its words is the same in both runs: consistent with the same values in another order");
  }
}

void say_context(const CauseFacts& facts, Cause* cause) {
  if (!facts.also_differ.empty())
    cause->evidence.push_back("also differs in this step, and may be a second cause: " + joined(facts.also_differ));
  for (const std::string& text : facts.structure) cause->evidence.push_back(text);
  const bool inner = facts.site.role != Role::batch && facts.site.role != Role::rng && facts.site.role != Role::scalar;
  if (facts.level == Level::step && inner && !facts.first.in_prologue && !facts.structure_only) {
    cause->evidence.push_back(
        "recorded at level step: the inputs and outputs of layers were not seen, so it may have begun in a "
        "layer before this record; level layer would narrow it");
  }
}

// Quoted for a shell and a glob-free layer.
std::string next_command(const CauseFacts& facts) {
  const Divergence& at = facts.first;
  if (facts.level == Level::step && facts.site.phase != Phase::data && facts.site.phase != Phase::state &&
      facts.site.kind != Kind::scalar && !at.in_prologue && !facts.command.empty()) {
    return fmt::format("forkpoint record --level layer --steps {0}:{0} -o {1}-layer -- {2}", at.step, facts.run_b,
                       facts.command);
  }
  std::string command = fmt::format("forkpoint show {}", facts.run_b);
  if (!at.in_prologue) command += fmt::format(" --steps {0}:{0}", at.step);
  if (at.rank >= 0) command += fmt::format(" --ranks {}", at.rank);
  if (!at.layer.empty()) command += fmt::format(" --layer '{}'", at.layer);
  if (at.in_prologue) command += fmt::format(" --phase {}", name(at.phase.value_or(Phase::load)));
  return command;
}

}  // namespace

bool same_words(const CauseFacts& facts) {
  const bool state = facts.site.role == Role::rng || facts.site.role == Role::sampler;  // its order is its meaning
  return !facts.layout_differs && !facts.other_world && !state && facts.site.kind != Kind::scalar &&
         facts.stats_a.word_sum == facts.stats_b.word_sum && facts.stats_a.absmax == facts.stats_b.absmax &&
         facts.stats_a.nonfinite == facts.stats_b.nonfinite && element_count(facts.layout_a) > 1;
}

void decide(Cause* cause, std::string cls, std::vector<std::string> candidates) {
  cause->cls = std::move(cls);
  cause->class_candidates = std::move(candidates);
  if (cause->class_candidates.empty()) cause->class_candidates = {cause->cls};
}

Cause decide_cause(const CauseFacts& facts) {
  Cause cause;
  say_who(facts, &cause);
  say_inputs(facts, &cause);
  say_values(facts, &cause);
  if (facts.structure_only) {
    decide(&cause, "structure");
    cause.evidence.push_back("no record that both runs have differs");
  } else if (facts.permutation_only) {
    decide(&cause, "nondeterministic_op", {"unordered_accumulation", "algorithm_choice"});
    cause.evidence.push_back("benign permutation: everything recorded after it is equal");
  } else if (facts.site.role == Role::batch || facts.site.role == Role::sampler || facts.site.role == Role::rng ||
             facts.site.role == Role::scalar) {
    decide_source(facts, &cause);
  } else if (facts.first.in_prologue && facts.first.phase == Phase::load) {  // a program without steps trains there too
    decide_initial_state(facts, &cause);
  } else if (facts.layout_differs) {
    decide_layout(facts, &cause);
  } else if (facts.collective_output) {
    decide_collective(facts, &cause);
  } else if (facts.site.role == Role::input || facts.site.role == Role::parameter ||
             facts.site.role == Role::optimizer_state || facts.rests ||
             (is_gradient_of_step(facts.site) && !facts.last_seen.empty())) {
    decide_state_or_input(facts, &cause);
  } else {
    decide_op(facts, &cause);
  }
  if (!facts.structure_before.empty() && cause.cls != "structure") {
    std::vector<std::string> classes = std::move(cause.class_candidates);
    std::erase(classes, std::string("structure"));
    // What a program draws, reads or sets says by itself what it is.
    const bool is_source = facts.site.role == Role::batch || facts.site.role == Role::rng ||
                           facts.site.role == Role::sampler || cause.cls == "hyperparameter" ||
                           cause.cls == "state_restore";
    if (is_source) {
      classes.push_back("structure");
      decide(&cause, cause.cls, std::move(classes));
    } else {
      if (cause.cls != "unknown" && std::ranges::count(classes, cause.cls) == 0)
        classes.insert(classes.begin(), cause.cls);
      classes.insert(classes.begin(), "structure");
      decide(&cause, "structure", std::move(classes));
    }
    cause.evidence.push_back(facts.structure_before);
  }
  say_context(facts, &cause);
  cause.next = next_command(facts);
  return cause;
}

}  // namespace forkpoint
