// What files of torch.save in a checkpoint say of the training that wrote them: how far it was, how many ranks it had. Only
// their pickles are read (no tensor), and nothing in them is executed. Safe from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace forkpoint {

struct LightningInside {
  // Steps done. With several optimizers Lightning's own count (global_step, in the file's name) counts each of them: where
  // all of them step in each batch, it is the number of batches.
  int64_t steps = 0;
  bool weights_only = false;  // ModelCheckpoint(save_weights_only=True): nothing can be resumed from it
};

// Nothing: it is no checkpoint of Lightning's, or cannot be read.
std::optional<LightningInside> look_inside_lightning(const std::string& path);

// 0: the file does not say.
struct DeepSpeedInside {
  int64_t data_parallel = 0, model_parallel = 0, zero_stage = 0;
  bool has_optimizer = false;  // it holds the optimizer itself: without ZeRO
};
DeepSpeedInside look_inside_deepspeed(const std::string& path);  // of *mp_rank_*_model_states.pt

struct MegatronInside {
  int64_t tensor_parallel = 0, pipeline_parallel = 0, expert_parallel = 0;
  int64_t iteration = -1;
};
MegatronInside look_inside_megatron(const std::string& path);  // of model_optim_rng.pt

}  // namespace forkpoint
