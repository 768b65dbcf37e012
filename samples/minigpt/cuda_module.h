// The CUDA half is a module of its own (libminigpt_cuda.so), loaded for --device cuda only: cuBLAS and NCCL are 800 MB
// that a run on the CPU, or a machine without them, should not have to load.
#pragma once

#include <memory>
#include <string>

#include "samples/minigpt/backend.h"

namespace minigpt {

struct CudaModule {
  std::unique_ptr<Backend> (*make_backend)(const World& world);
  std::unique_ptr<Communicator> (*make_communicator)(const Options& options, const World& world, Backend& backend);
};

inline constexpr char kCudaModuleFile[] = "libminigpt_cuda.so";
inline constexpr char kCudaModuleSymbol[] = "minigpt_cuda_module";

// Its path. Throws UsageError when this build has none.
std::string find_cuda_module();
// Throws Error when it cannot be loaded.
const CudaModule& load_cuda_module();

}  // namespace minigpt
