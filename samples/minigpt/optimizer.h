#pragma once

#include <deque>

#include "samples/minigpt/tensor.h"

namespace minigpt {

// Linear warm-up, then a cosine down to a tenth. A step's rate does not depend on how many steps the run has.
float learning_rate(int64_t step, float peak, int64_t warmup_steps, int64_t decay_steps);

// AdamW with weight decay on matrices only, and clipping of the gradients' global norm.
class Optimizer {
 public:
  Optimizer(Backend& backend, std::deque<Parameter>& parameters)
      : backend_(backend), parameters_(parameters), sums_(backend, {static_cast<int64_t>(parameters.size())}) {}
  double gradient_norm();
  // What gradients are multiplied with so that their norm is at most 1. NaN for a norm that is NaN.
  static double clip_scale(double norm);
  void step(int64_t step, float lr, double clip_scale);

 private:
  Backend& backend_;
  std::deque<Parameter>& parameters_;
  Array<double> sums_;
};

}  // namespace minigpt
