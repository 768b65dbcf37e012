#pragma once

#include <deque>
#include <string>

#include "samples/minigpt/checkpoint.h"
#include "samples/minigpt/model.h"
#include "samples/minigpt/optimizer.h"
#include "samples/minigpt/options.h"
#include "samples/minigpt/sampler.h"

namespace minigpt {

// One rank's training run.
class Trainer {
 public:
  Trainer(const Options& options, const World& world, Backend& backend, Communicator& communicator);
  // From the first step, or the checkpoint's, to the last. Rank 0 prints a line a step.
  void run();

 private:
  void load();
  void record_load() const;
  void step(int64_t step);
  void record_state() const;
  void draw_batch();
  float average_loss(const Tensor& loss);
  void average_gradients();
  void average(Parameter& parameter);
  void save(int64_t steps_done);

  const Options& options_;
  World world_;
  Backend& backend_;
  Communicator& communicator_;
  FaultPlan faults_;
  std::deque<Parameter> parameters_;
  Context context_;
  Model model_;
  Optimizer optimizer_;
  std::string text_;
  Sampler sampler_;
  TokenTensor tokens_, targets_;
  Tensor mean_loss_;
  std::vector<int32_t> members_;  // all ranks, for forkpoint
};

}  // namespace minigpt
