// A training in miniature for the small GPU (launch_program.h): two layers, a loss that the host reads, gradients and
// an update. Hooks plant faults in single launches; what follows from them follows.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/launch_program.h"
#include "tests/support/verdict_check.h"

namespace forkpoint {

// Kernels of a step, in order: gemm1 (x, w1 -> h1), gelu (h1 -> h2), gemm2 (h2, w2 -> h3), reduce (h3, workspace ->
// loss), loss_grad (h3 -> g3), wgrad2 (h2, g3 -> g2), wgrad1 (x, g3 -> g1), sgd (w2, g2, lr), sgd (w1, g1, lr). The
// loss is copied to the host after `reduce`.
struct LaunchTraining {
  Machine machine;
  int64_t steps = 3;
  bool records = true;      // layer outputs, gradients and weights
  bool noise = false;       // `reduce` leaves something else in its workspace in every recording
  bool temporaries = true;  // activations are allocated and released in each step; else once, and used again
  bool step_marks = true;   // else everything stands before the first step
  bool prologue = true;     // weights are loaded and recorded
  int64_t last_noise = 99;  // step

  // One launch, before it is queued: its name, parameters, body and options may be changed, launches may be put before
  // it.
  struct Launch {
    LaunchProgram& program;
    int rank;
    int64_t step;
    std::string name;
    std::vector<Parameter> parameters;
    KernelBody body;
    LaunchOptions options;
    bool skip = false;
  };
  std::function<void(Launch&)> before;
  std::function<void(LaunchProgram&, int rank, int64_t step, const DeviceBuffer& gradient)> reduce_gradients;
};

// Runs the program of one rank.
std::unique_ptr<LaunchProgram> train(const LaunchTraining& options, int rank = 0);

// out[i] = hash of all other buffers' i-th words and the numbers; the last buffer is the output.
KernelBody combined();
// out[i] += in[i].
KernelBody accumulated();
// The body, then `fault` on what it left.
KernelBody then(const KernelBody& body, const std::function<void(KernelCall&)>& fault);
std::function<void(KernelCall&)> flip(size_t buffer, size_t word = 3, int bit = 5);

// A hook for one kernel of one step; negative: all.
std::function<void(LaunchTraining::Launch&)> at_launch(const std::string& name, int64_t step,
                                                       const std::function<void(LaunchTraining::Launch&)>& change);

// The training with a hook.
LaunchTraining faulty(const LaunchTraining& base, const std::function<void(LaunchTraining::Launch&)>& before);

// The first divergence is a launch of this kernel.
bool is_launch(const Verdict& verdict, const std::string& kernel, int64_t step, int rank = 0);
// One of the remaining classes.
bool may_be(const Verdict& verdict, const std::string& cls);

// The same job on another machine: other addresses, allocation numbers, streams, and other bytes in fresh memory.
Machine another_machine(const Machine& machine);

// Writes two runs and compares them. B runs on another machine.
Verdict diff_trainings(const LaunchTraining& a, LaunchTraining b, const DiffOptions& options = {});
Verdict diff_programs(const std::vector<LaunchProgram*>& a, const std::vector<LaunchProgram*>& b,
                      const DiffOptions& options = {});

}  // namespace forkpoint
