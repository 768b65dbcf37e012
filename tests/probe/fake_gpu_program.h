// Small "GPU programs" for tests, against the fake libcuda, which is loaded by path and never linked. Device memory is
// memory of the process: a kernel is a function that is handed device pointers and reads and writes through them.
//
//   Gpu gpu(path_of_fake_libcuda);
//   const auto scale = gpu.kernel("scale", +[](float* out, const float* in, float by, int n) {
//     for (int i = 0; i < n; ++i) out[i] = by * in[i];
//   });
//   float* x = gpu.make<float>({1, 2, 3});
//   gpu.launch(scale, stream, x, x, 2.0f, 3);
//
// Every call that fails throws std::runtime_error with the call's name and its CUresult.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tests/fakes/fake_cuda.h"

namespace forkpoint::fake_gpu {

#define FAKE_GPU_CALLS(X)                                                                                              \
  X(cuInit)                                                                                                            \
  X(cuCtxSynchronize)                                                                                                  \
  X(cuMemAlloc)                                                                                                        \
  X(cuMemAllocManaged) X(cuMemFree) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemHostAlloc) X(cuMemFreeHost)            \
      X(cuMemHostRegister) X(cuMemHostUnregister) X(cuPointerGetAttributes) X(cuMemcpy) X(cuMemcpyHtoD)                \
          X(cuMemcpyDtoH) X(cuMemcpyDtoD) X(cuMemcpyAsync) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync)                   \
              X(cuMemcpyDtoDAsync) X(cuMemcpy2DAsync) X(cuMemsetD8) X(cuMemsetD32) X(cuMemsetD8Async)                  \
                  X(cuMemsetD32Async) X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery)     \
                      X(cuStreamWaitEvent) X(cuStreamGetFlags) X(cuStreamGetId) X(cuEventCreate) X(cuEventDestroy)     \
                          X(cuEventRecord) X(cuEventSynchronize) X(cuEventQuery) X(cuLaunchKernel) X(cuLaunchKernelEx) \
                              X(cuLaunchCooperativeKernel) X(cuLaunchHostFunc) X(cuModuleLoadData) X(cuModuleUnload)   \
                                  X(cuModuleGetFunction) X(cuModuleGetGlobal) X(cuLibraryLoadData) X(cuLibraryUnload)  \
                                      X(cuLibraryGetKernel) X(cuFuncGetName) X(cuFuncGetParamInfo) X(cuFuncGetModule)  \
                                          X(cuKernelGetParamInfo) X(cuStreamBeginCapture) X(cuStreamEndCapture)        \
                                              X(cuStreamIsCapturing) X(cuStreamGetCaptureInfo)                         \
                                                  X(cuThreadExchangeStreamCaptureMode) X(cuGraphInstantiate)           \
                                                      X(cuGraphInstantiateWithParams) X(cuGraphLaunch)                 \
                                                          X(cuGraphExecDestroy) X(cuGraphExecUpdate) X(cuGraphDestroy) \
                                                              X(cuGraphCreate) X(cuGraphClone) X(cuGraphAddKernelNode) \
                                                                  X(cuGraphAddChildGraphNode) X(cuLaunchKernel_ptsz)   \
                                                                      X(cuMemcpyAsync_ptsz)

// The _ptsz forms, which cuda.h declares to programs that ask for them only.
decltype(::cuLaunchKernel) cuLaunchKernel_ptsz;
decltype(::cuMemcpyAsync) cuMemcpyAsync_ptsz;

struct Driver {
#define FAKE_GPU_MEMBER(function) decltype(&function) function##_ = nullptr;
  FAKE_GPU_CALLS(FAKE_GPU_MEMBER)
#undef FAKE_GPU_MEMBER
};

void require(CUresult result, const char* call);
#define GPU_OK(call) ::forkpoint::fake_gpu::require(call, #call)

// The natural layout of a parameter block.
template <typename... Args>
constexpr std::array<FakeKernelParam, sizeof...(Args)> param_layout() {
  std::array<FakeKernelParam, sizeof...(Args)> params = {};
  const size_t sizes[] = {sizeof(Args)..., 0}, alignments[] = {alignof(Args)..., 1};
  size_t offset = 0;
  for (size_t i = 0; i < sizeof...(Args); ++i) {
    offset = (offset + alignments[i] - 1) / alignments[i] * alignments[i];
    params[i] = {offset, sizes[i]};
    offset += sizes[i];
  }
  return params;
}

template <typename... Args, size_t... kIndex>
void call_kernel(const FakeKernelCall* call, void* function, std::index_sequence<kIndex...>) {
  constexpr auto layout = param_layout<Args...>();
  reinterpret_cast<void (*)(Args...)>(function)(
      *reinterpret_cast<const Args*>(call->params + layout[kIndex].offset)...);
}

template <typename... Args>
void run_kernel(const FakeKernelCall* call, void* function) {
  call_kernel<Args...>(call, function, std::index_sequence_for<Args...>());
}

template <typename... Args>
struct Kernel {
  CUfunction function = nullptr;
};

class Gpu {
 public:
  explicit Gpu(const std::string& libcuda);
  ~Gpu();  // fake_cuda_finish
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  const Driver& driver() const { return driver_; }
  // A switch of the fake: gpu.find<decltype(fake_cuda_set_mode)>("fake_cuda_set_mode")(kFakeDeferred).
  template <typename Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }

  template <typename T>
  T* allocate(size_t count) {
    return static_cast<T*>(allocate_bytes(count * sizeof(T)));
  }
  template <typename T>
  T* make(const std::vector<T>& values) {
    T* memory = allocate<T>(values.size());
    GPU_OK(driver_.cuMemcpyHtoD_(address(memory), values.data(), values.size() * sizeof(T)));
    return memory;
  }
  // Waits, as cuMemcpyDtoH does.
  template <typename T>
  std::vector<T> read(const T* memory, size_t count) const {
    std::vector<T> values(count);
    GPU_OK(driver_.cuMemcpyDtoH_(values.data(), address(memory), count * sizeof(T)));
    return values;
  }
  void release(const void* memory) { GPU_OK(driver_.cuMemFree_(address(memory))); }
  static CUdeviceptr address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

  CUstream stream(unsigned int flags = CU_STREAM_NON_BLOCKING) const;
  CUevent event() const;
  // Work that `after` gets from now on comes after what `before` has got, by an event.
  void order(CUstream before, CUstream after) const;
  void synchronize(CUstream stream) const { GPU_OK(driver_.cuStreamSynchronize_(stream)); }
  void synchronize() const { GPU_OK(driver_.cuCtxSynchronize_()); }

  // A kernel of a module of its own. `function` must have no state: +[](...) {...}.
  template <typename... Args>
  Kernel<Args...> kernel(const char* name, void (*function)(Args...)) {
    constexpr auto layout = param_layout<Args...>();
    return {define(name, run_kernel<Args...>, reinterpret_cast<void*>(function), layout.data(), layout.size())};
  }
  template <typename... Args>
  void launch(const Kernel<Args...>& kernel, CUstream stream, std::type_identity_t<Args>... arguments) const {
    void* params[] = {const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
    GPU_OK(driver_.cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, stream, params, nullptr));
  }

  // What `body` enqueues on the stream, as an executable graph.
  template <typename Body>
  CUgraphExec capture(CUstream stream, Body body) const {
    GPU_OK(driver_.cuStreamBeginCapture_(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    body();
    return end_capture(stream);
  }
  void replay(CUgraphExec graph, CUstream stream) const { GPU_OK(driver_.cuGraphLaunch_(graph, stream)); }

 private:
  void* symbol(const char* name) const;
  void* allocate_bytes(size_t size_bytes) const;
  CUfunction define(const char* name, FakeKernel run, void* function, const FakeKernelParam* params, size_t count);
  CUgraphExec end_capture(CUstream stream) const;

  void* library_ = nullptr;
  Driver driver_;
};

}  // namespace forkpoint::fake_gpu
