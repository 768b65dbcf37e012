// Sums of rows by destination in a fixed order, through the CUDA runtime (kernels/scatter_launch.h says what is
// computed and guaranteed). Used alone by trainers and tests; the probe launches the same kernels through the driver.
//
// Nothing is allocated or synchronised; asynchronous on `stream`, may be captured. The error returned is the launch's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/scatter_launch.h"
#include "kernels/scatter_sort.h"

namespace forkpoint {

cudaError_t scatter_on_device(ScatterType type, const ScatterWork& work, cudaStream_t stream);
cudaError_t sort_on_device(const SortWork& work, cudaStream_t stream);

}  // namespace forkpoint
