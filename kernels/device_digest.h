// The digest of lib/digest.h on the GPU, through the CUDA runtime. Used alone (trainers, tests); the probe launches the
// same kernels through the driver (kernels/digest_launch.h, which also explains slots, scratch and rings).
//
// Guarantee: gpu_to_gpu. Only integer sums and maxima are formed, so neither grid nor order nor device changes a bit.
// No function here allocates, synchronises or changes any state of the device; each is asynchronous on `stream` and may
// be captured in a CUDA graph. The error returned is the launch's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/digest_flush.h"
#include "kernels/digest_launch.h"
#include "kernels/digest_pieces.h"
#include "kernels/digest_tensors.h"

namespace forkpoint {

// data: device address of element (0, 0, ...).
cudaError_t digest_on_device(const void* data, const TensorView& view, const DigestTarget& target, cudaStream_t stream);
// A contiguous run that starts at byte first_byte of its logical tensor.
cudaError_t digest_bytes_on_device(const void* data, size_t size_bytes, DType dtype, uint64_t first_byte,
                                   const DigestTarget& target, cudaStream_t stream);
// Anything that the planner made.
cudaError_t launch_digest(DigestLaunch& launch, cudaStream_t stream);
cudaError_t launch_digest(DigestPiecesLaunch& launch, cudaStream_t stream);
cudaError_t launch_digest(DigestTensorsLaunch& launch, cudaStream_t stream);
cudaError_t launch_digest(DigestFlushLaunch& launch, cudaStream_t stream);

}  // namespace forkpoint
