#include <nlohmann/json.hpp>

#include "lib/verdict.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

Json text_or_null(std::string_view text) { return text.empty() ? Json(nullptr) : Json(text); }

template <typename Number>
Json number_or_null(Number number) {
  return number < 0 ? Json(nullptr) : Json(number);
}

Json pointing_json(const std::optional<Pointing>& pointing) {
  if (!pointing) return nullptr;
  return Json{{"word", pointing->word},
              {"tensor_index", pointing->tensor_index},
              {"delta", pointing->delta},
              {"bit", number_or_null(pointing->bit)},
              {"elements", pointing->elements}};
}

Json divergence_json(const Divergence& at) {
  Json json;
  json["step"] = number_or_null(at.step);
  json["micro_step"] = number_or_null(at.micro_step);
  json["rank"] = number_or_null(at.rank);
  json["phase"] = at.phase ? Json(name(*at.phase)) : Json(nullptr);
  json["layer"] = text_or_null(at.layer);
  json["op"] = text_or_null(at.op);
  json["tensor"] = text_or_null(at.tensor);
  json["kind"] = name(at.kind);
  json["kernel"] = text_or_null(at.kernel);
  json["in_prologue"] = at.in_prologue;
  json["before"] = text_or_null(at.before);
  json["after"] = text_or_null(at.after);
  json["pointing"] = pointing_json(at.pointing);
  return json;
}

Json cause_json(const Cause& cause) {
  return Json{{"class", text_or_null(cause.cls)},
              {"class_candidates", cause.class_candidates},
              {"evidence", cause.evidence},
              {"next", text_or_null(cause.next)}};
}

Json coverage_json(const Coverage& coverage) {
  return Json{{"records_compared", coverage.records_compared},
              {"launches_compared", coverage.launches_compared},
              {"buffers_compared", coverage.buffers_compared},
              {"bytes_hashed", coverage.bytes_hashed},
              {"steps_compared", coverage.steps_compared},
              {"ranks_compared", coverage.ranks_compared},
              {"level", text_or_null(coverage.level)},
              {"frames_verified", coverage.frames_verified},
              {"limits", coverage.limits}};
}

}  // namespace

nlohmann::ordered_json to_json(const Verdict& verdict) {
  Json json;
  json["verdict"] = name(verdict.outcome);
  json["reason"] = text_or_null(verdict.reason);
  json["first"] = verdict.first ? divergence_json(*verdict.first) : Json(nullptr);
  json["also_first"] = Json::array();
  for (const Divergence& at : verdict.also_first) json["also_first"].push_back(divergence_json(at));
  json["ranks_diverged"] = verdict.ranks_diverged;
  json["cause"] = cause_json(verdict.cause);
  json["propagated"] = verdict.propagated;
  json["gaps"] = verdict.gaps;
  json["coverage"] = coverage_json(verdict.coverage);
  json["records_compared"] = verdict.coverage.records_compared;
  json["notes"] = verdict.notes;
  return json;
}

}  // namespace forkpoint
