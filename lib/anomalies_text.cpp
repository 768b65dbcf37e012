#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lib/anomalies.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

std::string number_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  return fmt::format("{:.4g}", number);
}

std::string count_text(const Anomaly& anomaly) {
  if (anomaly.at.kind == Kind::scalar) return number_text(anomaly.magnitude);
  return fmt::format("{} of {}", grouped(anomaly.nonfinite), counted(anomaly.elements, "element"));
}

std::string value_text(const Anomaly& anomaly) {
  if (anomaly.is_nonfinite) return count_text(anomaly);
  const double ratio = anomaly.usual > 0 ? anomaly.magnitude / anomaly.usual : 0;
  return fmt::format("{}, {}{:.3g} times its median of {}", number_text(anomaly.magnitude), ratio < 10 ? "" : "about ",
                     std::fabs(ratio), counted(static_cast<uint64_t>(anomaly.history), "step"));
}

// Place, value, and which other ranks are alike.
std::string where_text(const Anomaly& anomaly) {
  const bool some = anomaly.at.rank >= 0 && anomaly.ranks.size() > 1;
  return fmt::format("{}{} ({}{})", anomaly.at.in_prologue ? "" : "at ", place_text(anomaly.at), value_text(anomaly),
                     some ? "; alike on " + rank_list(anomaly.ranks) : "");
}

// What the answer "nothing" does not speak for.
std::string unseen_text(const Anomalies& anomalies) {
  std::string text;
  const auto add = [&](const std::vector<std::string>& list, std::string_view label) {
    if (list.empty()) return;
    text += fmt::format("; {}: {}", label, list[0]);
    if (list.size() > 1) text += fmt::format(", {}", list[1]);
    if (list.size() > 2) text += fmt::format(" and {} more", list.size() - 2);
  };
  add(anomalies.lost, "lost");
  add(anomalies.left_out, "not recorded");
  if (anomalies.judged == 0) {
    text += fmt::format("; no magnitude was judged, that takes {} earlier steps", kFewestSteps);
  }
  return text;
}

Json anomaly_json(const std::optional<Anomaly>& anomaly) {
  if (!anomaly) return nullptr;
  const Divergence& at = anomaly->at;
  const auto text = [](const std::string& value) { return value.empty() ? Json(nullptr) : Json(value); };
  Json json;
  json["step"] = at.step, json["in_prologue"] = at.in_prologue, json["micro_step"] = at.micro_step;
  json["rank"] = at.rank < 0 ? Json(nullptr) : Json(at.rank);
  json["ranks"] = anomaly->ranks;
  json["phase"] = at.phase ? Json(name(*at.phase)) : Json(nullptr);
  json["layer"] = text(at.layer), json["op"] = text(at.op), json["tensor"] = text(at.tensor);
  json["kind"] = name(at.kind);
  json["nonfinite"] = anomaly->nonfinite, json["elements"] = anomaly->elements;
  json["magnitude"] =
      std::isfinite(anomaly->magnitude) ? Json(anomaly->magnitude) : Json(number_text(anomaly->magnitude));
  json["median"] = anomaly->is_nonfinite ? Json(nullptr) : Json(anomaly->usual);
  json["history_steps"] = anomaly->history;
  return json;
}

}  // namespace

std::string anomaly_rule() {
  return fmt::format(
      "a magnitude leaves its history when log2(absmax) is above the median of the last {} steps ({} at least) of the "
      "same rank, "
      "tensor and call by more than max(6 MAD, 4 octaves), and above the largest of them by an octave; a loss, by "
      "max(6 MAD, 1 octave) and half an octave; gradients and optimizer state burst in every training: they count when "
      "a loss, "
      "an activation or a parameter follows, or something non-finite, within {} steps",
      kHistorySteps, kFewestSteps, kBurstSteps);
}

std::string describe(const Anomaly& anomaly) {
  return fmt::format("{} {}", anomaly.is_nonfinite ? "non-finite value" : "magnitude out of its own history",
                     where_text(anomaly));
}

std::string describe(const AnomalyLink& link) {
  const uint64_t both = link.nonfinite + link.departed;
  const std::string what = link.departed == 0    ? "not finite"
                           : link.nonfinite == 0 ? "out of history"
                                                 : fmt::format("{} not finite, {} out of history",
                                                               grouped(link.nonfinite), grouped(link.departed));
  return fmt::format("{}, {}, {}: {} ({}), {}{}", step_text(link.step), rank_list(link.ranks), name(link.phase),
                     counted(both, "record"), what, link.first, link.first == link.last ? "" : " to " + link.last);
}

std::string headline(const Anomalies& anomalies) {
  if (anomalies.nonfinite) return "first " + describe(*anomalies.nonfinite);
  if (anomalies.magnitude) return "first " + describe(*anomalies.magnitude);
  return fmt::format("nothing anomalous in {} of {} ({} looked at){}", counted(anomalies.steps, "step"),
                     counted(static_cast<uint64_t>(anomalies.ranks), "rank"), counted(anomalies.looked_at, "tensor"),
                     unseen_text(anomalies));
}

nlohmann::ordered_json to_json(const Anomalies& anomalies) {
  Json json;
  json["anomalous"] = anomalies.found();
  json["headline"] = headline(anomalies);
  json["first_nonfinite"] = anomaly_json(anomalies.nonfinite);
  json["first_magnitude"] = anomaly_json(anomalies.magnitude);
  json["loss"] = anomaly_json(anomalies.loss);
  json["loss_before"] =
      anomalies.loss_before && std::isfinite(*anomalies.loss_before) ? Json(*anomalies.loss_before) : Json(nullptr);
  json["evaluation"] = anomaly_json(anomalies.evaluation);
  json["chain"] = Json::array();
  for (const AnomalyLink& link : anomalies.chain) {
    json["chain"].push_back({{"step", link.step},
                             {"phase", name(link.phase)},
                             {"ranks", link.ranks},
                             {"nonfinite", link.nonfinite},
                             {"out_of_history", link.departed},
                             {"first", link.first},
                             {"last", link.last}});
  }
  json["tensors_looked_at"] = anomalies.looked_at, json["magnitudes_judged"] = anomalies.judged;
  json["steps"] = anomalies.steps, json["ranks"] = anomalies.ranks;
  json["lost"] = anomalies.lost, json["not_recorded"] = anomalies.left_out, json["notes"] = anomalies.notes;
  json["rule"] = anomaly_rule();
  return json;
}

}  // namespace forkpoint
