#include "kernels/device_digest.h"

#include <cuda_runtime.h>

#include "kernels/digest_flat.cuh"
#include "kernels/digest_flush.cuh"
#include "kernels/digest_pieces.cuh"
#include "kernels/digest_tensors.cuh"
#include "kernels/digest_units.cuh"

namespace forkpoint::device {

// 64 registers a thread, so that 32 warps share a multiprocessor, each with a tile under way.
#define FORKPOINT_FLAT_KERNEL(name, loop)                                           \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads) \
      name(const __grid_constant__ DigestFlat work) {                               \
    __shared__ FlatShared shared;                                                   \
    digest_flat<loop>(work, blockIdx.x, gridDim.x, shared);                         \
  }
#define FORKPOINT_UNITS_KERNEL(name, loop)                                         \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 768 / kBlockThreads) \
      name(const __grid_constant__ DigestUnits work) {                             \
    __shared__ UnitsShared shared;                                                 \
    digest_units<loop>(work, shared);                                              \
  }

FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_none, kLoopNone)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_masked8, kLoopMasked8)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_masked16, kLoopMasked16)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_masked32, kLoopMasked32)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_masked64, kLoopMasked64)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_absolute8, kLoopAbsolute8)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_absolute16, kLoopAbsolute16)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_absolute32, kLoopAbsolute32)
FORKPOINT_FLAT_KERNEL(forkpoint_digest_flat_absolute64, kLoopAbsolute64)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_none, kLoopNone)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_masked8, kLoopMasked8)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_masked16, kLoopMasked16)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_masked32, kLoopMasked32)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_masked64, kLoopMasked64)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_absolute8, kLoopAbsolute8)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_absolute16, kLoopAbsolute16)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_absolute32, kLoopAbsolute32)
FORKPOINT_UNITS_KERNEL(forkpoint_digest_units_absolute64, kLoopAbsolute64)

// A block a piece; the pieces' dtypes may differ.
extern "C" __global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads)
    forkpoint_digest_batch(const DigestBatch batch) {
  __shared__ FlatShared shared;
  const DigestFlat& piece = batch.pieces[blockIdx.x];
  switch (piece.loop) {
    case kLoopNone:
      return digest_flat<kLoopNone>(piece, 0, 1, shared);
    case kLoopMasked8:
      return digest_flat<kLoopMasked8>(piece, 0, 1, shared);
    case kLoopMasked16:
      return digest_flat<kLoopMasked16>(piece, 0, 1, shared);
    case kLoopMasked32:
      return digest_flat<kLoopMasked32>(piece, 0, 1, shared);
    case kLoopMasked64:
      return digest_flat<kLoopMasked64>(piece, 0, 1, shared);
    case kLoopAbsolute8:
      return digest_flat<kLoopAbsolute8>(piece, 0, 1, shared);
    case kLoopAbsolute16:
      return digest_flat<kLoopAbsolute16>(piece, 0, 1, shared);
    case kLoopAbsolute32:
      return digest_flat<kLoopAbsolute32>(piece, 0, 1, shared);
    default:
      return digest_flat<kLoopAbsolute64>(piece, 0, 1, shared);
  }
}

#define FORKPOINT_PIECES_KERNEL(name, capacity)                                     \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads) \
      name(const __grid_constant__ DigestPieces<capacity> pieces) {                 \
    __shared__ FlatShared shared;                                                   \
    digest_piece(pieces, shared);                                                   \
  }

FORKPOINT_PIECES_KERNEL(forkpoint_digest_pieces4, 4)
FORKPOINT_PIECES_KERNEL(forkpoint_digest_pieces16, 16)
FORKPOINT_PIECES_KERNEL(forkpoint_digest_pieces48, 48)

#define FORKPOINT_TENSORS_KERNEL(name, capacity)                                    \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads) \
      name(const __grid_constant__ DigestTensors<capacity> tensors) {               \
    __shared__ FlatShared shared;                                                   \
    digest_tensor(tensors, shared);                                                 \
  }

FORKPOINT_TENSORS_KERNEL(forkpoint_digest_tensors8, kFewTensors)
FORKPOINT_TENSORS_KERNEL(forkpoint_digest_tensors64, kMostTensors)

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    forkpoint_digest_flush(const __grid_constant__ DigestFlush work) {
  __shared__ FlushShared shared;
  flush_digests(work, shared);
}

}  // namespace forkpoint::device

namespace forkpoint {
namespace {

// In the order of kDigestKernelNames.
const void* const kKernels[kDigestKernelCount] = {
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_none),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_masked8),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_masked16),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_masked32),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_masked64),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_absolute8),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_absolute16),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_absolute32),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flat_absolute64),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_none),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_masked8),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_masked16),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_masked32),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_masked64),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_absolute8),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_absolute16),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_absolute32),
    reinterpret_cast<const void*>(&device::forkpoint_digest_units_absolute64),
    reinterpret_cast<const void*>(&device::forkpoint_digest_batch),
    reinterpret_cast<const void*>(&device::forkpoint_digest_pieces4),
    reinterpret_cast<const void*>(&device::forkpoint_digest_pieces16),
    reinterpret_cast<const void*>(&device::forkpoint_digest_pieces48),
    reinterpret_cast<const void*>(&device::forkpoint_digest_flush),
    reinterpret_cast<const void*>(&device::forkpoint_digest_tensors8),
    reinterpret_cast<const void*>(&device::forkpoint_digest_tensors64)};

// The number of multiprocessors of the current device; asked for each time, because threads change devices.
cudaError_t multiprocessors(int* count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

template <typename Launch>
cudaError_t launch_planned(Launch& launch, cudaStream_t stream) {
  void* arguments[] = {launch.params()};
  return cudaLaunchKernel(kKernels[launch.kernel], dim3(launch.grid), dim3(launch.block), arguments,
                          launch.shared_bytes, stream);
}

}  // namespace

cudaError_t launch_digest(DigestLaunch& launch, cudaStream_t stream) { return launch_planned(launch, stream); }
cudaError_t launch_digest(DigestPiecesLaunch& launch, cudaStream_t stream) { return launch_planned(launch, stream); }
cudaError_t launch_digest(DigestTensorsLaunch& launch, cudaStream_t stream) { return launch_planned(launch, stream); }
cudaError_t launch_digest(DigestFlushLaunch& launch, cudaStream_t stream) { return launch_planned(launch, stream); }

cudaError_t digest_on_device(const void* data, const TensorView& view, const DigestTarget& target,
                             cudaStream_t stream) {
  int count = 0;
  if (const cudaError_t error = multiprocessors(&count); error != cudaSuccess) return error;
  DigestLaunch launch = plan_digest(data, view, target, count);
  return launch_digest(launch, stream);
}

cudaError_t digest_bytes_on_device(const void* data, size_t size_bytes, DType dtype, uint64_t first_byte,
                                   const DigestTarget& target, cudaStream_t stream) {
  int count = 0;
  if (const cudaError_t error = multiprocessors(&count); error != cudaSuccess) return error;
  DigestLaunch launch = plan_digest_bytes(data, size_bytes, dtype, first_byte, target, count);
  return launch_digest(launch, stream);
}

}  // namespace forkpoint
