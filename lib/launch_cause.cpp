#include "lib/launch_cause.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "lib/cause_rules.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Classes = std::vector<std::string>;

std::string joined(const std::vector<std::string>& parts) { return fmt::format("{}", fmt::join(parts, ", ")); }
std::string launches(uint64_t count) { return counted(count, "launch"); }

// Kernels that draw random numbers, by their names in the usual libraries.
bool draws_random_numbers(const std::string& kernel) {
  static constexpr std::array<std::string_view, 9> kNames = {
      "philox", "dropout", "distribution", "uniform", "normal_", "bernoulli", "randperm", "curand", "random"};
  std::string lower;
  for (const char c : kernel) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return std::any_of(kNames.begin(), kNames.end(),
                     [&](std::string_view name) { return lower.find(name) != std::string::npos; });
}

void say_who(const LaunchFacts& facts, Cause* cause) {
  if (facts.everyone && facts.world_size > 1)
    cause->evidence.push_back(fmt::format("all {} ranks begin to differ at this launch", facts.world_size));
  if (!facts.reached.empty()) {
    cause->evidence.push_back(fmt::format(
        "first reaches {}{}", facts.reached,
        facts.through <= 1 ? "" : fmt::format(", through {} whose results differ", launches(facts.through - 1))));
  }
}

void say_inputs(const LaunchFacts& facts, Cause* cause) {
  if (facts.end == EndKind::from_host) return;
  if (!facts.inputs.empty()) {
    cause->evidence.push_back(fmt::format("what it found in its buffers agrees ({}){}", joined(facts.inputs),
                                          facts.inputs_hashed ? ", by digests right before the launch"
                                                              : ": assumed from the digests after the launches before, "
                                                                "so a producer that was not observed is not excluded"));
  }
  if (!facts.unknown_inputs.empty()) {
    cause->evidence.push_back(
        fmt::format("what it found in {} is not known: no launch before it was handed that, so a producer that was "
                    "not observed is not excluded",
                    joined(facts.unknown_inputs)));
  }
  for (const auto& text : facts.entered) cause->evidence.push_back(text);
  for (const auto& text : facts.uninitialized) cause->evidence.push_back(text);
  for (const auto& text : facts.not_followed) cause->evidence.push_back(text);
}

void say_launch(const LaunchFacts& facts, Cause* cause) {
  for (const auto& text : facts.configuration) cause->evidence.push_back(text);
  if (facts.end == EndKind::gap || facts.end == EndKind::from_host) return;
  const ParameterCheck& parameters = facts.parameters;
  if (parameters.unread) {
    cause->evidence.push_back("its parameters could not be read, so they may differ");
  } else if (facts.configuration.empty() && parameters.agree()) {
    cause->evidence.push_back("kernel, grid, block and parameters are the same in both runs");
  }
  if (parameters.size_differs) cause->evidence.push_back("its parameter block has another size in each run");
  if (parameters.values_differ) {
    std::string text =
        parameters.words.empty()
            ? "its parameters differ in more than two words: numbers, or what the stack held in unused fields"
            : to_sentence(parameters.words);
    if (facts.parameters_free) {
      text += fmt::format(", as they did in {} of this kernel whose results agreed: not counted",
                          launches(facts.parameters_free_launches));
    }
    cause->evidence.push_back(text);
  }
  for (const auto& text : parameters.pointers) cause->evidence.push_back(text);
  for (const auto& text : parameters.one_sided) {
    if (!facts.parameters_free) cause->evidence.push_back(text);
  }
  if (!facts.uneven.empty()) cause->evidence.push_back(facts.uneven);
}

void say_blind_spots(const LaunchFacts& facts, Cause* cause) {
  if (!facts.opaque.empty()) {
    cause->evidence.push_back(
        fmt::format("an input of it was handed before to {}, of whose result no digest was taken: it may have begun "
                    "there (unobserved producer)",
                    joined(facts.opaque)));
  }
  if (!facts.windows.empty()) {
    cause->evidence.push_back(
        fmt::format("of {} only a part is known, as its extent is not: it may have begun outside of that part "
                    "(unobserved producer)",
                    joined(facts.windows)));
  }
  if (facts.unread_before > 0 && !facts.inputs_hashed) {
    cause->evidence.push_back(
        fmt::format("before it in this step, the buffers of {} could not be told: it may have begun there "
                    "(unobserved producer)",
                    launches(facts.unread_before)));
  }
  if (facts.peer_mapped)
    cause->evidence.push_back("a buffer of it is mapped into another device, which may have written it unobserved");
}

void say_retry(const RetryFacts& retry, char run, Cause* cause) {
  if (retry.runs == 0) return;
  std::string text = fmt::format("run again {} in run {} from the same inputs, it gave {}",
                                 retry.runs == 1 ? "once" : fmt::format("{} times", retry.runs), run,
                                 counted(retry.outputs, "different output"));
  if (retry.outputs == 1) {
    text = fmt::format("run again {} in run {} from the same inputs, it gave one and the same output{}",
                       retry.runs == 1 ? "once" : fmt::format("{} times", retry.runs), run,
                       retry.own_output     ? ", the recorded one"
                       : retry.other_output ? ", that of the other run"
                                            : ", neither run's");
  }
  cause->evidence.push_back(text);
}

void say_rest(const LaunchFacts& facts, Cause* cause) {
  say_retry(facts.retry_a, 'A', cause);
  say_retry(facts.retry_b, 'B', cause);
  for (const auto& text : facts.races.sentences) cause->evidence.push_back(text);
  if (facts.pointing) {
    cause->evidence.push_back(fmt::format(
        "one 32-bit word differs (word {} of the buffer), by {:+}{}", facts.pointing->word, facts.pointing->delta,
        facts.pointing->bit < 0 ? "" : ": consistent with a flipped bit, and with a change in the last place"));
  }
}

void decide_from_host(const LaunchFacts& facts, Cause* cause) {
  cause->evidence.push_back("the value comes from the host: it differs before it reaches the device");
  if (facts.batch_differs) return decide(cause, "data_order");
  if (facts.first.in_prologue) return decide(cause, "unknown", {"initial_state", "state_restore", "hyperparameter"});
  decide(cause, "unknown", {"data_order", "hyperparameter", "initial_state"});
}

void decide_entered(const LaunchFacts& facts, Cause* cause) {
  if (facts.differed_before) return decide(cause, "unknown", {"initial_state", "state_restore"});
  if (facts.other_data) {
    // What is taken for a pointer may be a number that says nothing, and the kernel's own result differ.
    cause->evidence.push_back("unless that is a number which looks like a pointer: then what it found agrees");
    return decide(cause, facts.uneven.empty() ? "unknown" : "structure",
                  {"structure", "overwritten_input", "stream_race", "unordered_accumulation"});
  }
  if (facts.races.stale) return decide(cause, "stream_race", {"stream_race", "overwritten_input"});
  if (facts.races.future) return decide(cause, "overwritten_input", {"overwritten_input", "stream_race"});
  decide(cause, "unknown", {"overwritten_input", "stream_race", "hardware_or_sporadic"});
}

void decide_gap(const LaunchFacts& facts, Cause* cause) {
  if (!facts.replaced && !facts.repeats)
    return decide(cause, "structure", {"structure", "precision_or_formula", "algorithm_choice"});
  decide(cause, "algorithm_choice");
  if (facts.repeats && !facts.replaced) cause->class_candidates.push_back("structure");
  for (const auto& text : facts.environment) cause->evidence.push_back("environment: " + text);
}

void decide_parameters(const LaunchFacts& facts, Cause* cause) {
  if (draws_random_numbers(facts.first.kernel)) return decide(cause, "rng_state");
  if (!facts.parameters.values_differ && !facts.parameters.size_differs) {  // only where pointers lead
    return decide(cause, "unknown", {"overwritten_input", "structure", "algorithm_choice"});
  }
  // Each run's launch gives what it gave, again and again, from its own parameters: no chance is in it.
  const auto repeats = [](const RetryFacts& retry) { return retry.runs > 1 && retry.outputs == 1 && retry.own_output; };
  const bool no_chance = repeats(facts.retry_a) && repeats(facts.retry_b);
  // Structures that are only filled in part are handed over with what the stack held: many words that mean nothing. One
  // or two may be such as well, or a number that matters.
  if (!facts.parameters.size_differs && facts.parameters.words.empty() && !no_chance) {
    return decide(
        cause, "nondeterministic_op",
        {"unordered_accumulation", "hyperparameter", "algorithm_choice", "rng_state", "hardware_or_sporadic"});
  }
  if (facts.first.phase == Phase::optimizer)
    return decide(cause, "hyperparameter", {"hyperparameter", "state_restore"});
  Classes classes = {"hyperparameter", "algorithm_choice", "rng_state"};
  if (!no_chance) classes.push_back("unordered_accumulation");
  decide(cause, "unknown", classes);
}

// A copy of equal bytes, or a set, cannot give two results: what differs is what it left alone.
void decide_beyond_write(const LaunchFacts& facts, Cause* cause) {
  cause->evidence.push_back("what it wrote is the same in both runs: what differs lies in the rest of that buffer");
  if (!facts.first_seen && !facts.fresh_output) {
    return decide(cause, "unknown", {"stream_race", "overwritten_input", "hardware_or_sporadic"});
  }
  cause->evidence.push_back("no launch that was seen has written that rest");
  decide(cause, "uninitialized_memory", {"uninitialized_memory", "stream_race", "overwritten_input"});
}

// Same kernel, same parameters, same inputs as far as that is known.
void decide_plain(const LaunchFacts& facts, Cause* cause) {
  const bool retried = facts.retry_a.runs + facts.retry_b.runs > 1;  // and gave one output
  const bool unobserved = !facts.inputs_hashed || !facts.opaque.empty() || !facts.windows.empty() || facts.peer_mapped;
  if (facts.races.stale) return decide(cause, "stream_race", {"stream_race", "nondeterministic_op"});
  if (facts.races.both) return decide(cause, "nondeterministic_op", {"stream_race", "nondeterministic_op"});
  const bool may_be_unwritten = unobserved || retried || facts.first_seen || facts.fresh_output;
  if (facts.fresh_output && retried)
    return decide(cause, "uninitialized_memory", {"uninitialized_memory", "hardware_or_sporadic"});
  Classes classes;
  if (facts.fresh_output) classes = {"uninitialized_memory", "nondeterministic_op"};
  if (!retried) classes.push_back("unordered_accumulation");
  if (!facts.everyone || facts.world_size == 1) {
    const bool bit = facts.pointing && facts.pointing->bit >= 0;
    classes.insert(bit ? classes.begin() : classes.end(), "hardware_or_sporadic");
  }
  if (unobserved) classes.push_back("stream_race");
  if (may_be_unwritten && !facts.fresh_output) classes.push_back("uninitialized_memory");
  if (facts.parameters.unread) classes.push_back("hyperparameter"), classes.push_back("rng_state");
  if (!facts.uneven.empty()) classes.insert(classes.begin(), "structure");
  decide(cause, "nondeterministic_op", classes);
}

void decide_class(const LaunchFacts& facts, Cause* cause) {
  const bool unstable = facts.retry_a.outputs > 1 || facts.retry_b.outputs > 1;
  const ParameterCheck& parameters = facts.parameters;
  if (facts.end == EndKind::from_host) return decide_from_host(facts, cause);
  if (!facts.resized.empty() && facts.end == EndKind::launch) return decide(cause, "structure");
  if (!facts.uninitialized.empty()) return decide(cause, "uninitialized_memory");
  const bool raced = facts.races.only_a || facts.races.only_b;
  if (raced && facts.end != EndKind::gap) return decide(cause, "stream_race");
  if (facts.end == EndKind::entered) return decide_entered(facts, cause);
  if (unstable) return decide(cause, "unordered_accumulation");
  if (facts.end == EndKind::gap) {
    decide_gap(facts, cause);
    if (raced) cause->class_candidates.push_back("stream_race");
    return;
  }
  if (!facts.configuration.empty()) {
    decide(cause, "algorithm_choice");
    for (const auto& text : facts.environment) cause->evidence.push_back("environment: " + text);
    return;
  }
  if (!parameters.unread && !parameters.agree() && !facts.parameters_free) return decide_parameters(facts, cause);
  if (facts.beyond_write) return decide_beyond_write(facts, cause);
  decide_plain(facts, cause);
}

// What would tell more, at the least cost.
std::string next_command(const LaunchFacts& facts) {
  const bool retried = facts.retry_a.runs + facts.retry_b.runs > 0;
  const bool open = facts.end == EndKind::launch || facts.end == EndKind::entered;
  const bool known = facts.inputs_hashed && (retried || facts.moves);
  if (open && facts.resized.empty() && !facts.command.empty() && !known && facts.uninitialized.empty()) {
    const std::string step = facts.first.in_prologue ? "-1" : fmt::format("{}", facts.first.step);
    const std::string retry = facts.moves ? "" : fmt::format("--retry 20 --launch {}:{} ", step, facts.index);
    return fmt::format("forkpoint record --level launch {}--inputs {}-o {}-{} -- {}", facts.record_options, retry, facts.run_b,
                       facts.moves ? "inputs" : "retry", facts.command);
  }
  std::string command = fmt::format("forkpoint show {}", facts.run_b);
  if (!facts.first.in_prologue) command += fmt::format(" --steps {0}:{0}", facts.first.step);
  if (facts.first.rank >= 0) command += fmt::format(" --ranks {}", facts.first.rank);
  return command;
}

}  // namespace

Cause decide_launch_cause(const LaunchFacts& facts) {
  Cause cause;
  say_who(facts, &cause);
  say_launch(facts, &cause);
  say_inputs(facts, &cause);
  say_rest(facts, &cause);
  decide_class(facts, &cause);
  say_blind_spots(facts, &cause);
  cause.next = next_command(facts);
  return cause;
}

}  // namespace forkpoint
