#include "probes/launch_functions.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "probes/step_marks.h"

namespace forkpoint {
namespace {

constexpr uint32_t kKernels = 1u << 16;
constexpr uint32_t kMostParams = 4096;

constinit InternTable<KernelFacts> kernels;
constinit std::atomic<uint64_t> current_generation{1};

// One parameter of either kind of handle.
bool param_info(const CudaDriver& driver, CUfunction function, size_t index, size_t* offset, size_t* size) {
  if (driver.cuFuncGetParamInfo_ && driver.cuFuncGetParamInfo_(function, index, offset, size) == CUDA_SUCCESS) return true;
  return driver.cuKernelGetParamInfo_ &&
         driver.cuKernelGetParamInfo_(reinterpret_cast<CUkernel>(function), index, offset, size) == CUDA_SUCCESS;
}

void read_params(const CudaDriver& driver, CUfunction function, KernelFacts* facts) {
  if (!driver.cuFuncGetParamInfo_ && !driver.cuKernelGetParamInfo_) return;
  KernelParam params[kMostParams];
  uint32_t count = 0;
  for (size_t offset = 0, size = 0; count < kMostParams && param_info(driver, function, count, &offset, &size); ++count) {
    params[count] = {static_cast<uint32_t>(offset), static_cast<uint32_t>(size)};
    if (offset + size > kMostParamBytes) return;
    if (offset + size > facts->param_bytes) facts->param_bytes = static_cast<uint32_t>(offset + size);
  }
  if (count > 0) {
    facts->params = static_cast<KernelParam*>(malloc(count * sizeof(KernelParam)));
    if (!facts->params) return;
    memcpy(facts->params, params, count * sizeof(KernelParam));
  }
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

struct KernelFacts::Key {
  const CudaDriver& driver;
  NameTables& names;
  CUfunction function;
  uint64_t generation;
};

bool KernelFacts::equals(const Key& key) const {
  return handle == reinterpret_cast<uint64_t>(key.function) && generation == key.generation;
}

KernelFacts* KernelFacts::make(uint64_t hash, const Key& key) {
  auto* facts = new (std::nothrow) KernelFacts;
  if (!facts) return nullptr;
  facts->hash = hash;
  facts->handle = reinterpret_cast<uint64_t>(key.function);
  facts->generation = key.generation;
  const char* name = name_of(key.driver, key.function);
  facts->name = key.names.name(name);
  if (!facts->name) {
    delete facts;
    return nullptr;
  }
  // Kernels of NCCL bear its name since its first version.
  facts->is_nccl = strncmp(name, "nccl", 4) == 0 || strstr(name, "ncclDevKernel") || strstr(name, "ncclKernel");
  facts->begins_step = is_step_mark(name);
  read_params(key.driver, key.function, facts);
  return facts;
}

void KernelFacts::discard(KernelFacts* facts) {
  free(facts->params);
  delete facts;
}

const KernelFacts* kernel_facts(const Token&, const CudaDriver& driver, NameTables& names, CUfunction function) {
  if (!kernels.create(kKernels) || !names.create()) return nullptr;
  const uint64_t generation = current_generation.load(std::memory_order_relaxed);
  const uint64_t handle = reinterpret_cast<uint64_t>(function);
  return kernels.intern(mix64(handle ^ generation << 48), KernelFacts::Key{driver, names, function, generation});
}

void forget_kernels() { current_generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace forkpoint
