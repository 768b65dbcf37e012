#include "probes/swap_order.h"

namespace forkpoint {

CUresult SwapOrder::capture_of(CUstream stream, uint64_t* capture) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  const CUresult result = driver_.cuStreamGetCaptureInfo_(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
  *capture = status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id + 1 : 0;
  return result;
}

CUresult SwapOrder::before(const SwapMeans& means, CUstream stream, uint64_t capture) {
  if (capture == 0)
    return any_launch_ ? driver_.cuStreamWaitEvent_(stream, means.last, CU_EVENT_WAIT_DEFAULT) : CUDA_SUCCESS;
  if (capture == capture_) return driver_.cuStreamWaitEvent_(stream, means.captured, CU_EVENT_WAIT_DEFAULT);
  return driver_.cuStreamWaitEvent_(stream, means.last, CU_EVENT_WAIT_EXTERNAL);
}

CUresult SwapOrder::behind(const SwapMeans& means, CUstream stream, uint64_t capture) {
  any_launch_ = true;
  if (capture == 0) return driver_.cuEventRecord_(means.last, stream);
  any_capture_ = true;
  const CUresult result = driver_.cuEventRecordWithFlags_(means.last, stream, CU_EVENT_RECORD_EXTERNAL);
  if (result != CUDA_SUCCESS) return result;
  capture_ = capture;
  return driver_.cuEventRecord_(means.captured, stream);
}

}  // namespace forkpoint
