#include "samples/minigpt/world.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

#include "samples/minigpt/error.h"

namespace minigpt {
namespace {

struct Variables {
  const char* rank;
  const char* size;
  const char* local_rank;
};
// In this order: mpirun within a Slurm allocation sets both its own and Slurm's.
constexpr Variables kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
};

int number_from(const char* variable) {
  const std::string text = std::getenv(variable);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    throw UsageError(fmt::format("{} is \"{}\", expected a whole number from 0", variable, text));
  return value;
}

std::string job_name() {
  std::string name;
  for (const char* variable :
       {"MINIGPT_JOB", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID",
        "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MASTER_ADDR", "MASTER_PORT"})
    if (const char* value = std::getenv(variable)) name += fmt::format("{}={};", variable, value);
  return name;
}

}  // namespace

std::optional<World> world_from_environment() {
  for (const Variables& variables : kLaunchers) {
    if (!std::getenv(variables.rank)) continue;
    if (!std::getenv(variables.size))
      throw UsageError(fmt::format("{} is set, but {} is not: set both, or unset {}", variables.rank, variables.size,
                                   variables.rank));
    World world;
    world.rank = number_from(variables.rank);
    world.size = number_from(variables.size);
    world.set_by = variables.rank;
    if (world.rank >= world.size)
      throw UsageError(fmt::format("{} is {}, but {} is {}: ranks count from 0", variables.rank, world.rank,
                                   variables.size, world.size));
    world.local_rank = std::getenv(variables.local_rank) ? number_from(variables.local_rank) : world.rank;
    world.job = job_name();
    return world;
  }
  return std::nullopt;
}

}  // namespace minigpt
