#include "probes/cuda_driver.h"
#include "probes/operands.h"

namespace forkpoint {
namespace {

// A stream works in its own context; a default stream in whatever context is current.
class StreamContext {
 public:
  StreamContext(const CudaDriver& driver, CUstream stream) : driver_(driver) {
    const bool is_default = stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
    CUcontext wanted = nullptr, current = nullptr;
    if (is_default || driver.cuStreamGetCtx_(stream, &wanted) != CUDA_SUCCESS) return;
    driver.cuCtxGetCurrent_(&current);
    pushed_ = current != wanted && driver.cuCtxPushCurrent_(wanted) == CUDA_SUCCESS;
  }
  ~StreamContext() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent_(&popped);
  }
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
};

}  // namespace

bool copy_from_device(const Token& token, const void* source, size_t size_bytes, CUstream_st* stream, void* target, int* error) {
  const CudaDriver* driver = find_cuda_driver(token);
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  if (driver && driver->cuMemcpyDtoHAsync_ && driver->cuStreamSynchronize_) {
    const StreamContext current(*driver, stream);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    driver->cuStreamIsCapturing_(stream, &status);
    const RelaxedCapture relaxed(*driver);
    result = status == CU_STREAM_CAPTURE_STATUS_NONE
                 ? driver->cuMemcpyDtoHAsync_(target, reinterpret_cast<CUdeviceptr>(source), size_bytes, stream)
                 : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result == CUDA_SUCCESS) result = driver->cuStreamSynchronize_(stream);
  }
  *error = static_cast<int>(result);
  return result == CUDA_SUCCESS;
}

}  // namespace forkpoint
