// Allocations and releases of device memory.
#include <cuda.h>

#include "probes/allocations.h"
#include "probes/cupti_calls.h"
#include "probes/launch_recorder.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

// A part of the device's memory so large that somebody will hand it out piece by piece.
constexpr uint64_t kArenaShare = 5;  // a fifth

uint64_t total_memory(const Token& token, CUcontext context) {
  static constinit std::atomic<uint64_t> known{0};
  uint64_t total = known.load(std::memory_order_relaxed);
  if (total != 0) return total;
  const CudaDriver* driver = find_cuda_driver(token);
  CUdevice device = 0;
  size_t bytes = 0;
  if (!driver || !context || !driver->cuDeviceTotalMem_ || driver->cuCtxGetDevice_(&device) != CUDA_SUCCESS ||
      driver->cuDeviceTotalMem_(&bytes, device) != CUDA_SUCCESS) {
    return UINT64_MAX;
  }
  known.store(bytes, std::memory_order_relaxed);
  return bytes;
}

// Memory of another device, or shared with another process, is not for kernels of every context to read.
int device_of(const Token& token, CUdeviceptr address, MemoryKind kind) {
  const CudaDriver* driver = find_cuda_driver(token);
  int device = Allocation::kAnyDevice;
  if (!driver || kind == MemoryKind::managed) return device;
  CUdevice current = Allocation::kAnyDevice;
  if (kind == MemoryKind::device) return driver->cuCtxGetDevice_(&current) == CUDA_SUCCESS ? current : device;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* values[] = {&device};
  // Memory that a graph owns is of no device as long as the graph has not run.
  const bool known = driver->cuPointerGetAttributes_(1, attributes, values, address) == CUDA_SUCCESS && device >= 0;
  return known ? device : Allocation::kAnyDevice;
}

// The context's memory goes with it.
void on_context_gone(const Token&, const DriverCall& call) {
  if (call.entry) memory.allocations.clear();
}

void allocated(const Token& token, const DriverCall& call, const CUdeviceptr* address, uint64_t bytes, MemoryKind kind) {
  if (!call.succeeded() || !address) return;
  // Our kernels are loaded with the host's first allocation, before it has anything on the device that loading could wait for.
  int error = 0;
  if (recorder.wants_launches() && call.context) recorder.digest_context(token, call.context, &error);
  const uint64_t ordinal = memory.allocations.add(*address, bytes, kind, device_of(token, *address, kind));
  if (ordinal == 0) return;
  if (bytes >= total_memory(token, call.context) / kArenaShare) memory.allocations.mark(*address, kAllocationArena);
  if (recorder.wants_launches()) launch_recorder.note_everywhere(token, LaunchKind::allocate, ordinal, bytes);
}

// Before the call: behind it, the address may be another thread's already.
void released(const Token& token, const DriverCall& call, CUdeviceptr address) {
  if (!call.entry || address == 0) return;
  const uint64_t ordinal = memory.allocations.remove(address);
  if (ordinal != 0 && recorder.wants_launches()) launch_recorder.note_everywhere(token, LaunchKind::release, ordinal);
}

template <typename Params, MemoryKind kKind>
void on_allocate(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const Params*>(call.params);
  allocated(token, call, params.dptr, params.bytesize, kKind);
}

void on_pitch(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuMemAllocPitch_v2_params*>(call.params);
  if (call.succeeded() && params.pPitch) allocated(token, call, params.dptr, *params.pPitch * params.Height, MemoryKind::device);
}

void on_free(const Token& token, const DriverCall& call) {
  released(token, call, static_cast<const cuMemFree_v2_params*>(call.params)->dptr);
}
void on_free_async(const Token& token, const DriverCall& call) {
  released(token, call, static_cast<const cuMemFreeAsync_params*>(call.params)->dptr);
}

void on_map(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuMemMap_params*>(call.params);
  allocated(token, call, &params.ptr, params.size, MemoryKind::mapped);
}

void on_unmap(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuMemUnmap_params*>(call.params);
  Allocation mapped;
  for (CUdeviceptr at = params.ptr; call.entry && at < params.ptr + params.size; at = mapped.end()) {
    if (!memory.allocations.find(at, &mapped)) break;
    released(token, call, mapped.start);
  }
}

// The driver knows how large what another process gave us is.
void on_open(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuIpcOpenMemHandle_v2_params*>(call.params);
  const CudaDriver* driver = find_cuda_driver(token);
  if (!call.succeeded() || !params.pdptr || !driver) return;
  CUdeviceptr start = 0;
  size_t size = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&start, &size};
  if (driver->cuPointerGetAttributes_(2, attributes, values, *params.pdptr) != CUDA_SUCCESS) return;
  allocated(token, call, &start, size, MemoryKind::peer);
}
void on_close(const Token& token, const DriverCall& call) {
  released(token, call, static_cast<const cuIpcCloseMemHandle_params*>(call.params)->dptr);
}

constexpr CallEntry kCalls[] = {
    FORKPOINT_CALL(cuMemAlloc_v2, (on_allocate<cuMemAlloc_v2_params, MemoryKind::device>)),
    FORKPOINT_CALL(cuMemAllocManaged, (on_allocate<cuMemAllocManaged_params, MemoryKind::managed>)),
    FORKPOINT_CALL_PTSZ(cuMemAllocAsync, (on_allocate<cuMemAllocAsync_params, MemoryKind::pool>)),
    FORKPOINT_CALL_PTSZ(cuMemAllocFromPoolAsync, (on_allocate<cuMemAllocFromPoolAsync_params, MemoryKind::pool>)),
    FORKPOINT_CALL(cuMemAllocPitch_v2, on_pitch),
    FORKPOINT_CALL(cuMemFree_v2, on_free),
    FORKPOINT_CALL_PTSZ(cuMemFreeAsync, on_free_async),
    FORKPOINT_CALL(cuMemMap, on_map),
    FORKPOINT_CALL(cuMemUnmap, on_unmap),
    FORKPOINT_CALL(cuIpcOpenMemHandle_v2, on_open),
    FORKPOINT_CALL(cuIpcCloseMemHandle, on_close),
    FORKPOINT_CALL(cuCtxDestroy_v2, on_context_gone),
    FORKPOINT_CALL(cuDevicePrimaryCtxReset, on_context_gone),
    FORKPOINT_CALL(cuDevicePrimaryCtxReset_v2, on_context_gone),
};

}  // namespace

CallTable memory_calls() { return {kCalls, sizeof(kCalls) / sizeof(kCalls[0])}; }

}  // namespace forkpoint
