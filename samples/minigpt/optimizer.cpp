#include "samples/minigpt/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "samples/minigpt/recording.h"

namespace minigpt {

float learning_rate(int64_t step, float peak, int64_t warmup_steps, int64_t decay_steps) {
  if (step < warmup_steps) return peak * static_cast<float>(step + 1) / static_cast<float>(warmup_steps);
  const double progress = std::min(1.0, static_cast<double>(step - warmup_steps) / static_cast<double>(decay_steps));
  return static_cast<float>(peak * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * progress))));
}

double Optimizer::gradient_norm() {
  int64_t index = 0;
  for (const Parameter& parameter : parameters_)
    backend_.sum_of_squares(sums_.data() + index++, parameter.grad.data(), parameter.grad.count());
  double total = 0;
  for (const double sum : sums_.copy_out()) total += sum;
  return std::sqrt(total);
}

double Optimizer::clip_scale(double norm) {
  constexpr double kLargestNorm = 1.0;
  return norm <= kLargestNorm ? 1.0 : kLargestNorm / norm;
}

void Optimizer::step(int64_t step, float lr, double clip_scale) {
  constexpr double kBeta1 = 0.9, kBeta2 = 0.95;
  const double t = static_cast<double>(step + 1);
  AdamWStep formula = {};
  formula.lr = lr;
  formula.beta1 = kBeta1;
  formula.beta2 = kBeta2;
  formula.epsilon = 1e-8f;
  formula.correction1 = static_cast<float>(1 - std::pow(kBeta1, t));
  formula.correction2 = static_cast<float>(1 - std::pow(kBeta2, t));
  formula.gradient_scale = static_cast<float>(clip_scale);
  for (Parameter& p : parameters_) {
    formula.weight_decay = p.value.shape().size() > 1 ? 0.1f : 0.0f;
    backend_.adamw(p.value.data(), p.exp_avg.data(), p.exp_avg_sq.data(), p.grad.data(), p.value.count(), formula);
    const Scope scope(FORKPOINT_OPTIMIZER, p.layer.c_str());
    record(p.name.c_str(), FORKPOINT_ROLE_PARAMETER, p.value);
    record((p.name + ".exp_avg").c_str(), FORKPOINT_ROLE_OPTIMIZER_STATE, p.exp_avg);
    record((p.name + ".exp_avg_sq").c_str(), FORKPOINT_ROLE_OPTIMIZER_STATE, p.exp_avg_sq);
  }
}

}  // namespace minigpt
