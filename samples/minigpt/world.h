#pragma once

#include <optional>
#include <string>
#include <vector>

namespace minigpt {

// This process among those of its job.
struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // on this host: which GPU
  std::string job;     // names the job alike on all ranks and unlike any other job of this user at the same time
  std::string set_by;  // the variable that said so; empty: not started by a launcher
};

// From RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID and their companions, as torchrun, mpirun and srun set
// them. Nothing when none is set. Throws UsageError when they are set, but make no sense.
std::optional<World> world_from_environment();

// Starts `ranks` copies of this program with the same arguments and waits for them. When one fails, the others are
// ended. Returns the exit status for the whole job.
int launch_ranks(int ranks, const std::vector<std::string>& arguments);

}  // namespace minigpt
