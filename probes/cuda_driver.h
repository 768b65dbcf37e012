// The functions of libcuda that the probe uses, found in the process at run time. cuda.h gives types only; nothing links.
#pragma once

#include <cuda.h>

#include "probes/guard.h"

namespace forkpoint {

#define FORKPOINT_DRIVER_FUNCTIONS(X)                                                                                   \
  X(cuDriverGetVersion) X(cuDeviceGetCount) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxGetState)    \
  X(cuDevicePrimaryCtxRetain) X(cuCtxGetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetDevice)               \
  X(cuStreamGetCtx) X(cuStreamIsCapturing) X(cuThreadExchangeStreamCaptureMode) X(cuPointerGetAttributes)               \
  X(cuModuleLoadData) X(cuModuleGetFunction) X(cuFuncGetAttribute) X(cuMemHostRegister) X(cuMemHostGetDevicePointer)    \
  X(cuMemAlloc) X(cuMemsetD8Async) X(cuStreamCreate) X(cuEventCreate) X(cuEventRecord) X(cuEventQuery)                  \
  X(cuStreamWaitEvent) X(cuLaunchKernel)
// Of later drivers; nullptr where they are missing.
#define FORKPOINT_DRIVER_OPTIONAL_FUNCTIONS(X)                                                                          \
  X(cuCtxGetId) X(cuFuncLoad) X(cuStreamGetFlags) X(cuFuncGetParamInfo) X(cuKernelGetParamInfo) X(cuFuncGetName)        \
  X(cuKernelGetName) X(cuStreamGetCaptureInfo) X(cuMemcpyDtoDAsync) X(cuStreamSynchronize) X(cuMemFree)                 \
  X(cuLaunchKernelEx) X(cuDeviceTotalMem) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync)             \
  X(cuLaunchCooperativeKernel)                                                                                          \
  X(cuDeviceCanAccessPeer) X(cuCtxEnablePeerAccess) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle)   \
  X(cuEventRecordWithFlags) X(cuStreamQuery) X(cuDeviceGetUuid) X(cuDeviceGetP2PAttribute)

struct CudaDriver {
#define FORKPOINT_MEMBER(function) decltype(&::function) function##_ = nullptr;
  FORKPOINT_DRIVER_FUNCTIONS(FORKPOINT_MEMBER)
  FORKPOINT_DRIVER_OPTIONAL_FUNCTIONS(FORKPOINT_MEMBER)
#undef FORKPOINT_MEMBER
};

// Another thread may be capturing in global mode: calls that are "unsafe" then would break its capture, or ours fail.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaDriver& driver) : driver_(driver) {
    exchanged_ = driver_.cuThreadExchangeStreamCaptureMode_(&mode_) == CUDA_SUCCESS;
  }
  ~RelaxedCapture() {
    if (exchanged_) driver_.cuThreadExchangeStreamCaptureMode_(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const CudaDriver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_ = false;
};

// After these nothing that was launched in the context will ever finish.
inline bool is_fatal(CUresult result) {
  return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_DEINITIALIZED ||
         (result >= CUDA_ERROR_ILLEGAL_ADDRESS && result <= CUDA_ERROR_LAUNCH_TIMEOUT) ||
         (result >= CUDA_ERROR_ASSERT && result <= CUDA_ERROR_LAUNCH_FAILED);
}

// nullptr while libcuda.so.1 is not loaded in this process, or lacks a function. Never loads it.
const CudaDriver* find_cuda_driver(const Token& token);

}  // namespace forkpoint
