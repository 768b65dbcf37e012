// Which checkpoints are found, of which step, and which of them are whole.
#include "lib/checkpoints.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "lib/error.h"
#include "tests/support/checkpoint_files.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

const std::string kGolden = std::string(FORKPOINT_SOURCE_DIR) + "/tests/golden/checkpoints";

const Checkpoint& of_step(const std::vector<Checkpoint>& all, int64_t step) {
  for (const Checkpoint& checkpoint : all) {
    if (checkpoint.step == step) return checkpoint;
  }
  FAIL("no checkpoint of step " << step);
  return all.front();
}

void check_whole(const std::vector<Checkpoint>& all, int64_t step, const std::string& kind) {
  const Checkpoint& found = of_step(all, step);
  CHECK(found.kind == kind);
  CHECK_MESSAGE(found.whole, found.why_not);
  CHECK(found.why_not.empty());
}

void check_not_whole(const std::vector<Checkpoint>& all, int64_t step, const std::string& why) {
  const Checkpoint& found = of_step(all, step);
  CHECK_FALSE(found.whole);
  CHECK_MESSAGE(found.why_not.find(why) != std::string::npos, found.why_not);
}

void copy_dcp(const std::string& to) { std::filesystem::copy(kGolden + "/dcp", to); }

// What the Trainer saves on one GPU, of 100 steps.
void put_trainer(const std::string& path) {
  put_file(path + "/config.json", R"({"model_type": "llama"})");
  put_file(path + "/trainer_state.json", R"({"global_step": 100, "log_history": [{"loss": NaN, "grad_norm": Infinity, "x": "NaN"}]})");
  for (const char* name : {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}) {
    put_file(path + "/" + name, made_torch_file({{"a", 1}}));
  }
}

std::string weights() { return made_safetensors({{"w", {2, 3}, {1, 2, 3, 4, 5, 6}}}); }

// What minigpt saves, of so many ranks.
void put_minigpt(const std::string& path, int ranks = 1) {
  for (const char* name : {"model", "optimizer"}) put_file(path + "/" + name + ".safetensors", weights());
  for (int rank = 0; rank < ranks; ++rank) put_file(path + "/rank-000" + std::to_string(rank) + ".json", "{}");
  put_file(path + "/COMPLETE", "{\"layers\": 2, \"ranks\": " + std::to_string(ranks) + "}");
}

}  // namespace

TEST_CASE("Megatron's tracker file decides which iterations are whole") {
  const TemporaryFolder folder;
  for (const char* step : {"0000100", "0000200", "0000300"}) {
    put_file(folder / ("iter_" + std::string(step) + "/mp_rank_00_000/model_optim_rng.pt"), empty_zip());
  }
  check_not_whole(find_checkpoints(folder.path()), 100, "latest_checkpointed_iteration.txt is missing");
  put_file(folder / "latest_checkpointed_iteration.txt", "200\n");
  const auto all = find_checkpoints(folder.path());
  CHECK(all.size() == 3);
  check_whole(all, 100, "megatron");
  check_whole(all, 200, "megatron");
  check_not_whole(all, 300, "names 200 as the newest");
}

TEST_CASE("Megatron: a file for each model-parallel rank, as many as its arguments say, and alike") {
  const TemporaryFolder folder;
  const std::string path = folder / "iter_0000100";
  const std::string rank = made_torch_file({{"iteration", 100}, {"args", {{"@class", "argparse.Namespace"}, {"tensor_model_parallel_size", 2},
                                                                        {"pipeline_model_parallel_size", 2}}}});
  put_file(folder / "latest_checkpointed_iteration.txt", "100");
  for (const char* name : {"mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000"}) put_file(path + "/" + name + "/model_optim_rng.pt", rank);
  check_not_whole(find_checkpoints(folder.path()), 100, "1 of 4 folders mp_rank_* are missing");
  put_file(path + "/mp_rank_01_001/model_optim_rng.pt", rank);
  check_whole(find_checkpoints(folder.path()), 100, "megatron");
  put_file(path + "/mp_rank_01_001/distrib_optim.pt", made_torch_file({{"a", 1}}));
  check_not_whole(find_checkpoints(folder.path()), 100, "mp_rank_00_000/distrib_optim.pt is missing");
  for (const char* name : {"mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000"}) {
    put_file(path + "/" + name + "/distrib_optim.pt", made_torch_file({{"a", 1}}));
  }
  check_whole(find_checkpoints(folder.path()), 100, "megatron");
  std::filesystem::rename(path, folder / "iter_0000050");
  check_not_whole(find_checkpoints(folder.path()), 50, "is of iteration 100");
}

TEST_CASE("a distributed checkpoint of Megatron needs .metadata and metadata.json, which come last") {
  const TemporaryFolder folder;
  put_file(folder / "latest_checkpointed_iteration.txt", "100");
  const std::string path = folder / "iter_0000100";
  copy_dcp(path);
  put_file(path + "/common.pt", empty_zip());
  check_not_whole(find_checkpoints(folder.path()), 100, "metadata.json is missing");
  put_file(path + "/metadata.json", "{\"sharded_backend\": \"torch_dist\"}");
  check_whole(find_checkpoints(folder.path()), 100, "megatron");
  std::filesystem::remove(path + "/common.pt");
  check_not_whole(find_checkpoints(folder.path()), 100, "common.pt is missing");
  // Megatron Core 0.19 keeps it as an entry of .metadata: here a string that the pickle throws away before its end.
  std::ifstream file(path + "/.metadata", std::ios::binary);
  const std::string metadata{std::istreambuf_iterator<char>(file), {}};
  put_file(path + "/.metadata", metadata.substr(0, metadata.size() - 1) + std::string("X\14\0\0\0common_state0.", 19));
  check_whole(find_checkpoints(folder.path()), 100, "megatron");
  std::filesystem::remove(path + "/metadata.json");
  check_not_whole(find_checkpoints(folder.path()), 100, "metadata.json is missing");
  put_file(path + "/.metadata", metadata);
  put_file(path + "/metadata.json", "{\"sharded_backend\": \"torch_dcp\"}");  // has none
  check_whole(find_checkpoints(folder.path()), 100, "megatron");
  std::filesystem::remove(path + "/.metadata");
  check_not_whole(find_checkpoints(folder.path()), 100, ".metadata is missing");
}

TEST_CASE("DeepSpeed: as many parts of the optimizer as the model's file says there were ranks, also where the last are missing") {
  const TemporaryFolder folder;
  const std::string path = folder / "global_step100";
  const auto model = [](const char* stage, const nlohmann::json& optimizer) {
    return made_torch_file({{"dp_world_size", 2}, {"mp_world_size", 2}, {"optimizer", optimizer},
                            {"ds_config", {{"zero_optimization", {{"stage", std::stoi(stage)}}}}}});
  };
  put_file(folder / "latest", "global_step100");
  put_file(path + "/mp_rank_00_model_states.pt", model("1", nullptr));
  check_not_whole(find_checkpoints(folder.path()), 100, "1 of 2 files mp_rank_*_model_states.pt are missing");
  put_file(path + "/mp_rank_01_model_states.pt", model("1", nullptr));
  check_not_whole(find_checkpoints(folder.path()), 100, "2 of 2 files *mp_rank_00_optim_states.pt are missing");
  for (const char* rank : {"0_mp_rank_00", "1_mp_rank_00", "0_mp_rank_01"}) {
    put_file(path + "/bf16_zero_pp_rank_" + rank + "_optim_states.pt", made_torch_file({{"a", 1}}));
  }
  check_not_whole(find_checkpoints(folder.path()), 100, "1 of 2 files *mp_rank_01_optim_states.pt are missing");
  put_file(path + "/bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", made_torch_file({{"a", 1}}));
  check_whole(find_checkpoints(folder.path()), 100, "deepspeed");
  for (const char* rank : {"0_mp_rank_00", "1_mp_rank_00", "0_mp_rank_01", "1_mp_rank_01"}) {
    std::filesystem::remove(path + "/bf16_zero_pp_rank_" + rank + "_optim_states.pt");
  }
  for (const char* rank : {"00", "01"}) put_file(path + "/mp_rank_" + rank + "_model_states.pt", model("0", {{"state", 1}}));
  check_whole(find_checkpoints(folder.path()), 100, "deepspeed");  // without ZeRO it is in the model's file
}

TEST_CASE("DeepSpeed without ZeRO: the parts of experts' optimizers are as many as hold experts, not as many as ranks") {
  const TemporaryFolder folder;
  const std::string path = folder / "global_step100";
  put_file(folder / "latest", "global_step100");
  put_file(path + "/mp_rank_00_model_states.pt",
           made_torch_file({{"dp_world_size", 4}, {"mp_world_size", 1}, {"optimizer", nullptr}, {"ds_config", {{"zero_optimization", {{"stage", 0}}}}}}));
  for (const char* rank : {"0", "1"}) {
    put_file(path + "/expp_rank_" + rank + "_mp_rank_00_optim_states.pt", made_torch_file({{"a", 1}}));
    put_file(path + "/layer_0_expert_" + rank + "_mp_rank_00_model_states.pt", made_torch_file({{"a", 1}}));
  }
  check_whole(find_checkpoints(folder.path()), 100, "deepspeed");
}

TEST_CASE("parts of a model in a folder below, numbered from 0 or in other widths, and JSON by lines are as whole as others") {
  const TemporaryFolder folder;
  const std::string path = folder / "checkpoint-100";
  put_trainer(path);
  put_file(path + "/model.safetensors", weights());
  put_file(path + "/teacher/model-00001-of-00001.safetensors", weights());
  put_file(path + "/teacher/model.safetensors.index.json", R"({"weight_map": {"w": "model-00001-of-00001.safetensors"}})");
  put_file(path + "/log.json", "{\"loss\": 1}\n{\"loss\": 2}\n");
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  put_file(path + "/cache-0-of-2.bin", weights());
  check_not_whole(find_checkpoints(folder.path()), 100, "cache-1-of-2.bin is missing");
  put_file(path + "/cache-1-of-2.bin", weights());
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  std::filesystem::remove(path + "/teacher/model.safetensors.index.json");
  check_not_whole(find_checkpoints(folder.path()), 100, "teacher/model.safetensors.index.json is missing");
  put_file(path + "/log.json", "{\"loss\": 1}\n{\"loss\": ");
  check_not_whole(find_checkpoints(folder.path()), 100, "log.json is no JSON");
}

TEST_CASE("DeepSpeed: `latest` and all shards of the optimizer") {
  const TemporaryFolder folder;
  const std::string path = folder / "global_step100";
  put_file(path + "/mp_rank_00_model_states.pt", empty_zip());
  put_file(path + "/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", empty_zip());
  put_file(path + "/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", empty_zip());
  put_file(folder / "latest", "global_step100");
  check_not_whole(find_checkpoints(folder.path()), 100, "1 of 3 files bf16_zero_pp_rank_*_mp_rank_00_optim_states.pt");
  put_file(path + "/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", empty_zip());
  check_whole(find_checkpoints(folder.path()), 100, "deepspeed");
  put_file(folder / "latest", "global_step50");
  check_not_whole(find_checkpoints(folder.path()), 100, "`latest` names global_step50");
}

TEST_CASE("HF Trainer: trainer_state.json of that step, and every shard that the index names") {
  const TemporaryFolder folder;
  const std::string path = folder / "checkpoint-100";
  put_trainer(path);
  put_file(path + "/model-00001-of-00002.safetensors", weights());
  put_file(path + "/model.safetensors.index.json", R"({"weight_map": {"w": "model-00001-of-00002.safetensors"}})");
  check_not_whole(find_checkpoints(folder.path()), 100, "model-00002-of-00002.safetensors is missing");
  put_file(path + "/model.safetensors.index.json",
           R"({"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}})");
  check_not_whole(find_checkpoints(folder.path()), 100, "model-00002-of-00002.safetensors, which model.safetensors.index.json names");
  put_file(path + "/model-00002-of-00002.safetensors", weights());
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  std::filesystem::remove(path + "/model.safetensors.index.json");
  check_not_whole(find_checkpoints(folder.path()), 100, "model.safetensors.index.json is missing");
  put_file(path + "/trainer_state.json", R"({"global_step": 90})");
  check_not_whole(find_checkpoints(folder.path()), 100, "trainer_state.json is of step 90");
  std::filesystem::remove(path + "/trainer_state.json");
  check_not_whole(find_checkpoints(folder.path()), 100, "trainer_state.json is missing");
  put_file(folder / "tmp-checkpoint-200/model.safetensors", weights());
  check_not_whole(find_checkpoints(folder.path()), 200, "not renamed it");
}

TEST_CASE("HF Trainer: a loss that is no number is in its log and no damage, a cut JSON file is") {
  const TemporaryFolder folder;
  const std::string path = folder / "checkpoint-100", state = path + "/trainer_state.json";
  put_trainer(path);
  put_file(path + "/model.safetensors", weights());
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  const std::string text = get_file(state);
  for (size_t size = 0; size < text.size(); ++size) {
    put_file(state, text.substr(0, size));
    CHECK_FALSE(of_step(find_checkpoints(folder.path()), 100).whole);
  }
  put_file(state, text);
  put_file(path + "/config.json", R"({"model_type": "lla)");
  check_not_whole(find_checkpoints(folder.path()), 100, "config.json is no JSON");
}

TEST_CASE("HF Trainer: what it would resume without, and not say so, is missed here") {
  const TemporaryFolder folder;
  const std::string path = folder / "checkpoint-100";
  const auto put = [&] {
    put_trainer(path);
    put_file(path + "/model.safetensors", weights());
  };
  put();
  for (const char* name : {"optimizer.pt", "scheduler.pt", "rng_state.pth"}) {
    std::filesystem::remove(path + "/" + name);
    check_not_whole(find_checkpoints(folder.path()), 100, std::string(name) + " is missing");
    put();
    check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  }
  std::filesystem::remove(path + "/model.safetensors");
  check_not_whole(find_checkpoints(folder.path()), 100, "it holds no weights");
  put_file(path + "/adapter_model.safetensors", weights());  // of PEFT
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  // Of several ranks: each saves its own.
  std::filesystem::rename(path + "/rng_state.pth", path + "/rng_state_0.pth");
  check_not_whole(find_checkpoints(folder.path()), 100, "rng_state_1.pth is missing");
  put_file(path + "/rng_state_1.pth", made_torch_file({{"a", 1}}));
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  put_file(path + "/rng_state_3.pth", made_torch_file({{"a", 1}}));
  check_not_whole(find_checkpoints(folder.path()), 100, "rng_state_2.pth is missing");
}

TEST_CASE("HF Trainer with FSDP: the optimizer is a folder of DCP") {
  const TemporaryFolder folder;
  const std::string path = folder / "checkpoint-100";
  put_trainer(path);
  std::filesystem::remove(path + "/optimizer.pt");
  copy_dcp(path + "/optimizer_0");
  copy_dcp(path + "/pytorch_model_fsdp_0");
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  std::filesystem::remove(path + "/optimizer_0/__1_0.distcp");
  check_not_whole(find_checkpoints(folder.path()), 100, "optimizer_0/__1_0.distcp, which optimizer_0/.metadata names, is missing");
}

TEST_CASE("a data file of DCP that is shorter than .metadata says is cut") {
  const TemporaryFolder folder;
  copy_dcp(folder / "step-100");
  for (const char* name : {"__0_0.distcp", "__1_0.distcp"}) {
    const std::string path = folder / ("step-100/" + std::string(name)), data = get_file(path);
    for (const size_t size : {size_t{0}, size_t{1}, data.size() / 2, data.size() - 1}) {
      put_file(path, data.substr(0, size));
      check_not_whole(find_checkpoints(folder.path()), 100, "it is cut");
    }
    put_file(path, data);
    check_whole(find_checkpoints(folder.path()), 100, "dcp");
  }
}

TEST_CASE("DCP: .metadata, and every file that it names; step-100 and step-000100 are told apart by what is in them") {
  const TemporaryFolder folder;
  copy_dcp(folder / "step-100");
  put_file(folder / "step-000200/model.safetensors", weights());
  put_file(folder / "step-000200/optimizer.safetensors", weights());
  check_not_whole(find_checkpoints(folder.path()), 200, "COMPLETE is missing");
  put_minigpt(folder / "step-000200");
  check_whole(find_checkpoints(folder.path()), 200, "minigpt");
  check_whole(find_checkpoints(folder.path()), 100, "dcp");
  std::filesystem::remove(folder / "step-100/__1_0.distcp");
  check_not_whole(find_checkpoints(folder.path()), 100, "__1_0.distcp, which .metadata names, is missing");
  std::filesystem::remove(folder / "step-100/.metadata");
  check_not_whole(find_checkpoints(folder.path()), 100, ".metadata is missing");
}

nlohmann::json lightning(int64_t global_step, int optimizers, int64_t batches) {
  nlohmann::json value = {{"pytorch-lightning_version", "2.6.6"}, {"global_step", global_step}};
  for (int i = 0; i < optimizers; ++i) value["optimizer_states"].push_back({{"state", nlohmann::json::object()}});
  value["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"] = {{"processed", batches}};
  return value;
}

TEST_CASE("Lightning's last.ckpt names no step: what it holds does, unless it is a copy of one that is there") {
  const TemporaryFolder folder;
  put_file(folder / "epoch=0-step=100.ckpt", made_torch_file(lightning(100, 1, 100)));
  put_file(folder / "last.ckpt", made_torch_file(lightning(100, 1, 100)));
  CHECK(find_checkpoints(folder.path()).size() == 1);
  put_file(folder / "last.ckpt", made_torch_file(lightning(150, 1, 300)));  // two batches a step
  put_file(folder / "other.ckpt", made_torch_file({{"global_step", 7}}));
  const auto all = find_checkpoints(folder.path());
  CHECK(all.size() == 2);
  check_whole(all, 150, "lightning");
  std::filesystem::remove(folder / "last.ckpt");
  std::filesystem::create_symlink("epoch=0-step=100.ckpt", folder / "last.ckpt");
  CHECK(find_checkpoints(folder.path()).size() == 1);
  // The named one is cut: its copy is all there is.
  std::filesystem::remove(folder / "last.ckpt");
  put_file(folder / "last.ckpt", made_torch_file(lightning(100, 1, 100)));
  put_file(folder / "epoch=0-step=100.ckpt", made_torch_file(lightning(100, 1, 100)).substr(0, 60));
  CHECK(newest_checkpoint(find_checkpoints(folder.path()), 100)->path.ends_with("last.ckpt"));
}

TEST_CASE("Lightning counts each of several optimizers, forkpoint the batch in which all of them step") {
  const TemporaryFolder folder;
  put_file(folder / "epoch=0-step=8.ckpt", made_torch_file(lightning(8, 2, 4)));
  check_whole(find_checkpoints(folder.path()), 4, "lightning");
  put_file(folder / "epoch=0-step=8.ckpt", made_torch_file(lightning(8, 2, 8)));  // one of them in each batch: it cannot be told
  check_whole(find_checkpoints(folder.path()), 8, "lightning");
}

TEST_CASE("weights alone are no checkpoint of Lightning's to resume from") {
  const TemporaryFolder folder;
  put_file(folder / "epoch=0-step=8.ckpt", made_torch_file(lightning(8, 0, 8)));
  check_not_whole(find_checkpoints(folder.path()), 8, "it holds weights alone");
}

TEST_CASE("what a name calls unfinished is listed, and not whole") {
  const TemporaryFolder folder;
  copy_dcp(folder / "step-100.tmp");
  put_file(folder / "epoch=0-step=200.ckpt.part", made_torch_file(lightning(200, 1, 200)));
  copy_dcp(folder / "step-300");
  put_file(folder / "step-300/export.tmp/model.safetensors", weights());
  const auto all = find_checkpoints(folder.path());
  check_not_whole(all, 100, "its name says that it was not finished");
  check_not_whole(all, 200, "its name says that it was not finished");
  check_not_whole(all, 300, "export.tmp/model.safetensors is a file that was not finished");
}

TEST_CASE("Lightning's names, with an epoch, a metric or a version after the step") {
  const TemporaryFolder folder;
  for (const char* name : {"epoch=1-step=100.ckpt", "step=200-v1.ckpt", "mine-step=300-loss=0.5.ckpt", "last.ckpt", "misstep=400.ckpt"}) {
    put_file(folder / name, get_file(kGolden + "/small.pt"));
  }
  const auto all = find_checkpoints(folder.path());
  CHECK(all.size() == 3);
  for (const int64_t step : {100, 200, 300}) check_whole(all, step, "lightning");
  const auto one = find_checkpoints(folder / "epoch=1-step=100.ckpt");
  REQUIRE(one.size() == 1);
  CHECK(one[0].step == 100);
}

TEST_CASE("a file that is cut, empty, full of zeros or called a part makes its checkpoint not whole") {
  const TemporaryFolder folder;
  const std::string path = folder / "step-000100";
  put_minigpt(path);
  check_whole(find_checkpoints(folder.path()), 100, "minigpt");
  put_file(path + "/model.safetensors", weights().substr(0, weights().size() - 1));
  check_not_whole(find_checkpoints(folder.path()), 100, "model.safetensors: not a whole safetensors file");
  put_file(path + "/model.safetensors", weights());
  const std::string torch = get_file(kGolden + "/small.pt");
  put_file(path + "/extra.pt", torch.substr(0, torch.size() - 1));
  check_not_whole(find_checkpoints(folder.path()), 100, "extra.pt: not a whole zip file");
  put_file(path + "/extra.pt", "");
  check_not_whole(find_checkpoints(folder.path()), 100, "extra.pt is empty");
  put_file(path + "/extra.pt", std::string(4096, '\0'));
  check_not_whole(find_checkpoints(folder.path()), 100, "begins with zeros");
  put_file(path + "/extra.pt", torch);
  check_whole(find_checkpoints(folder.path()), 100, "minigpt");
  put_file(path + "/rank-0001.json.tmp", "{");
  check_not_whole(find_checkpoints(folder.path()), 100, "rank-0001.json.tmp is a file that was not finished");
}

TEST_CASE("minigpt: a file of every rank, as many as COMPLETE says") {
  const TemporaryFolder folder;
  const std::string path = folder / "step-000100";
  for (const std::string missing : {"rank-0000.json", "rank-0003.json", "model.safetensors", "optimizer.safetensors"}) {
    put_minigpt(path, 4);
    check_whole(find_checkpoints(folder.path()), 100, "minigpt");
    std::filesystem::remove(path + "/" + missing);
    check_not_whole(find_checkpoints(folder.path()), 100, missing + " is missing");
  }
  put_minigpt(path, 4);
  for (const char* text : {"{", "{}", "4", R"({"ranks": -1})", R"({"ranks": "4"})"}) {
    put_file(path + "/COMPLETE", text);
    check_not_whole(find_checkpoints(folder.path()), 100, "COMPLETE does not say how many ranks there are");
  }
}

TEST_CASE("a file that grows while we look is still being written") {
  const TemporaryFolder folder;
  const std::string path = folder / "ckpt_7.bin.raw";
  put_file(path, "x");
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::ofstream file(path, std::ios::app); !stop; std::this_thread::sleep_for(std::chrono::milliseconds(5))) file << "more" << std::flush;
  });
  check_not_whole(find_checkpoints(folder.path(), "ckpt_{step}.bin.raw"), 7, "still being written");
  stop = true;
  writer.join();
  check_whole(find_checkpoints(folder.path(), "ckpt_{step}.bin.raw"), 7, "pattern");
}

TEST_CASE("a pattern takes whole numbers, zeros in front or not, and `*` stands for anything but digits of the number") {
  const TemporaryFolder folder;
  for (const char* name : {"a-0012.raw", "b-13.raw", "b-x.raw", "c-99999999999999999999.raw"}) put_file(folder / name, "data");
  const auto all = find_checkpoints(folder.path(), "*{step}.raw");
  REQUIRE(all.size() == 2);
  CHECK(all[0].step == 12);
  CHECK(all[1].step == 13);
  CHECK_THROWS_AS(find_checkpoints(folder.path(), "ckpt.pt"), Error);
  CHECK_THROWS_AS(find_checkpoints(folder.path(), "{step}/{step}"), Error);
  CHECK_THROWS_AS(find_checkpoints(folder / "missing"), Error);
}

TEST_CASE("a checkpoint names itself, a link stands for what it leads to, and a broken one is not whole") {
  const TemporaryFolder folder;
  put_minigpt(folder / "step-000100");
  CHECK(find_checkpoints(folder / "step-000100").size() == 1);
  CHECK(find_checkpoints((folder / "step-000100") + "/").size() == 1);
  std::filesystem::create_directory_symlink(folder / "step-000100", folder / "newest");
  CHECK(of_step(find_checkpoints(folder / "newest"), 100).whole);
  std::filesystem::create_directory_symlink(folder / "gone", folder / "step-000300");
  check_not_whole(find_checkpoints(folder.path()), 300, "a link to something that is not there");
}

TEST_CASE("folders below are searched when there is nothing here; several that hold checkpoints must be told apart by the user") {
  const TemporaryFolder folder;
  put_file(folder / "logs/version_0/checkpoints/epoch=0-step=5.ckpt", get_file(kGolden + "/small.pt"));
  check_whole(find_checkpoints(folder.path()), 5, "lightning");
  put_file(folder / "logs/version_1/checkpoints/epoch=0-step=6.ckpt", get_file(kGolden + "/small.pt"));
  CHECK_THROWS_AS(find_checkpoints(folder.path()), Error);
}

TEST_CASE("the newest whole one at or before a step") {
  std::vector<Checkpoint> all(3);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].step = static_cast<int64_t>(10 * (i + 1));
    all[i].whole = i != 1;
  }
  CHECK(newest_checkpoint(all, 30)->step == 30);
  CHECK(newest_checkpoint(all, 29)->step == 10);  // 20 is not whole
  CHECK(newest_checkpoint(all, 10)->step == 10);
  CHECK_FALSE(newest_checkpoint(all, 9).has_value());
}
