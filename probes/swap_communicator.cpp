#include "probes/swap_communicator.h"

#include <new>

#include "kernels/collective_fatbin.h"

namespace forkpoint {
namespace {

constinit std::atomic<SwapKernels*> all_kernels{nullptr};

// Staging memory that a destroyed communicator has left, by its size and context. Taken and given back whole.
struct Spare {
  std::atomic<CUdeviceptr> memory{0};
  CUcontext context = nullptr;
  uint64_t size_bytes = 0;
  std::atomic<bool> filling{false};
};
Spare spares[64];

CUdeviceptr take_spare(CUcontext context, uint64_t size_bytes) {
  for (Spare& spare : spares) {
    CUdeviceptr memory = spare.memory.load(std::memory_order_acquire);
    if (!memory || spare.context != context || spare.size_bytes != size_bytes) continue;
    if (!spare.memory.compare_exchange_strong(memory, 0)) continue;
    spare.filling.store(false, std::memory_order_release);
    return memory;
  }
  return 0;
}

bool keep_spare(CUcontext context, uint64_t size_bytes, CUdeviceptr memory) {
  for (Spare& spare : spares) {
    if (spare.filling.exchange(true)) continue;
    spare.context = context;
    spare.size_bytes = size_bytes;
    spare.memory.store(memory, std::memory_order_release);
    return true;
  }
  return false;
}

bool has_all(const CudaDriver& driver) {
  return driver.cuDeviceCanAccessPeer_ && driver.cuCtxEnablePeerAccess_ && driver.cuIpcGetMemHandle_ &&
         driver.cuIpcOpenMemHandle_ && driver.cuIpcCloseMemHandle_ && driver.cuEventRecordWithFlags_ &&
         driver.cuStreamGetCaptureInfo_;
}

// Loaded now and not at their first launch, which may wait for the device while a peer waits for it.
const SwapKernels* kernels_of(const CudaDriver& driver, CUcontext context) {
  for (SwapKernels* known = all_kernels.load(std::memory_order_acquire); known; known = known->next) {
    if (known->context == context) return known;
  }
  auto* made = new (std::nothrow) SwapKernels;
  CUmodule module = nullptr;
  if (!made || driver.cuModuleLoadData_(&module, forkpoint_collective_fatbin_data) != CUDA_SUCCESS) return nullptr;
  made->context = context;
  for (int i = 0; i < collective::kCollectiveKernelCount; ++i) {
    int registers = 0;
    CUresult result = driver.cuModuleGetFunction_(&made->function[i], module, collective::kCollectiveKernelNames[i]);
    if (result == CUDA_SUCCESS) {
      result = driver.cuFuncLoad_
                   ? driver.cuFuncLoad_(made->function[i])
                   : driver.cuFuncGetAttribute_(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, made->function[i]);
    }
    if (result != CUDA_SUCCESS) return nullptr;
  }
  made->next = all_kernels.load();
  while (!all_kernels.compare_exchange_weak(made->next, made)) {
  }
  return made;
}

}  // namespace

// ---- Making

bool SwapCommunicator::enter_context() {
  CUcontext before = nullptr;
  if (driver_.cuCtxGetCurrent_(&before) != CUDA_SUCCESS) return false;
  pushed_ = before != context_;
  if (pushed_ && driver_.cuCtxPushCurrent_(context_) != CUDA_SUCCESS) return pushed_ = false;
  return true;
}
void SwapCommunicator::leave_context() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent_(&popped);
  pushed_ = false;
}

// The one in which NCCL works: the current one, if it is on the communicator's device, else the device's primary one.
bool SwapCommunicator::find_context() {
  if (!library_.CommCuDevice || library_.CommCuDevice(handle.load(), &device_) != kNcclSuccess) return false;
  CUcontext current = nullptr;
  CUdevice on = -1;
  if (driver_.cuCtxGetCurrent_(&current) != CUDA_SUCCESS) return false;
  if (current && driver_.cuCtxGetDevice_(&on) == CUDA_SUCCESS && on == device_) return context_ = current, true;
  return driver_.cuDevicePrimaryCtxRetain_(&context_, device_) == CUDA_SUCCESS;
}

// Whole pages of the device: smaller pieces share an allocation with others, and a handle opens all of it.
uint64_t SwapCommunicator::staging_bytes() const {
  constexpr uint64_t kPage = 2 << 20;
  return (shape_.total_bytes() + kPage - 1) / kPage * kPage;
}

bool SwapCommunicator::make_staging() {
  shape_ = collective::staging_for(static_cast<uint32_t>(size_));
  const uint64_t size_bytes = staging_bytes();
  staging_ = take_spare(context_, size_bytes);
  if (!staging_ && driver_.cuMemAlloc_(&staging_, size_bytes) != CUDA_SUCCESS) return staging_ = 0, false;
  return driver_.cuMemsetD8Async_(staging_, 0, size_bytes, exchange_) == CUDA_SUCCESS;
}

// What the kernels need. Without it this member says no.
void SwapCommunicator::make_means() {
  if (!has_all(driver_))
    refuse("the driver lacks a function");
  else if (driver_.cuEventCreate_(&last_, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS ||
           driver_.cuEventCreate_(&captured_, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
    refuse("the driver makes no event");
  else if (!(kernels_ = kernels_of(driver_, context_)))
    refuse("the kernels could not be loaded");
  else if (!make_staging())
    refuse("there is no device memory for it");
}

// Others may use it from now on: nobody writes to it any more.
void SwapCommunicator::give_back_staging() {
  for (int i = 0; i < size_ && i < static_cast<int>(collective::kMostRanks); ++i) {
    if (opened_[i]) driver_.cuIpcCloseMemHandle_(reinterpret_cast<CUdeviceptr>(reached_[i]));
    opened_[i] = false;
  }
  if (staging_) keep_spare(context_, staging_bytes(), staging_);
  staging_ = 0;
}

// ---- Ending

void SwapCommunicator::forget_all_in_child() {
  forget_process_number();
  all_kernels.store(nullptr);
  for (Spare& spare : spares) spare.memory.store(0), spare.filling.store(false);
}

void SwapCommunicator::abort() {
  if (abort_) __atomic_store_n(abort_, 1u, __ATOMIC_RELEASE);
}

// A kernel of ours that has ended has heard from every member, so nobody writes to its memory any more.
void SwapCommunicator::release() {
  if (!swaps_ || !enter_context()) return;
  const RelaxedCapture relaxed(driver_);
  swaps_ = false;
  if (!any_capture_ && (!any_launch_ || driver_.cuEventQuery_(last_) == CUDA_SUCCESS)) give_back_staging();
  leave_context();
}

}  // namespace forkpoint
