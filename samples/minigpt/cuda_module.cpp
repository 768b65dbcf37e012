#include "samples/minigpt/cuda_module.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

#include "samples/minigpt/error.h"

namespace minigpt {

std::string find_cuda_module() {
  const std::string path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / kCudaModuleFile;
  if (!std::filesystem::exists(path))
    throw UsageError(fmt::format(
        "--device cuda: {} is missing: this build has no CUDA half. Configure with FORKPOINT_CUDA=ON on a machine with "
        "nvcc and cuBLAS, or use --device cpu",
        path));
  return path;
}

const CudaModule& load_cuda_module() {
  const std::string path = find_cuda_module();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(fmt::format("{} cannot be loaded: {}", path, dlerror()));
  const auto* module = static_cast<const CudaModule*>(dlsym(library, kCudaModuleSymbol));
  if (!module) throw Error(fmt::format("{} has no {}: it belongs to another version", path, kCudaModuleSymbol));
  return *module;
}

}  // namespace minigpt
