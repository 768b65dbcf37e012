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
#define FORKPOINT_DRIVER_OPTIONAL_FUNCTIONS(X) X(cuCtxGetId) X(cuFuncLoad)

struct CudaDriver {
#define FORKPOINT_MEMBER(function) decltype(&::function) function##_ = nullptr;
  FORKPOINT_DRIVER_FUNCTIONS(FORKPOINT_MEMBER)
  FORKPOINT_DRIVER_OPTIONAL_FUNCTIONS(FORKPOINT_MEMBER)
#undef FORKPOINT_MEMBER
};

// nullptr while libcuda.so.1 is not loaded in this process, or lacks a function. Never loads it.
const CudaDriver* find_cuda_driver(const Token& token);

}  // namespace forkpoint
