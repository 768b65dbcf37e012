#include "probes/cuda_context.h"

#include <new>

#include "kernels/digest_fatbin.h"
#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr int64_t kBuildPatienceNs = 10'000'000'000;
constexpr int64_t kArrivalNs = 1'000'000'000;
constinit std::atomic<CudaContext*> newest_context{nullptr};

}  // namespace

void CudaContext::forget_all_in_child() { newest_context.store(nullptr); }

CudaContext* CudaContext::find(const CudaDriver& driver, CUcontext context) {
  const uint64_t id = id_of(driver, context);
  for (CudaContext* known = newest_context.load(std::memory_order_acquire); known; known = known->next_) {
    if (known->context_ != context || known->id_ != id) continue;
    return known->state_.load(std::memory_order_acquire) == static_cast<uint32_t>(State::ready) ? known : nullptr;
  }
  return nullptr;
}

void CudaContext::failed(CUcontext context) {
  for (CudaContext* known = newest_context.load(std::memory_order_acquire); known; known = known->next_) {
    if (known->context_ == context) known->mark_gone();
  }
}

void CudaContext::drain_graph_results() {
  for (CudaContext* known = newest_context.load(std::memory_order_acquire); known; known = known->next_) {
    if (known->state_.load(std::memory_order_acquire) == static_cast<uint32_t>(State::ready)) known->graph_results_.drain();
  }
}

// A destroyed context's address comes back for another one; its number does not.
uint64_t CudaContext::id_of(const CudaDriver& driver, CUcontext context) {
  unsigned long long id = 0;
  if (driver.cuCtxGetId_ && driver.cuCtxGetId_(context, &id) == CUDA_SUCCESS) return id;
  return 0;
}

CudaContext* CudaContext::of_current(const CudaDriver& driver, CUcontext context, uint32_t slots, int* error) {
  const uint64_t id = id_of(driver, context);
  CudaContext* made = nullptr;
  CudaContext* newest = newest_context.load(std::memory_order_acquire);
  for (;;) {
    for (CudaContext* known = newest; known; known = known->next_) {
      if (known->context_ != context) continue;
      if (known->id_ == id) {
        delete made;
        return known->once_built(error);
      }
      known->mark_gone();
    }
    if (!made) made = new (std::nothrow) CudaContext;
    if (!made) return nullptr;
    made->context_ = context;
    made->id_ = id;
    made->next_ = newest;
    if (newest_context.compare_exchange_strong(newest, made, std::memory_order_acq_rel)) break;
  }
  const CUresult result = made->build(driver, slots);
  made->error_.store(static_cast<int>(result));
  made->state_.store(static_cast<uint32_t>(result == CUDA_SUCCESS ? State::ready : State::failed), std::memory_order_release);
  futex_wake(made->state_);
  return made->once_built(error);
}

CudaContext* CudaContext::once_built(int* error) {
  const auto building = static_cast<uint32_t>(State::building);
  uint32_t state = state_.load(std::memory_order_acquire);
  if (state == building) {
    const int64_t give_up_ns = now_ns() + kBuildPatienceNs;
    while (state == building && now_ns() < give_up_ns) {
      futex_wait(state_, building, 1'000'000);
      state = state_.load(std::memory_order_acquire);
    }
  }
  *error = error_.load();
  return state == static_cast<uint32_t>(State::ready) ? this : nullptr;
}

bool CudaContext::gone() const {
  const int64_t since_ns = gone_since_ns_.load(std::memory_order_relaxed);
  return since_ns != 0 && now_ns() - since_ns > kArrivalNs;
}

void CudaContext::mark_gone() {
  int64_t there = 0;
  gone_since_ns_.compare_exchange_strong(there, now_ns(), std::memory_order_relaxed);
}

CUresult CudaContext::build(const CudaDriver& driver, uint32_t slots) {
  CUdevice device = 0;
  CUresult result = driver.cuCtxGetDevice_(&device);
  if (result == CUDA_SUCCESS) {
    result = driver.cuDeviceGetAttribute_(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  }
  if (result == CUDA_SUCCESS) result = load_kernels(driver);
  if (result == CUDA_SUCCESS) result = make_slots(driver, slots);
  if (result == CUDA_SUCCESS) result = zero_scratch(driver);
  return result;
}

// Each kernel now: loading one lazily, at its first launch, may wait for the whole device.
CUresult CudaContext::load_kernels(const CudaDriver& driver) {
  CUmodule module = nullptr;
  CUresult result = driver.cuModuleLoadData_(&module, forkpoint_digest_fatbin_data);
  for (int i = 0; i < kDigestKernelCount && result == CUDA_SUCCESS; ++i) {
    result = driver.cuModuleGetFunction_(&kernels_[i], module, kDigestKernelNames[i]);
    if (result != CUDA_SUCCESS) break;
    int registers = 0;  // a driver without cuFuncLoad loads what it is asked about
    result = driver.cuFuncLoad_ ? driver.cuFuncLoad_(kernels_[i])
                                : driver.cuFuncGetAttribute_(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernels_[i]);
  }
  return result;
}

// Memory of ours, registered: what cuMemHostAlloc gives would be unmapped with the context, under the writer's eyes.
CUresult CudaContext::make_slots(const CudaDriver& driver, uint32_t slots) {
  const size_t result_bytes = slots * sizeof(DigestSlot);
  results_ = static_cast<DigestSlot*>(map_zeroed(result_bytes));
  slots_ = new (std::nothrow) DeviceSlot[slots];
  if (!results_ || !slots_) return CUDA_ERROR_OUT_OF_MEMORY;
  for (uint32_t i = 0; i < slots; ++i) {
    slots_[i].context = this;
    slots_[i].result = &results_[i];
  }
  slot_count_ = slots;
  CUresult result = driver.cuMemHostRegister_(results_, result_bytes, CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result == CUDA_SUCCESS) result = driver.cuMemHostGetDevicePointer_(&device_results_, results_, 0);
  return result;
}

// On a stream of its own, and not waited for: the host may have enqueued work that never ends without this thread.
CUresult CudaContext::zero_scratch(const CudaDriver& driver) {
  const size_t scratch_bytes = slot_count_ * sizeof(DigestScratch);
  CUstream stream = nullptr;
  CUresult result = driver.cuMemAlloc_(&scratch_, scratch_bytes);
  if (result == CUDA_SUCCESS) result = driver.cuStreamCreate_(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver.cuEventCreate_(&setup_done_, CU_EVENT_DISABLE_TIMING);
  if (result == CUDA_SUCCESS) result = driver.cuMemsetD8Async_(scratch_, 0, scratch_bytes, stream);
  if (result == CUDA_SUCCESS) result = driver.cuEventRecord_(setup_done_, stream);
  return result;
}

CUresult CudaContext::order_after_setup(const CudaDriver& driver, CUstream stream) {
  if (scratch_zeroed_.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  const CUresult result = driver.cuEventQuery_(setup_done_);
  if (result == CUDA_SUCCESS) scratch_zeroed_.store(true, std::memory_order_release);
  if (result != CUDA_ERROR_NOT_READY) return result;
  return driver.cuStreamWaitEvent_(stream, setup_done_, 0);
}

DeviceSlot* CudaContext::take_slot() {
  // Each user holds a place of the ring too, so the first try nearly always meets a free one.
  for (uint32_t tries = 0; tries < slot_count_; ++tries) {
    DeviceSlot& slot = slots_[next_slot_.fetch_add(1, std::memory_order_relaxed) & (slot_count_ - 1)];
    uint32_t free = 0;
    if (slot.busy.load(std::memory_order_relaxed) == 0 &&
        slot.busy.compare_exchange_strong(free, 1, std::memory_order_acquire)) {
      if (++slot.ticket == 0) ++slot.ticket;
      return &slot;
    }
  }
  return nullptr;
}

DigestTarget CudaContext::target(const DeviceSlot& slot) const {
  const auto index = static_cast<size_t>(&slot - slots_);
  DigestTarget target;
  target.slot = reinterpret_cast<DigestSlot*>(device_results_) + index;
  target.scratch = reinterpret_cast<DigestScratch*>(scratch_) + index;
  target.ticket = slot.ticket;
  return target;
}

}  // namespace forkpoint
