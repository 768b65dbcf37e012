#include "tests/support/small_training.h"

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

uint64_t number_of(const Content& content) { return mix64(content.id + static_cast<uint64_t>(content.form)); }

Content from(std::initializer_list<Content> parts, uint64_t what) {
  uint64_t id = mix64(what + 77);
  for (const Content& part : parts) id = mix64(id ^ number_of(part));
  return {id, Content::plain};
}

Value to_value(const Content& content) {
  switch (content.form) {
    case Content::bit_flipped: return flipped(content.id, 17, 20);
    case Content::permuted_words: return permuted(content.id);
    case Content::nan: return with_nan(content.id);
    case Content::zero: return zeros();
    case Content::plain: break;
  }
  return value(content.id);
}

class Trainer {
 public:
  Trainer(RunBuilder* run, const SmallTraining& options) : run_(run), o_(options) {
    for (int rank = 0; rank < o_.ranks; ++rank) {
      for (int layer = 0; layer < o_.layers; ++layer) {
        weights_.push_back(from({}, static_cast<uint64_t>(1000 + layer)));
        momenta_.push_back({0, Content::zero});
      }
    }
  }

  void train() {
    for (int64_t step = 0; step < o_.first_step; ++step) train_step(step);
    recording_ = true;
    if (o_.prologue) load();
    for (int64_t step = o_.first_step; step < o_.steps; ++step) {
      for (int rank = 0; rank < o_.ranks; ++rank) run_->rank(rank).step(step);
      train_step(step);
    }
  }

 private:
  size_t at(int rank, int layer) const { return static_cast<size_t>(rank * o_.layers + layer); }

  Content see(int rank, int64_t step, int micro, Phase phase, const std::string& layer, Role role,
              const std::string& tensor, Content content, const Content* own_input = nullptr) {
    const Hook& hook = recording_ ? o_.hook : o_.past;
    if (hook) hook({rank, step, micro, phase, layer, tensor, role, own_input}, &content);
    if (!recording_) return content;
    const bool fine = (role == Role::input || role == Role::output) && phase != Phase::collective;
    if (fine && o_.level == Level::step) return content;
    if (phase == Phase::collective && !o_.collectives) return content;
    RankBuilder& builder = run_->rank(rank).micro(micro);
    if (phase == Phase::collective) {
      std::vector<int> members;
      for (int member = 0; member < o_.ranks; ++member) members.push_back(member);
      builder.collective("all_reduce", layer, "world", members);
    } else {
      builder.at(phase, layer);
    }
    if (role == Role::rng) builder.state(tensor, role, number_of(content));
    else if (role == Role::scalar) builder.scalar(tensor, static_cast<double>(number_of(content) % 1000) / 1000);
    else builder.add(role, tensor, to_value(content));
    return content;
  }

  void load() {
    for (int rank = 0; rank < o_.ranks; ++rank) {
      run_->rank(rank).prologue();
      for (int layer = 0; layer < o_.layers; ++layer) {
        Content &weight = weights_[at(rank, layer)], &momentum = momenta_[at(rank, layer)];
        weight = see(rank, kPrologueStep, 0, Phase::load, layer_name(layer), Role::parameter, "weight", weight);
        momentum = see(rank, kPrologueStep, 0, Phase::load, layer_name(layer), Role::optimizer_state, "weight.exp_avg",
                       momentum);
      }
    }
  }

  void train_step(int64_t step) {
    std::vector<Content> gradients(weights_.size());
    for (int rank = 0; rank < o_.ranks; ++rank) {
      const Content seed = see(rank, step, 0, Phase::state, "", Role::rng, "dropout.rng",
                               from({}, static_cast<uint64_t>(5000 + step * 64 + rank)));
      for (int micro = 0; micro < o_.micro_steps; ++micro) pass(rank, step, micro, seed, &gradients);
    }
    for (int layer = o_.layers; layer-- > 0;) reduce(step, layer, &gradients);
    for (int rank = 0; rank < o_.ranks; ++rank) update(rank, step, gradients);
  }

  void pass(int rank, int64_t step, int micro, const Content& seed, std::vector<Content>* gradients) {
    const uint64_t batch = static_cast<uint64_t>(9000 + (step * o_.ranks + rank) * o_.micro_steps + micro);
    Content x = see(rank, step, micro, Phase::data, "", Role::batch, "tokens", from({}, batch));
    x = from({x, seed}, 1);
    std::vector<Content> inputs;
    for (int layer = 0; layer < o_.layers; ++layer) {
      const std::string name = layer_name(layer);
      Content& weight = weights_[at(rank, layer)];
      x = see(rank, step, micro, Phase::forward, name, Role::input, "input", x);
      inputs.push_back(x);
      weight = see(rank, step, micro, Phase::forward, name, Role::input, "weight", weight);
      x = see(rank, step, micro, Phase::forward, name, Role::output, "output", from({x, weight}, 2));
    }
    const Content loss = see(rank, step, micro, Phase::forward, "", Role::loss, "loss", from({x}, 3));
    Content gradient = from({loss}, 4);
    for (int layer = o_.layers; layer-- > 0;) {
      const std::string name = layer_name(layer);
      const Content& input = inputs[static_cast<size_t>(layer)];
      Content& sum = (*gradients)[at(rank, layer)];
      gradient = see(rank, step, micro, Phase::backward, name, Role::input, "grad_output", gradient);
      const Content own = from({gradient, input, sum}, 5);
      gradient = see(rank, step, micro, Phase::backward, name, Role::output, "grad_input",
                     from({gradient, weights_[at(rank, layer)]}, 6));
      sum = see(rank, step, micro, Phase::backward, name, Role::gradient, "weight.grad", own);
    }
  }

  void reduce(int64_t step, int layer, std::vector<Content>* gradients) {
    Content sum{0, Content::plain};
    for (int rank = 0; rank < o_.ranks; ++rank) {
      Content& own = (*gradients)[at(rank, layer)];
      own = see(rank, step, 0, Phase::collective, layer_name(layer), Role::input, "weight.grad", own);
      sum.id += number_of(own);
    }
    for (int rank = 0; rank < o_.ranks; ++rank) {
      Content& own = (*gradients)[at(rank, layer)];
      const Content input = own;
      own = see(rank, step, 0, Phase::collective, layer_name(layer), Role::output, "weight.grad", sum, &input);
    }
  }

  void update(int rank, int64_t step, const std::vector<Content>& gradients) {
    const Content rate = see(rank, step, 0, Phase::optimizer, "", Role::scalar, "lr", from({}, 7));
    for (int layer = 0; layer < o_.layers; ++layer) {
      Content &weight = weights_[at(rank, layer)], &momentum = momenta_[at(rank, layer)];
      momentum = from({momentum, gradients[at(rank, layer)]}, 8);
      weight = see(rank, step, 0, Phase::optimizer, layer_name(layer), Role::parameter, "weight",
                   from({weight, momentum, rate}, 9));
      momentum =
          see(rank, step, 0, Phase::optimizer, layer_name(layer), Role::optimizer_state, "weight.exp_avg", momentum);
    }
  }

  RunBuilder* run_;
  const SmallTraining& o_;
  std::vector<Content> weights_, momenta_;
  bool recording_ = false;
};

}  // namespace

void plant(RunBuilder* run, const SmallTraining& options) { Trainer(run, options).train(); }

std::string layer_name(int layer) { return "blocks." + std::to_string(layer) + ".fc"; }

Hook fault(const Fault& fault) {
  return [fault](const Moment& moment, Content* content) {
    const bool here = (fault.step < 0 || moment.step == fault.step) && (fault.rank < 0 || moment.rank == fault.rank) &&
                      moment.phase == fault.phase && moment.layer == fault.layer && moment.tensor == fault.tensor &&
                      (moment.phase != Phase::collective || moment.role == Role::output);
    if (!here) return;
    if (fault.form == Content::plain) content->id = mix64(content->id + 1);
    else content->form = fault.form;
  };
}

Hook keep_own_gradient(int64_t step, int rank, const std::string& layer) {
  return [=](const Moment& moment, Content* content) {
    if (moment.own_input && moment.step == step && moment.rank == rank && moment.layer == layer)
      *content = *moment.own_input;
  };
}

Hook both(const Hook& one, const Hook& other) {
  return [one, other](const Moment& moment, Content* content) {
    one(moment, content);
    other(moment, content);
  };
}

}  // namespace forkpoint
