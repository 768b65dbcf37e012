#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/show.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// As it stands in the file, with fields that this version does not know.
Json manifest_json(const std::string& directory) {
  std::ifstream file(std::filesystem::path(directory) / "run.json");
  Json json = Json::parse(file, nullptr, false);
  return json.is_discarded() ? Json(nullptr) : json;
}

Json optional_step(const std::optional<int64_t>& step) { return step ? Json(*step) : Json(nullptr); }

Json rank_json(const RankOverview& rank) {
  return {{"rank", rank.rank},
          {"state", rank.state},
          {"host", rank.host},
          {"device", rank.device},
          {"steps", rank.steps},
          {"complete_steps", rank.complete_steps},
          {"first_step", optional_step(rank.first_step)},
          {"last_step", optional_step(rank.last_step)},
          {"records", rank.records},
          {"launches", rank.launches},
          {"bytes_hashed", rank.bytes_hashed},
          {"size_bytes", rank.size_bytes}};
}

Json layer_json(const std::string& layer, const LayerOverview& content) {
  Json phases = Json::array();
  for (const Phase phase : content.phases) phases.push_back(name(phase));
  return {{"layer", layer}, {"phases", phases}, {"tensors", content.tensors}};
}

// JSON has no NaN and no infinity; these are strings then.
Json number_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

}  // namespace

std::string overview_json(const Overview& overview) {
  Json json;
  json["run"] = overview.directory;
  json["state"] = overview.state;
  json["manifest"] = manifest_json(overview.directory);
  json["ranks"] = Json::array();
  for (const RankOverview& rank : overview.ranks) json["ranks"].push_back(rank_json(rank));
  json["missing_ranks"] = overview.missing_ranks;
  json["step_count"] = overview.steps.size();
  json["first_step"] = overview.steps.empty() ? Json(nullptr) : Json(*overview.steps.begin());
  json["last_step"] = overview.steps.empty() ? Json(nullptr) : Json(*overview.steps.rbegin());
  json["incomplete_steps"] = overview.incomplete_steps;
  json["record_count"] = overview.records;
  json["launch_count"] = overview.launches;
  json["bytes_hashed"] = overview.bytes_hashed;
  json["size_bytes"] = overview.size_bytes;
  json["layers"] = Json::array();
  for (const auto& [layer, content] : overview.layers) json["layers"].push_back(layer_json(layer, content));
  json["gaps"] = overview.gaps;
  json["coverage_limits"] = overview.limits;
  std::string text = dump(json);
  text.pop_back();
  return text;
}

std::string step_json(const StepRows& step) {
  return dump({{"rank", step.stream->header().rank},
               {"step", step.summary->step},
               {"complete", step.summary->complete},
               {"records", step.summary->records},
               {"launches", step.summary->launches},
               {"bytes_hashed", step.summary->bytes_hashed},
               {"digest", hex(step.summary->digest)},
               {"launch_digest", step.summary->launches == 0 ? Json(nullptr) : Json(hex(step.summary->launch_sum))}});
}

std::string record_json(const StepRows& step, const Record& record) {
  const Site& site = step.stream->sites()[record.site];
  const auto layouts = step.stream->layouts();
  const Layout* layout = record.layout < layouts.size() ? &layouts[record.layout] : nullptr;
  const bool is_scalar = site.kind == Kind::scalar;
  const bool is_shard = layout && layout->is_shard();
  Json json{{"step", step.summary->step},
            {"rank", step.stream->header().rank},
            {"micro_step", record.micro_step},
            {"call", record.call},
            {"phase", name(site.phase)},
            {"layer", text_or_null(site.layer)},
            {"op", text_or_null(site.op)},
            {"tensor", text_or_null(site.tensor)},
            {"kind", name(site.kind)},
            {"role", name(site.role)},
            {"communicator", text_or_null(site.communicator)},
            {"dtype", layout && !is_scalar ? Json(name(layout->dtype)) : Json(nullptr)},
            {"shape", layout && !is_scalar ? Json(layout->shape) : Json(nullptr)},
            {"global_shape", is_shard ? Json(layout->global_shape) : Json(nullptr)},
            {"global_offset", is_shard ? Json(layout->global_offset) : Json(nullptr)},
            {"digest", hex(record.digest)},
            {"absmax", is_scalar ? Json(nullptr) : number_json(record.stats.absmax)},
            {"nonfinite", is_scalar ? Json(nullptr) : Json(record.stats.nonfinite)},
            {"value", is_scalar ? number_json(scalar_value(record.digest)) : Json(nullptr)},
            {"eval", (record.flags & kRecordEval) != 0},
            {"recompute", (record.flags & kRecordRecompute) != 0}};
  return dump(json);
}

}  // namespace forkpoint
