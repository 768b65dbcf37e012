#include "probes/launch_functions.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "probes/handle_table.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

constexpr uint32_t kKernels = 1u << 18;  // handles at a time
constexpr uint32_t kMostParams = 4096;

constinit HandleTable kernels;
constinit std::atomic<uint64_t> current_generation{1};

// One parameter of either kind of handle.
CUresult param_info(const CudaDriver& driver, CUfunction function, size_t index, size_t* offset, size_t* size) {
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  if (driver.cuFuncGetParamInfo_) result = driver.cuFuncGetParamInfo_(function, index, offset, size);
  if (result == CUDA_SUCCESS || !driver.cuKernelGetParamInfo_) return result;
  const CUresult as_kernel = driver.cuKernelGetParamInfo_(reinterpret_cast<CUkernel>(function), index, offset, size);
  return as_kernel == CUDA_SUCCESS || as_kernel == CUDA_ERROR_INVALID_VALUE ? as_kernel : result;
}

void read_params(const CudaDriver& driver, CUfunction function, KernelFacts* facts) {
  // Not on the host's stack, which may be a fibre's.
  auto* params = static_cast<KernelParam*>(malloc(kMostParams * sizeof(KernelParam)));
  uint32_t count = 0;
  if (!params) return;
  CUresult result = CUDA_SUCCESS;
  for (; count < kMostParams; ++count) {
    size_t offset = 0, size = 0;
    result = param_info(driver, function, count, &offset, &size);
    if (result != CUDA_SUCCESS) break;
    params[count] = {static_cast<uint32_t>(offset), static_cast<uint32_t>(size)};
    if (offset + size > kMostParamBytes) return free(params);
    if (offset + size > facts->param_bytes) facts->param_bytes = static_cast<uint32_t>(offset + size);
  }
  // Behind the last one the driver says so; anything else means that it does not know.
  if (result != CUDA_ERROR_INVALID_VALUE) return free(params);
  auto* kept = static_cast<KernelParam*>(realloc(params, (count + 1) * sizeof(KernelParam)));
  facts->params = kept ? kept : params;
  facts->param_count = count;
  facts->params_known = true;
}

const char* name_of(const CudaDriver& driver, CUfunction function) {
  const char* name = nullptr;
  if (driver.cuFuncGetName_ && driver.cuFuncGetName_(&name, function) == CUDA_SUCCESS && name) return name;
  if (driver.cuKernelGetName_ && driver.cuKernelGetName_(&name, reinterpret_cast<CUkernel>(function)) == CUDA_SUCCESS && name) {
    return name;
  }
  return "(kernel without a name)";
}

}  // namespace

namespace {

void discard(KernelFacts* facts) {
  free(facts->params);
  delete facts;
}

KernelFacts* make(const CudaDriver& driver, NameTables& names, CUfunction function, uint64_t generation) {
  auto* facts = new (std::nothrow) KernelFacts;
  if (!facts) return nullptr;
  facts->generation.store(generation);
  const char* name = name_of(driver, function);
  facts->name = names.name(name);
  if (!facts->name) return discard(facts), nullptr;
  // Kernels of NCCL bear its name since its first version.
  facts->is_nccl = strncmp(name, "nccl", 4) == 0 || strstr(name, "ncclDevKernel") || strstr(name, "ncclKernel");
  facts->begins_step = is_step_mark(name);
  read_params(driver, function, facts);
  return facts;
}

bool same_kernel(const KernelFacts& a, const KernelFacts& b) {
  return a.name == b.name && a.params_known == b.params_known && a.param_bytes == b.param_bytes &&
         a.param_count == b.param_count &&
         (a.param_count == 0 || memcmp(a.params, b.params, a.param_count * sizeof(KernelParam)) == 0);
}

}  // namespace

const KernelFacts* kernel_facts(const Token&, const CudaDriver& driver, NameTables& names, CUfunction function) {
  const auto handle = reinterpret_cast<uint64_t>(function);
  const uint64_t generation = current_generation.load(std::memory_order_relaxed);
  auto* known = reinterpret_cast<KernelFacts*>(kernels.find(handle));
  if (known && known->generation.load(std::memory_order_relaxed) == generation) return known;
  if (!kernels.create(kKernels) || !names.create()) return nullptr;
  const RelaxedCapture relaxed(driver);
  KernelFacts* made = make(driver, names, function, generation);
  if (!made) return nullptr;
  // A module went since: mostly another one than this kernel's.
  if (known && same_kernel(*known, *made)) {
    known->generation.store(generation, std::memory_order_relaxed);
    return discard(made), known;
  }
  // What it replaces may be in another thread's hands, and stays.
  if (!kernels.set(handle, reinterpret_cast<uint64_t>(made))) return discard(made), nullptr;
  return made;
}

void forget_kernels() { current_generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace forkpoint
