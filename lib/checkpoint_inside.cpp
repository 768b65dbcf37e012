// The keys, as they stand in the frameworks' own sources: Lightning's trainer/connectors/checkpoint_connector.py and
// loops/training_epoch_loop.py; DeepSpeed's runtime/engine.py (_save_checkpoint); Megatron's training/checkpointing.py
// (generate_state_dict).
#include "lib/checkpoint_inside.h"

#include "lib/checkpoint_readers.h"
#include "lib/error.h"
#include "lib/pickle.h"
#include "lib/zip_file.h"

namespace forkpoint {
namespace {

using Type = PickleValue::Type;

std::optional<Pickle> pickle_of(const std::string& path) {
  try {
    const FileSlice file = open_slice(path);
    if (ZipFile::begins(file)) return torch_pickle(file);
  } catch (const Error&) {  // what is wrong with the file, others say
  }
  return {};
}

const PickleValue* find(const Pickle& pickle, std::initializer_list<std::string_view> path) {
  const PickleValue* value = &pickle[pickle.root()];
  for (const std::string_view key : path) {
    value = pickle.find(*value, key);
    if (!value) return nullptr;
  }
  return value;
}

std::optional<int64_t> integer(const Pickle& pickle, std::initializer_list<std::string_view> path) {
  const PickleValue* value = find(pickle, path);
  if (!value || value->type != Type::integer || value->integer < 0) return {};
  return value->integer;
}

}  // namespace

std::optional<LightningInside> look_inside_lightning(const std::string& path) {
  const auto pickle = pickle_of(path);
  if (!pickle || !find(*pickle, {"pytorch-lightning_version"})) return {};
  const auto counted = integer(*pickle, {"global_step"});
  if (!counted) return {};
  LightningInside inside{*counted};
  const PickleValue* optimizers = find(*pickle, {"optimizer_states"});
  inside.weights_only = optimizers == nullptr;
  const int64_t count = optimizers ? static_cast<int64_t>(optimizers->items.size()) : 0;
  const auto batches = integer(*pickle, {"loops", "fit_loop", "epoch_loop.batch_progress", "total", "processed"});
  if (count > 1 && batches && *batches <= INT64_MAX / count && *batches * count == *counted) inside.steps = *batches;
  return inside;
}

DeepSpeedInside look_inside_deepspeed(const std::string& path) {
  DeepSpeedInside inside;
  const auto pickle = pickle_of(path);
  if (!pickle) return inside;
  inside.data_parallel = integer(*pickle, {"dp_world_size"}).value_or(0);
  inside.model_parallel = integer(*pickle, {"mp_world_size"}).value_or(0);
  inside.zero_stage = integer(*pickle, {"ds_config", "zero_optimization", "stage"}).value_or(0);
  const PickleValue* optimizer = find(*pickle, {"optimizer"});
  inside.has_optimizer = optimizer && optimizer->type != Type::none;
  return inside;
}

MegatronInside look_inside_megatron(const std::string& path) {
  MegatronInside inside;
  const auto pickle = pickle_of(path);
  if (!pickle) return inside;
  inside.tensor_parallel = integer(*pickle, {"args", "tensor_model_parallel_size"}).value_or(0);
  inside.pipeline_parallel = integer(*pickle, {"args", "pipeline_model_parallel_size"}).value_or(0);
  inside.expert_parallel = integer(*pickle, {"args", "expert_model_parallel_size"}).value_or(0);
  inside.iteration = integer(*pickle, {"iteration"}).value_or(-1);
  return inside;
}

}  // namespace forkpoint
