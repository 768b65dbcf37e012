#include "tests/support/launch_training.h"

#include <algorithm>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr uint64_t kWords = 64;

class Trainer {
 public:
  Trainer(const LaunchTraining& options, int rank)
      : options_(options), rank_(rank), program_(std::make_unique<LaunchProgram>(options.machine, rank)) {}

  std::unique_ptr<LaunchProgram> run() {
    w1_ = weights("fc1", 1), w2_ = weights("fc2", 2);
    workspace_ = program_->allocate(16);
    program_->set(workspace_, 0);
    if (!options_.temporaries) allocate();
    for (step_ = 0; step_ < options_.steps; ++step_) {
      if (options_.step_marks) program_->step(step_);
      step();
    }
    if (!options_.temporaries) release();
    program_->release(workspace_);
    return std::move(program_);
  }

 private:
  DeviceBuffer weights(const std::string& layer, uint64_t seed) {
    const DeviceBuffer buffer = program_->allocate(kWords);
    program_->scope(Phase::load, layer).copy_from_host(buffer, words_of(seed, kWords));
    if (options_.records && options_.prologue) program_->record(Role::parameter, "weight", buffer);
    return buffer;
  }

  void allocate() {
    for (DeviceBuffer* buffer : {&x_, &h1_, &h2_, &h3_, &g3_, &g2_, &g1_}) *buffer = program_->allocate(kWords);
    loss_ = program_->allocate(1);
  }
  void release() {
    for (const DeviceBuffer* buffer : {&x_, &h1_, &h2_, &h3_, &g3_, &g2_, &g1_, &loss_}) program_->release(*buffer);
  }

  void launch(const std::string& name, const std::vector<Parameter>& parameters, const KernelBody& body) {
    LaunchTraining::Launch at{*program_, rank_, step_, name, parameters, body, {}};
    if (options_.before) options_.before(at);
    if (!at.skip) program_->kernel(at.name, at.parameters, at.body, at.options);
  }

  void record(Role role, const std::string& tensor, const DeviceBuffer& buffer) {
    if (options_.records) program_->record(role, tensor, buffer);
  }

  void step() {
    if (options_.temporaries) allocate();
    program_->scope(Phase::data)
        .copy_from_host(x_, words_of(100 + static_cast<uint64_t>(step_) * 16 + static_cast<uint64_t>(rank_), kWords));
    record(Role::batch, "tokens", x_);
    program_->scope(Phase::forward, "fc1", "aten::mm");
    launch("gemm1", {to(x_), to(w1_), to(h1_)}, combined());
    record(Role::output, "output", h1_);
    program_->scope(Phase::forward, "gelu", "aten::gelu");
    launch("gelu", {to(h1_), to(h2_), word(3)}, combined());
    program_->scope(Phase::forward, "fc2", "aten::mm");
    launch("gemm2", {to(h2_), to(w2_), to(h3_)}, combined());
    record(Role::output, "output", h3_);
    program_->scope(Phase::forward, "loss", "aten::sum");
    launch("reduce", {to(h3_), to(workspace_), to(loss_)}, reduce());
    program_->copy_to_host(loss_);
    program_->scope(Phase::backward, "fc2");
    launch("loss_grad", {to(h3_), to(g3_)}, combined());
    launch("wgrad2", {to(h2_), to(g3_), to(g2_)}, combined());
    record(Role::gradient, "weight.grad", g2_);
    program_->scope(Phase::backward, "fc1");
    launch("wgrad1", {to(x_), to(g3_), to(g1_)}, combined());
    record(Role::gradient, "weight.grad", g1_);
    if (options_.reduce_gradients) options_.reduce_gradients(*program_, rank_, step_, g2_);
    update("fc2", w2_, g2_);
    update("fc1", w1_, g1_);
    if (options_.temporaries) release();
  }

  void update(const std::string& layer, const DeviceBuffer& weight, const DeviceBuffer& gradient) {
    program_->scope(Phase::optimizer, layer);
    launch("sgd", {to(weight), to(gradient), word(1)}, [](KernelCall& call) {
      for (size_t i = 0; i < call.buffers[0].size(); ++i)
        call.buffers[0][i] += call.buffers[1][i] * static_cast<uint32_t>(call.numbers[0]);
    });
    record(Role::parameter, "weight", weight);
  }

  // A sum, with a workspace that the launch fills anew and that says nothing about its result.
  KernelBody reduce() const {
    const bool noise = options_.noise && step_ <= options_.last_noise;
    const uint32_t left =
        static_cast<uint32_t>(step_) + (noise ? static_cast<uint32_t>(options_.machine.garbage) * 77 : 0);
    return [left](KernelCall& call) {
      for (uint32_t& at : call.buffers[1]) at = left;
      call.buffers[2][0] = 0;
      for (const uint32_t at : call.buffers[0]) call.buffers[2][0] += at;
    };
  }

  const LaunchTraining& options_;
  const int rank_;
  int64_t step_ = 0;
  std::unique_ptr<LaunchProgram> program_;
  DeviceBuffer w1_, w2_, workspace_, x_, h1_, h2_, h3_, g3_, g2_, g1_, loss_;
};

}  // namespace

KernelBody combined() {
  return [](KernelCall& call) {
    const auto& out = call.buffers.back();
    for (size_t i = 0; i < out.size(); ++i) {
      uint64_t hash = 17;
      for (size_t k = 0; k + 1 < call.buffers.size(); ++k)
        hash = mix64(hash ^ call.buffers[k][i % call.buffers[k].size()]);
      for (const uint64_t number : call.numbers) hash = mix64(hash ^ number);
      out[i] = static_cast<uint32_t>(hash);
    }
  };
}

KernelBody accumulated() {
  return [](KernelCall& call) {
    for (size_t i = 0; i < call.buffers.back().size(); ++i)
      call.buffers.back()[i] += call.buffers[0][i % call.buffers[0].size()];
  };
}

KernelBody then(const KernelBody& body, const std::function<void(KernelCall&)>& fault) {
  return [body, fault](KernelCall& call) {
    body(call);
    fault(call);
  };
}

std::function<void(KernelCall&)> flip(size_t buffer, size_t word, int bit) {
  return [=](KernelCall& call) { call.buffers[buffer][word % call.buffers[buffer].size()] ^= 1u << bit; };
}

std::function<void(LaunchTraining::Launch&)> at_launch(const std::string& name, int64_t step,
                                                       const std::function<void(LaunchTraining::Launch&)>& change) {
  return [=](LaunchTraining::Launch& at) {
    if (at.name == name && (step < 0 || at.step == step)) change(at);
  };
}

std::unique_ptr<LaunchProgram> train(const LaunchTraining& options, int rank) { return Trainer(options, rank).run(); }

LaunchTraining faulty(const LaunchTraining& base, const std::function<void(LaunchTraining::Launch&)>& before) {
  LaunchTraining options = base;
  options.before = before;
  return options;
}

bool is_launch(const Verdict& verdict, const std::string& kernel, int64_t step, int rank) {
  const Divergence& at = first_of(verdict);
  return at.kind == Kind::launch && at.kernel == kernel && at.step == step && at.rank == rank;
}

bool may_be(const Verdict& verdict, const std::string& cls) {
  const auto& list = verdict.cause.class_candidates;
  return std::find(list.begin(), list.end(), cls) != list.end();
}

Machine another_machine(const Machine& machine) {
  Machine other = machine;
  other.base_address += 0x10002000;
  other.first_allocation += 5;
  other.first_stream += 3;
  other.garbage += 1;
  return other;
}

Verdict diff_programs(const std::vector<LaunchProgram*>& a, const std::vector<LaunchProgram*>& b,
                      const DiffOptions& options) {
  const TemporaryFolder folder;
  return diff_folders(LaunchRun(a).write(folder / "a"), LaunchRun(b).write(folder / "b"), options);
}

Verdict diff_trainings(const LaunchTraining& a, LaunchTraining b, const DiffOptions& options) {
  b.machine = another_machine(b.machine);
  const auto in_a = train(a), in_b = train(b);
  return diff_programs({in_a.get()}, {in_b.get()}, options);
}

}  // namespace forkpoint
