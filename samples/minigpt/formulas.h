// Formulas of one element, written once for both backends.
#pragma once

#include <cmath>

#include "samples/minigpt/philox.h"

namespace minigpt {

// GELU in its tanh form, as GPT-2 has it.
MINIGPT_HD inline float gelu(float x) {
  constexpr float kSqrt2OverPi = 0.7978845608f;
  return 0.5f * x * (1.0f + tanhf(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
}
MINIGPT_HD inline float gelu_slope(float x) {
  constexpr float kSqrt2OverPi = 0.7978845608f;
  const float t = tanhf(kSqrt2OverPi * (x + 0.044715f * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kSqrt2OverPi * (1.0f + 3 * 0.044715f * x * x);
}

inline constexpr float kLayerNormEpsilon = 1e-5f;

// One step of AdamW (Loshchilov, Hutter 2019).
struct AdamWStep {
  float lr, beta1, beta2, epsilon, weight_decay;
  float correction1, correction2;  // 1 - beta^t
  float gradient_scale;            // from gradient clipping
};
MINIGPT_HD inline void adamw_element(const AdamWStep& s, float& weight, float& exp_avg, float& exp_avg_sq,
                                     float gradient) {
  gradient *= s.gradient_scale;
  exp_avg = s.beta1 * exp_avg + (1 - s.beta1) * gradient;
  exp_avg_sq = s.beta2 * exp_avg_sq + (1 - s.beta2) * gradient * gradient;
  const float update = (exp_avg / s.correction1) / (sqrtf(exp_avg_sq / s.correction2) + s.epsilon);
  weight -= s.lr * (update + s.weight_decay * weight);
}

}  // namespace minigpt
