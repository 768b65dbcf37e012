#include "lib/run_knobs.h"

#include <nlohmann/json.hpp>

#include "lib/error.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kField[] = "knobs";

// Fields that the manifest's reader leaves to others.
Json other_fields(const Manifest& manifest) {
  const Json fields = Json::parse(manifest.unknown_fields, nullptr, false);
  return fields.is_object() ? fields : Json::object();
}

}  // namespace

std::vector<RecordedKnob> recorded_knobs(const Manifest& manifest) {
  std::vector<RecordedKnob> knobs;
  const Json fields = other_fields(manifest);
  const auto list = fields.find(kField);
  if (list == fields.end()) return knobs;
  try {
    for (const Json& object : *list) {
      knobs.push_back({object.at("name").get<std::string>(), object.at("state").get<std::string>(), object.value("value", ""),
                       object.value("problem", "")});
    }
  } catch (const nlohmann::json::exception&) {
    throw Error("run.json: field \"knobs\" is no list of knobs, each with name and state.", "Correct the field or restore the file.");
  }
  return knobs;
}

void set_recorded_knobs(const std::vector<RecordedKnob>& knobs, Manifest* manifest) {
  Json list = Json::array();
  for (const RecordedKnob& knob : knobs) {
    Json object = {{"name", knob.name}, {"state", knob.state}, {"value", knob.value}};
    if (!knob.problem.empty()) object["problem"] = knob.problem;
    list.push_back(std::move(object));
  }
  Json fields = other_fields(*manifest);
  fields[kField] = std::move(list);
  manifest->unknown_fields = fields.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string knobs_in_force(const Manifest& manifest) {
  std::string names;
  for (const RecordedKnob& knob : recorded_knobs(manifest)) {
    if (knob.in_force()) names += (names.empty() ? "" : ",") + knob.name;
  }
  return names;
}

}  // namespace forkpoint
