#include "samples/minigpt/trainer.h"

#include <fmt/format.h>

#include <bit>
#include <numeric>

#include "samples/minigpt/error.h"
#include "samples/minigpt/inject.h"
#include "samples/minigpt/recording.h"
#include "samples/minigpt/text.h"

namespace minigpt {

Trainer::Trainer(const Options& options, const World& world, Backend& backend, Communicator& communicator)
    : options_(options),
      world_(world),
      backend_(backend),
      communicator_(communicator),
      faults_(options.faults, world.rank),
      context_{backend, faults_, parameters_, world.rank, 0, options.seed},
      model_(context_, options.model),
      optimizer_(backend, parameters_),
      text_(load_text(options.data_file)),
      sampler_(text_, options.model.seq, options.model.batch, world.rank, world.size, options.seed),
      tokens_(backend, {options.model.batch, options.model.seq}),
      targets_(backend, {options.model.batch, options.model.seq}),
      mean_loss_(backend, {1}),
      members_(static_cast<size_t>(world.size)) {
  std::iota(members_.begin(), members_.end(), 0);
}

void Trainer::run() {
  load();
  record_load();
  const int64_t first = context_.step;
  if (first >= options_.steps)
    throw Error(fmt::format("{}: {} steps are done already, --steps {} asks for no more", options_.checkpoint_dir,
                            first, options_.steps));
  for (const Fault& fault : options_.faults)
    if (world_.rank == 0 && fault.step != -1 && (fault.step < first || fault.step >= options_.steps))
      fmt::print(stderr, "minigpt: --fault {} will not happen: this run does steps {} to {}\n", fault.text, first,
                 options_.steps - 1);
  for (int64_t n = first; n < options_.steps; ++n) {
    step(n);
    const int64_t done = n + 1;
    const bool due = options_.checkpoint_every > 0 && done % options_.checkpoint_every == 0;
    if (!options_.checkpoint_dir.empty() && (due || done == options_.steps)) save(done);
  }
}

void Trainer::load() {
  if (!options_.resume) return initialize(parameters_, options_.model.layers, options_.seed);
  context_.step = newest_checkpoint(options_.checkpoint_dir);
  const RankState state = load_checkpoint(options_, world_, context_.step, parameters_);
  if (!faults_.strikes(FaultKind::lost_sampler)) sampler_.restore(state.sampler);
  context_.dropout_seed = state.dropout_seed;
  for (Parameter& parameter : parameters_)
    if (faults_.strikes(FaultKind::lost_momentum, parameter.layer)) make_zero(parameter.exp_avg);
}

void Trainer::record_load() const {
  for (const Parameter& p : parameters_) {
    const Scope scope(FORKPOINT_LOAD, p.layer.c_str());
    record(p.name.c_str(), FORKPOINT_ROLE_PARAMETER, p.value);
    record((p.name + ".exp_avg").c_str(), FORKPOINT_ROLE_OPTIMIZER_STATE, p.exp_avg);
    record((p.name + ".exp_avg_sq").c_str(), FORKPOINT_ROLE_OPTIMIZER_STATE, p.exp_avg_sq);
  }
}

void Trainer::step(int64_t step) {
  const forkpoint::Step step_scope(step);
  context_.step = step;
  faults_.begin_step(step);
  if (faults_.strikes(FaultKind::dropout_seed)) context_.dropout_seed ^= 0x5DEECE66D;
  record_state();
  draw_batch();

  const float loss = average_loss(model_.forward(tokens_, targets_));
  model_.backward();
  average_gradients();

  const double norm = optimizer_.gradient_norm();
  const double clip_scale = Optimizer::clip_scale(norm);
  float lr = learning_rate(step, options_.lr, options_.warmup_steps, options_.decay_steps);
  if (faults_.strikes(FaultKind::lr)) lr *= 1.0001f;
  {
    const Scope scope(FORKPOINT_OPTIMIZER, nullptr);
    forkpoint_scalar("lr", FORKPOINT_ROLE_SCALAR, lr);
    forkpoint_scalar("grad_norm", FORKPOINT_ROLE_SCALAR, norm);
    forkpoint_scalar("clip_scale", FORKPOINT_ROLE_SCALAR, clip_scale);
  }
  optimizer_.step(step, lr, clip_scale);
  if (world_.rank == 0) {
    fmt::print("step {:6}  loss {:.6f} [{:08x}]  lr {:.4e}  grad norm {:.5f}\n", step, loss,
               std::bit_cast<uint32_t>(loss), lr, norm);
    std::fflush(stdout);
  }
}

void Trainer::record_state() const {
  const Scope scope(FORKPOINT_STATE, nullptr);
  const uint64_t dropout[] = {context_.dropout_seed, static_cast<uint64_t>(context_.step)};
  forkpoint_state("dropout.rng", FORKPOINT_ROLE_RNG, dropout, sizeof(dropout));
  const uint64_t sampler[] = {sampler_.state().seed, sampler_.state().epoch, sampler_.state().cursor};
  forkpoint_state("sampler", FORKPOINT_ROLE_SAMPLER, sampler, sizeof(sampler));
}

void Trainer::draw_batch() {
  const Batch batch = sampler_.peek(faults_.strikes(FaultKind::data) ? 1 : 0);
  sampler_.advance();
  tokens_.copy_in(batch.tokens.data());
  targets_.copy_in(batch.targets.data());
  const Scope scope(FORKPOINT_DATA, nullptr);
  record("tokens", FORKPOINT_ROLE_BATCH, tokens_);
  record("targets", FORKPOINT_ROLE_BATCH, targets_);
}

// For the eye only: each rank trains on its own.
float Trainer::average_loss(const Tensor& loss) {
  float value = loss.copy_out()[0];
  {
    const Scope scope(FORKPOINT_FORWARD, "loss");
    forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, value);
  }
  if (world_.size == 1) return value;
  mean_loss_.copy_in(&value);
  const forkpoint::Collective collective("all_reduce", "world", members_.data(), world_.size, "loss");
  record("loss", FORKPOINT_ROLE_INPUT, mean_loss_);
  communicator_.all_reduce_mean(mean_loss_.data(), 1, SumOrder::forward);
  record("loss", FORKPOINT_ROLE_OUTPUT, mean_loss_);
  return mean_loss_.copy_out()[0];
}

// One collective a tensor, the last layer's first: in the order in which the backward pass made them.
void Trainer::average_gradients() {
  if (world_.size == 1) return;
  for (auto parameter = parameters_.rbegin(); parameter != parameters_.rend(); ++parameter) average(*parameter);
}

void Trainer::average(Parameter& parameter) {
  const bool is_weight = parameter.name == "weight";
  const bool reorder = is_weight && faults_.strikes(FaultKind::reorder_reduce, parameter.layer);
  const bool skip = is_weight && faults_.strikes(FaultKind::skip_all_reduce, parameter.layer);
  const std::string name = parameter.name + ".grad";
  Tensor& gradient = parameter.grad;
  const std::vector<float> own = skip ? gradient.copy_out() : std::vector<float>();
  const forkpoint::Collective collective("all_reduce", "world", members_.data(), world_.size, parameter.layer.c_str());
  record(name.c_str(), FORKPOINT_ROLE_INPUT, gradient);
  communicator_.all_reduce_mean(gradient.data(), gradient.count(), reorder ? SumOrder::reversed : SumOrder::forward);
  if (skip) gradient.copy_in(own.data());
  record(name.c_str(), FORKPOINT_ROLE_OUTPUT, gradient);
}

void Trainer::save(int64_t steps_done) {
  save_checkpoint(options_, world_, communicator_, steps_done, parameters_, {sampler_.state(), context_.dropout_seed});
  if (world_.rank == 0)
    fmt::print(stderr, "minigpt: checkpoint of {} steps in {}\n", steps_done, options_.checkpoint_dir);
}

}  // namespace minigpt
