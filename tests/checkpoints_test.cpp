// Which checkpoints are found, of which step, and which of them are whole.
#include "lib/checkpoints.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
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

std::string weights() { return made_safetensors({{"w", {2, 3}, {1, 2, 3, 4, 5, 6}}}); }

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

TEST_CASE("a distributed checkpoint of Megatron needs .metadata and metadata.json, which come last") {
  const TemporaryFolder folder;
  put_file(folder / "latest_checkpointed_iteration.txt", "100");
  const std::string path = folder / "iter_0000100";
  copy_dcp(path);
  put_file(path + "/common.pt", empty_zip());
  check_not_whole(find_checkpoints(folder.path()), 100, "metadata.json is missing");
  put_file(path + "/metadata.json", "{\"sharded_backend\": \"torch_dist\"}");
  check_whole(find_checkpoints(folder.path()), 100, "megatron");
  std::filesystem::remove(path + "/.metadata");
  check_not_whole(find_checkpoints(folder.path()), 100, ".metadata is missing");
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
  put_file(path + "/model-00001-of-00002.safetensors", weights());
  put_file(path + "/model.safetensors.index.json",
           R"({"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}})");
  put_file(path + "/trainer_state.json", R"({"global_step": 100})");
  check_not_whole(find_checkpoints(folder.path()), 100, "model-00002-of-00002.safetensors, which model.safetensors.index.json names");
  put_file(path + "/model-00002-of-00002.safetensors", weights());
  check_whole(find_checkpoints(folder.path()), 100, "hf-trainer");
  put_file(path + "/trainer_state.json", R"({"global_step": 90})");
  check_not_whole(find_checkpoints(folder.path()), 100, "trainer_state.json is of step 90");
  std::filesystem::remove(path + "/trainer_state.json");
  check_not_whole(find_checkpoints(folder.path()), 100, "trainer_state.json is missing");
  put_file(folder / "tmp-checkpoint-200/model.safetensors", weights());
  check_not_whole(find_checkpoints(folder.path()), 200, "not renamed it");
}

TEST_CASE("DCP: .metadata, and every file that it names; step-100 and step-000100 are told apart by what is in them") {
  const TemporaryFolder folder;
  copy_dcp(folder / "step-100");
  put_file(folder / "step-000200/model.safetensors", weights());
  put_file(folder / "step-000200/optimizer.safetensors", weights());
  check_not_whole(find_checkpoints(folder.path()), 200, "COMPLETE is missing");
  put_file(folder / "step-000200/COMPLETE", "{}");
  check_whole(find_checkpoints(folder.path()), 200, "minigpt");
  check_whole(find_checkpoints(folder.path()), 100, "dcp");
  std::filesystem::remove(folder / "step-100/__1_0.distcp");
  check_not_whole(find_checkpoints(folder.path()), 100, "__1_0.distcp, which .metadata names, is missing");
  std::filesystem::remove(folder / "step-100/.metadata");
  check_not_whole(find_checkpoints(folder.path()), 100, ".metadata is missing");
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
  put_file(path + "/COMPLETE", "{}");
  put_file(path + "/model.safetensors", weights());
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
  put_file(folder / "step-000100/COMPLETE", "{}");
  put_file(folder / "step-000100/model.safetensors", weights());
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
