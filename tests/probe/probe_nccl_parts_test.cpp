// Parts of the probe around NCCL and NVTX, within this process: the launcher's variables, step marks, numbers of
// reductions.
#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <string>

#include "probes/nccl_records.h"
#include "probes/settings.h"
#include "probes/step_marks.h"

using namespace forkpoint;

namespace {

std::map<std::string, std::string> variables;

const Settings& read(const std::map<std::string, std::string>& more) {
  variables = more;
  variables["FORKPOINT_RUN"] = "/tmp/somewhere";
  static Settings settings;
  settings = Settings{};
  read_settings(
      [](const char* name) -> const char* {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      },
      &settings);
  return settings;
}

std::pair<int, int> rank_of(const std::map<std::string, std::string>& more) {
  const Settings& settings = read(more);
  return {settings.rank, settings.world_size};
}

}  // namespace

TEST_CASE("each launcher's variables tell the global rank and the size of the world") {
  CHECK(rank_of({}) == std::pair(-1, 0));
  for (const auto& [rank, size] : {std::pair("RANK", "WORLD_SIZE"),
                                   {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                   {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
                                   {"PMI_RANK", "PMI_SIZE"},
                                   {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"},
                                   {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
                                   {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
                                   {"SLURM_PROCID", "SLURM_NTASKS"}}) {
    INFO(rank);
    CHECK(rank_of({{rank, "3"}, {size, "8"}}) == std::pair(3, 8));
    CHECK(read({{rank, "3"}, {size, "8"}}).world_size_known);
    if (std::string(size) != "SLURM_STEP_NUM_TASKS") CHECK(rank_of({{rank, "8"}, {size, "8"}}) == std::pair(-1, 0));
  }
  for (const char* rank : {"PALS_RANKID", "ALPS_APP_PE", "PMIX_RANK", "PMI_RANK", "RANK"}) {
    CHECK(rank_of({{rank, "3"}}) == std::pair(3, 4));  // what it proves
    CHECK_FALSE(read({{rank, "3"}}).world_size_known);
  }
}

TEST_CASE("ranks within a node, and a daemon's, are not taken for the global one") {
  CHECK(rank_of({{"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}}) == std::pair(-1, 0));
  CHECK(rank_of({{"LOCAL_RANK", "1"},
                 {"LOCAL_WORLD_SIZE", "2"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                 {"SLURM_LOCALID", "1"},
                 {"PALS_LOCAL_RANKID", "1"},
                 {"MV2_COMM_WORLD_LOCAL_RANK", "1"}}) == std::pair(-1, 0));
  // Hydra, started on two nodes through srun: rank 5 of 8 lives under daemon 1 of 2.
  CHECK(rank_of({{"PMI_RANK", "5"},
                 {"PMI_SIZE", "8"},
                 {"MPI_LOCALRANKID", "1"},
                 {"SLURM_PROCID", "1"},
                 {"SLURM_NTASKS", "2"},
                 {"SLURM_STEP_NUM_TASKS", "2"},
                 {"SLURM_JOB_ID", "7"},
                 {"SLURM_STEP_ID", "0"}}) == std::pair(5, 8));
}

TEST_CASE("Slurm: a step's tasks count, and a batch script is no rank") {
  CHECK(rank_of({{"SLURM_PROCID", "1"},
                 {"SLURM_NTASKS", "16"},
                 {"SLURM_STEP_NUM_TASKS", "2"},
                 {"SLURM_JOB_ID", "7"},
                 {"SLURM_STEP_ID", "0"}}) == std::pair(1, 2));
  CHECK(rank_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "16"}, {"SLURM_JOB_ID", "7"}}) == std::pair(-1, 0));
}

TEST_CASE("FORKPOINT_STEP_ON is an extended regular expression, and a malformed one is named") {
  CHECK(read({{"FORKPOINT_STEP_ON", "^(step|iteration) [0-9]+$"}}).state == Settings::State::ready);
  CHECK(has_step_mark());
  CHECK(is_step_mark("step 12"));
  CHECK(is_step_mark("iteration 0"));
  CHECK_FALSE(is_step_mark("substep 12"));
  CHECK_FALSE(is_step_mark(""));
  CHECK_FALSE(is_step_mark(nullptr));

  const Settings& malformed = read({{"FORKPOINT_STEP_ON", "step(["}});
  CHECK(malformed.state == Settings::State::malformed);
  CHECK_FALSE(has_step_mark());
  CHECK(std::string(malformed.problem)
            .starts_with("FORKPOINT_STEP_ON is \"step([\", expected a POSIX extended regular expression: "));
}

TEST_CASE("a kernel's mark is looked for in its mangled and its readable name") {
  REQUIRE(read({{"FORKPOINT_STEP_ON", "ns::begin_of_step<float>"}}).state == Settings::State::ready);
  CHECK(is_step_mark("_ZN2ns13begin_of_stepIfEEvPT_"));
  CHECK_FALSE(is_step_mark("_ZN2ns13begin_of_stepIdEEvPT_"));
  REQUIRE(read({{"FORKPOINT_STEP_ON", "13begin_of_step"}}).state == Settings::State::ready);
  CHECK(is_step_mark("_ZN2ns13begin_of_stepIdEEvPT_"));
  CHECK_FALSE(is_step_mark("_ZN2ns"));
}

TEST_CASE("factors of reductions are read in every type") {
  const auto of = [](auto value, int type) { return nccl_scalar(&value, type); };
  CHECK(of(int8_t{-3}, 0) == -3);
  CHECK(of(uint8_t{200}, 1) == 200);
  CHECK(of(int32_t{-70000}, 2) == -70000);
  CHECK(of(uint32_t{4000000000u}, 3) == 4000000000.0);
  CHECK(of(int64_t{-1} << 40, 4) == -1099511627776.0);
  CHECK(of(uint64_t{1} << 40, 5) == 1099511627776.0);
  CHECK(of(uint16_t{0x3800}, 6) == 0.5);
  CHECK(of(uint16_t{0xC500}, 6) == -5);
  CHECK(of(uint16_t{0x0001}, 6) == 0x1p-24);
  CHECK(of(uint16_t{0x7BFF}, 6) == 65504);
  CHECK(of(0.1f, 7) == static_cast<double>(0.1f));
  CHECK(of(0.1, 8) == 0.1);
  CHECK(of(uint16_t{0x3E80}, 9) == 0.25);
}
