// What forkpoint price found, as text and as JSON.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/price.h"
#include "cli/terminal.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

// Two runs of an arm say too little of the noise for any difference to be believed.
bool has_too_few(const PriceArm& arm, const PriceArm& fast) {
  return std::min(arm.run_medians_ms.size(), fast.run_medians_ms.size()) < kFewestRuns;
}

std::string repeat_text(const PriceArm& arm) {
  if (!arm.failure.empty()) return "did not run: " + arm.failure;
  if (!arm.difference.empty()) return (arm.incomparable ? "cannot tell: " : "no: ") + arm.difference;
  return arm.repeats() ? fmt::format("yes, {} runs", arm.runs.size()) : "one run only";
}

std::string arm_title(const PriceArm& arm) {
  if (arm.kind == PriceArm::Kind::full) return fmt::format("all {} knobs", arm.knobs.size());
  if (arm.kind == PriceArm::Kind::cheapest) return "cheapest";
  return arm.name;
}

void add_row(const PriceArm& arm, const PriceArm& fast, std::string* text) {
  const auto time = arm.time();
  const std::string ms = time ? fmt::format("{:.3f} ms", time->median_ms) : "-";
  const std::string spread = time ? fmt::format("[{:.3f}, {:.3f}]", time->low_ms, time->high_ms) : "";
  const std::string cost = arm.kind == PriceArm::Kind::fast ? "" : cost_words(arm, fast);
  *text += fmt::format("  {:<17} {:>12}  {:<20} {:<23} {}\n", arm_title(arm), ms, spread, cost, printable(repeat_text(arm)));
}

// Each of the knobs that is a wish more than a need: what the job would not lose without it.
std::string candidates_text(const PriceResult& result) {
  std::string text;
  for (const PriceArm& arm : result.candidates) {
    text += fmt::format("  {:<60} {}\n", knob_names(arm.knobs), printable(repeat_text(arm)));
  }
  return text.empty() ? "" : "\nsets that were tried on the way:\n" + text;
}

Json arm_json(const PriceArm& arm, const PriceArm& fast) {
  Json names = Json::array();
  for (const Knob* knob : arm.knobs) names.push_back(knob->name);
  const auto time = arm.time();
  const auto ratio = measured_ratio(arm, fast);
  return {{"arm", arm.name},
          {"knobs", names},
          {"runs", arm.runs},
          {"step_ms", time ? Json(time->median_ms) : Json()},
          {"low_ms", time ? Json(time->low_ms) : Json()},
          {"high_ms", time ? Json(time->high_ms) : Json()},
          {"run_medians_ms", arm.run_medians_ms},
          {"ratio", ratio ? Json(*ratio) : Json()},
          {"difference_measured", ratio.has_value()},
          {"repeats", arm.repeats()},
          {"difference", arm.difference.empty() ? Json() : Json(arm.difference)},
          {"failure", arm.failure.empty() ? Json() : Json(arm.failure)}};
}

std::string price_words(const PriceArm& arm, const PriceArm& fast) {
  const auto ratio = measured_ratio(arm, fast);
  if (!ratio && has_too_few(arm, fast)) return fmt::format("at a cost that takes {} rounds to measure", kFewestRuns);
  return ratio ? fmt::format("at {:.2f}x", *ratio) : "at no cost that could be measured";
}

std::string full_words(const PriceResult& result) {
  if (result.full().runs.empty()) return "with all knobs it does not run";
  const auto ratio = measured_ratio(result.full(), result.fast());
  if (!ratio && has_too_few(result.full(), result.fast())) {
    return fmt::format("what full determinism costs takes {} rounds to measure", kFewestRuns);
  }
  return ratio ? fmt::format("full determinism costs {:.2f}x", *ratio) : "full determinism costs nothing that could be measured";
}

}  // namespace

std::string cost_words(const PriceArm& arm, const PriceArm& fast) {
  if (arm.runs.empty()) return "not measured";
  const auto ratio = measured_ratio(arm, fast);
  if (!ratio && has_too_few(arm, fast)) return fmt::format("takes {} rounds", kFewestRuns);
  return ratio ? fmt::format("{:.2f}x", *ratio) : "no difference measured";
}

std::optional<double> measured_ratio(const PriceArm& arm, const PriceArm& fast) {
  const auto a = arm.time(), b = fast.time();
  if (!a || !b || !differ(*a, *b, arm.run_medians_ms.size(), fast.run_medians_ms.size())) return std::nullopt;
  return a->median_ms / b->median_ms;
}

std::string price_headline(const PriceResult& result) {
  const size_t all = result.full().knobs.size();
  if (result.fast().repeats()) {
    return fmt::format("repeats without any knob ({} runs); {}", result.fast().runs.size(), full_words(result));
  }
  if (result.cheapest) {
    const bool odd = !result.full().repeats() && !result.full().runs.empty();
    return fmt::format("repeats with {} of {} {}, {}{}; {}", result.cheapest->knobs.size(), all, all == 1 ? "knob" : "knobs",
                       price_words(*result.cheapest, result.fast()), odd ? ", though not with all of them" : "", full_words(result));
  }
  const PriceArm& full = result.full();
  if (!full.failure.empty()) return fmt::format("does not run with {} {}: {}", all, all == 1 ? "knob" : "knobs", full.failure);
  if (full.incomparable) return fmt::format("cannot tell whether it repeats: {}", full.difference);
  if (!full.difference.empty()) {
    return fmt::format("does not repeat, not even with {} {}: {}; {}", all, all == 1 ? "knob" : "knobs", full.difference,
                       full_words(result));
  }
  return fmt::format("repeats with all {} knobs or not at all; {}", all, full_words(result));
}

int price_status(const PriceResult& result) {
  if (result.fast().repeats() || result.cheapest) return 0;
  return result.full().failure.empty() && !result.full().incomparable ? 1 : 2;
}

std::string price_text(const PriceRequest& request, const PriceResult& result) {
  std::string text = price_headline(result) + "\n";
  if (result.cheapest) text += fmt::format("  --deterministic={}\n", knob_names(result.cheapest->knobs));
  text += fmt::format("\n  {:<17} {:>12}  {:<20} {:<23} {}\n", "", "a step", "[runs from, to]", "against fast", "repeats");
  for (const PriceArm& arm : result.arms) add_row(arm, result.fast(), &text);
  if (result.cheapest) add_row(*result.cheapest, result.fast(), &text);
  text += candidates_text(result);
  for (const std::string& sentence : result.not_in_force) text += "\n" + printable(sentence) + "\n";
  for (const std::string& sentence : result.not_deterministic) text += "\n" + printable(sentence) + "\n";
  text += fmt::format(
      "\nA step: median of steps {} to {}, begin to begin, on the slowest rank; of {} runs the median, lowest and highest.\n"
      "Runs of the arms took turns. Where the runs of two arms overlap, no difference was measured. Step {} was hashed\n"
      "(weights, optimizer state, gradients, loss) and compared; equal runs are no proof that the next one is equal too.\n"
      "{} jobs in {:.1f} s; the runs are in {}\n",
      request.first, request.last - 1, request.rounds, request.last, result.jobs, result.seconds, printable(request.folder));
  return text;
}

std::string price_json(const PriceRequest& request, const PriceResult& result) {
  Json arms = Json::array(), candidates = Json::array();
  for (const PriceArm& arm : result.arms) arms.push_back(arm_json(arm, result.fast()));
  for (const PriceArm& arm : result.candidates) candidates.push_back(arm_json(arm, result.fast()));
  const Json object = {{"headline", price_headline(result)},
                       {"command", request.command},
                       {"steps", {request.first, request.last}},
                       {"rounds", request.rounds},
                       {"repeats_without", result.fast().repeats()},
                       {"repeats_with_all", result.full().repeats()},
                       {"cheapest", result.cheapest ? arm_json(*result.cheapest, result.fast()) : Json()},
                       {"arms", arms},
                       {"candidates", candidates},
                       {"not_in_force", result.not_in_force},
                       {"not_deterministic", result.not_deterministic},
                       {"jobs", result.jobs},
                       {"seconds", result.seconds},
                       {"folder", request.folder}};
  return object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forkpoint
