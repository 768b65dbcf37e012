// Checkpoints: DIR/step-000100/{model.safetensors, optimizer.safetensors, rank-0000.json ..., COMPLETE}. Each file is
// written beside its name and renamed; COMPLETE comes last, when all ranks are done. A folder without it is passed
// over.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "samples/minigpt/communicator.h"
#include "samples/minigpt/options.h"
#include "samples/minigpt/sampler.h"
#include "samples/minigpt/tensor.h"

namespace minigpt {

// What each rank has for itself.
struct RankState {
  SamplerState sampler;
  uint64_t dropout_seed = 0;
};

// Collective. step: steps done, so the number of the next one. Rank 0 writes the tensors. Throws Error.
void save_checkpoint(const Options& options, const World& world, Communicator& communicator, int64_t step,
                     const std::deque<Parameter>& parameters, const RankState& state);

// The step of the newest complete checkpoint. Throws Error when there is none.
int64_t newest_checkpoint(const std::string& directory);

// Throws Error when a file is missing or damaged, or was made with other settings than these.
RankState load_checkpoint(const Options& options, const World& world, int64_t step, std::deque<Parameter>& parameters);

}  // namespace minigpt
