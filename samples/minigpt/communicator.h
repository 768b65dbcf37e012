#pragma once

#include <cstdint>
#include <memory>

#include "samples/minigpt/options.h"
#include "samples/minigpt/world.h"

namespace minigpt {

enum class SumOrder { forward, reversed };

// The ranks of a job as one. Collective: every rank makes the same calls in the same order. Throws Error when a rank is
// gone.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // Replaces data on every rank by the mean over all ranks, summed in rank order (CPU) or in NCCL's (CUDA).
  // order: reversed sums from the last rank to the first.
  virtual void all_reduce_mean(float* data, int64_t count, SumOrder order) = 0;
  virtual void barrier() = 0;
};

class SoloCommunicator : public Communicator {
 public:
  void all_reduce_mean(float*, int64_t, SumOrder) override {}
  void barrier() override {}
};

// Ranks on one host, over shared memory. Deterministic: ranks are added in order, whoever comes first.
std::unique_ptr<Communicator> make_shared_memory_communicator(const Options& options, const World& world);

}  // namespace minigpt
