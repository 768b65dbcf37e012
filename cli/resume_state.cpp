#include "cli/resume_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace forkpoint {
namespace {

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// Names as the bridge, minigpt and torch.optim write them. Empty: not the name of a state.
std::string state_by_name(const std::string& name) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"rng", "random-number generator"},
                                                                             {"generator", "random-number generator"},
                                                                             {"seed", "random-number generator"},
                                                                             {"sampler", "position in the data"},
                                                                             {"max_exp_avg_sq", "second moments"},
                                                                             {"exp_avg_sq", "second moments"},
                                                                             {"exp_avg", "momentum"},
                                                                             {"momentum_buffer", "momentum"},
                                                                             {"growth_tracker", "loss scale"},
                                                                             {"loss_scale", "loss scale"},
                                                                             {"scale", "loss scale"},
                                                                             {"master", "master weights"}};
  for (const auto& [part, state] : kNames) {
    if (has(name, part)) return std::string(state);
  }
  return name == "lr" || name.ends_with(".lr") || has(name, "learning_rate") ? "schedule (learning rate)" : "";
}

std::string state_of(const Divergence& place) {
  const std::string state = state_by_name(lower(place.tensor));
  if (place.kind == Kind::structure || place.phase == Phase::forward || place.phase == Phase::backward) return "";
  if (!state.empty()) return state;
  if (place.phase == Phase::data) return "position in the data";
  if (place.phase == Phase::load) return "weights";
  return place.phase == Phase::state ? "state" : "";
}

}  // namespace

std::vector<std::string> states_of(const Verdict& verdict, int64_t first_step) {
  std::vector<const Divergence*> places;
  if (verdict.first) places.push_back(&*verdict.first);
  for (const Divergence& place : verdict.also_first) places.push_back(&place);
  std::vector<std::string> found, kinds;
  for (const Divergence* place : places) {
    if (!place->in_prologue && place->step != first_step) continue;
    std::string state = state_of(*place);
    if (state.empty() || std::find(kinds.begin(), kinds.end(), state) != kinds.end()) continue;
    kinds.push_back(state);
    found.push_back(fmt::format("{} ({}{}{})", state, place->tensor, place->layer.empty() ? "" : " of ", place->layer));
  }
  return found;
}

}  // namespace forkpoint
