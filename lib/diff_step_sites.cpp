// What a site is to the op that it belongs to.
#include <algorithm>
#include <array>
#include <string_view>

#include "lib/diff_step.h"

namespace forkpoint {

bool contains_layer(const std::string& outer, const std::string& inner) {
  return inner.size() > outer.size() && inner.compare(0, outer.size(), outer) == 0 &&
         (outer.empty() || inner[outer.size()] == '.');
}

bool is_op_input(const Site& site) {
  if (site.role == Role::input) return true;
  const bool computing = site.phase == Phase::forward || site.phase == Phase::backward;
  return computing && (site.role == Role::parameter || site.role == Role::batch || site.role == Role::rng);
}

bool is_op_output(const Site& site) {
  switch (site.role) {
    case Role::output: case Role::gradient: case Role::loss: return true;
    case Role::parameter: case Role::optimizer_state: return site.phase == Phase::optimizer;
    default: return false;
  }
}

bool is_hyperparameter(const Site& site) {
  static constexpr std::array<std::string_view, 16> kNames = {
      "lr", "learning_rate", "weight_decay", "wd", "momentum", "dampening", "eps", "beta1", "beta2", "betas",
      "loss_scale", "scale", "clip", "max_norm", "clip_norm", "dropout"};
  if (site.role != Role::scalar) return false;
  const std::string_view tensor = site.tensor;
  const size_t dot = tensor.rfind('.');
  const std::string_view last = dot == std::string_view::npos ? tensor : tensor.substr(dot + 1);
  return std::find(kNames.begin(), kNames.end(), last) != kNames.end();
}

bool related_layers(const std::string& left, const std::string& right) {
  return left == right || contains_layer(left, right) || contains_layer(right, left);
}

}  // namespace forkpoint
