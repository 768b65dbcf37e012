#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "samples/minigpt/cuda_module.h"
#include "samples/minigpt/error.h"
#include "samples/minigpt/gradient_check.h"
#include "samples/minigpt/recording.h"
#include "samples/minigpt/trainer.h"

namespace minigpt {
namespace {

std::unique_ptr<Backend> make_backend(const Options& options, const World& world) {
  return options.device == Device::cpu ? make_cpu_backend(options.threads) : load_cuda_module().make_backend(world);
}

std::unique_ptr<Communicator> make_communicator(const Options& options, const World& world, Backend& backend) {
  if (world.size == 1) return std::make_unique<SoloCommunicator>();
  if (options.device == Device::cpu) return make_shared_memory_communicator(options, world);
  return load_cuda_module().make_communicator(options, world, backend);
}

int run_rank(const Options& options, const World& world) {
  forkpoint_rank(world.rank, world.size);
  forkpoint_fact("framework", "minigpt");
  const std::unique_ptr<Backend> backend = make_backend(options, world);
  if (options.check_gradients) return check_gradients(*backend) ? 0 : 1;
  const std::unique_ptr<Communicator> communicator = make_communicator(options, world, *backend);
  Trainer(options, world, *backend, *communicator).run();
  return 0;
}

// What would fail alike on every rank is better said once, before they start.
void check_before_launch(const Options& options) {
  if (options.device == Device::cuda) find_cuda_module();
  if (options.resume) newest_checkpoint(options.checkpoint_dir);
}

int run(const std::vector<std::string>& arguments) {
  const Options options = parse_options(arguments);
  if (options.help) {
    fmt::print("{}", help_text());
    return 0;
  }
  const std::optional<World> started = world_from_environment();
  const World world = started.value_or(World{});
  if (started && options.ranks != 0 && options.ranks != world.size)
    throw UsageError(fmt::format("--ranks {}, but {} says that this is one of {} ranks: leave --ranks out, or unset {}",
                                 options.ranks, world.set_by, world.size, world.set_by));
  const int ranks = started ? world.size : std::max(1, options.ranks);
  for (const Fault& fault : options.faults) validate(fault, options.model.layers, ranks, options.resume);
  if (!started && ranks > 1 && !options.check_gradients) {
    check_before_launch(options);
    return launch_ranks(ranks, arguments);
  }
  try {
    return run_rank(options, world);
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& error) {
    if (world.size == 1) throw;
    throw Error(fmt::format("rank {}: {}", world.rank, error.what()));
  }
}

}  // namespace
}  // namespace minigpt

int main(int argc, char** argv) {
  try {
    return minigpt::run({argv + 1, argv + argc});
  } catch (const minigpt::UsageError& error) {
    fmt::print(stderr, "minigpt: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "minigpt: {}\n", error.what());
    return 1;
  }
}
