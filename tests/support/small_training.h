// A data-parallel training in miniature whose values follow from each other, so that a planted fault spreads as it
// would: through layers, collectives and updates. Every value is a hash of what it is computed from.
//
// A rank's step, in order: generator state; batch tokens; per layer forward: input, weight, output; loss; per layer
// (last first) backward: grad_output, grad_input, weight.grad; per layer all_reduce of weight.grad; lr; per layer
// optimizer: weight, weight.exp_avg. Before the first step: weight and weight.exp_avg of every layer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/support/run_builder.h"

namespace forkpoint {

// What a value is; forms other than plain are the plain one with something done to it.
struct Content {
  uint64_t id = 0;
  enum Form { plain, bit_flipped, permuted_words, nan, zero } form = plain;
  friend bool operator==(const Content&, const Content&) = default;
};

// A record as it is about to be made. The hook may change the content; what is computed from it changes along.
struct Moment {
  int rank;
  int64_t step;  // kPrologueStep: loading
  int micro;
  Phase phase;
  std::string layer, tensor;
  Role role;
  const Content* own_input = nullptr;  // of a collective's output
};
using Hook = std::function<void(const Moment&, Content*)>;

struct SmallTraining {
  int ranks = 4;
  int64_t steps = 4;         // up to this one, exclusive
  int64_t first_step = 0;    // above 0: resumed, with the state that a straight run has there
  int layers = 3;
  int micro_steps = 1;
  Level level = Level::layer;
  bool prologue = true;
  bool collectives = true;   // recorded (they happen in any case)
  Hook hook;                 // of the recorded part
  Hook past;                 // of the steps before first_step, which are not recorded
};

void plant(RunBuilder* run, const SmallTraining& options);
std::string layer_name(int layer);  // "blocks.1.fc"

// Changes the content of one record: same step, rank, phase, layer and tensor. Negative step or rank: all.
struct Fault {
  int64_t step = 0;
  int rank = 0;
  Phase phase = Phase::forward;
  std::string layer, tensor;
  Content::Form form = Content::plain;  // plain: an unrelated value
};
Hook fault(const Fault& fault);
Hook keep_own_gradient(int64_t step, int rank, const std::string& layer);  // instead of the all_reduce's output
Hook both(const Hook& one, const Hook& other);

}  // namespace forkpoint
