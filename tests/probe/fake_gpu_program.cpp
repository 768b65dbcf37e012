#include "tests/probe/fake_gpu_program.h"

#include <dlfcn.h>

#include <stdexcept>

namespace forkpoint::fake_gpu {

void require(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(call) + ": CUresult " + std::to_string(static_cast<int>(result)));
}

Gpu::Gpu(const std::string& libcuda) : library_(dlopen(libcuda.c_str(), RTLD_NOW)) {
  if (!library_) throw std::runtime_error(dlerror());
    // Through two macros: cuda.h maps most names to versioned ones.
#define FAKE_GPU_TEXT_OF(name) #name
#define FAKE_GPU_TEXT(name) FAKE_GPU_TEXT_OF(name)
#define FAKE_GPU_FIND(function) \
  driver_.function##_ = reinterpret_cast<decltype(&function)>(symbol(FAKE_GPU_TEXT(function)));
  FAKE_GPU_CALLS(FAKE_GPU_FIND)
  GPU_OK(driver_.cuInit_(0));
}

Gpu::~Gpu() { find<decltype(fake_cuda_finish)>("fake_cuda_finish")(); }

void* Gpu::symbol(const char* name) const {
  void* found = dlsym(library_, name);
  if (!found) throw std::runtime_error(std::string("the fake libcuda has no ") + name);
  return found;
}

void* Gpu::allocate_bytes(size_t size_bytes) const {
  CUdeviceptr memory = 0;
  GPU_OK(driver_.cuMemAlloc_(&memory, size_bytes));
  return reinterpret_cast<void*>(memory);
}

CUstream Gpu::stream(unsigned int flags) const {
  CUstream made = nullptr;
  GPU_OK(driver_.cuStreamCreate_(&made, flags));
  return made;
}

CUevent Gpu::event() const {
  CUevent made = nullptr;
  GPU_OK(driver_.cuEventCreate_(&made, CU_EVENT_DISABLE_TIMING));
  return made;
}

void Gpu::order(CUstream before, CUstream after) const {
  const CUevent between = event();
  GPU_OK(driver_.cuEventRecord_(between, before));
  GPU_OK(driver_.cuStreamWaitEvent_(after, between, 0));
  GPU_OK(driver_.cuEventDestroy_(between));
}

CUfunction Gpu::define(const char* name, FakeKernel run, void* function, const FakeKernelParam* params, size_t count) {
  find<decltype(fake_cuda_define_kernel)>("fake_cuda_define_kernel")(name, run, function, params, count);
  CUmodule module = nullptr;
  CUfunction defined = nullptr;
  GPU_OK(driver_.cuModuleLoadData_(&module, kFakeImage));
  GPU_OK(driver_.cuModuleGetFunction_(&defined, module, name));
  return defined;
}

CUgraphExec Gpu::end_capture(CUstream stream) const {
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
  GPU_OK(driver_.cuStreamEndCapture_(stream, &graph));
  GPU_OK(driver_.cuGraphInstantiate_(&executable, graph, 0));
  GPU_OK(driver_.cuGraphDestroy_(graph));
  return executable;
}

}  // namespace forkpoint::fake_gpu
