#include "probes/cuda_digest.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "kernels/digest_tensors.h"
#include "lib/digest_raw.h"
#include "probes/cuda_context.h"

namespace forkpoint {
namespace {

using Outcome = DeviceOutcome::Kind;
constexpr int kMaxDevices = 64;

DeviceOutcome lost(Loss loss, int error = 0) { return {Outcome::lost, nullptr, loss, error}; }

class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, CUcontext before, CUcontext wanted) : driver_(driver) {
    pushed_ = before != wanted && driver_.cuCtxPushCurrent_(wanted) == CUDA_SUCCESS;
    holds_ = before == wanted || pushed_;
  }
  ~CurrentContext() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent_(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  bool holds() const { return holds_; }

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
  bool holds_ = false;
};

struct AddressFacts {
  unsigned int memory_type = 0;  // 0: not known to CUDA
  int device = -1;
  unsigned int is_managed = 0;
  CUdeviceptr device_pointer = 0;  // as kernels of the current context reach it; 0: they do not
  CUdeviceptr range_start = 0;     // of its allocation
  size_t range_bytes = 0;          // 0: not known
};

bool look_up(const CudaDriver& driver, const void* address, AddressFacts* facts) {
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                      CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&facts->memory_type,    &facts->device,      &facts->is_managed,
                    &facts->device_pointer, &facts->range_start, &facts->range_bytes};
  return driver.cuPointerGetAttributes_(6, attributes, values, reinterpret_cast<CUdeviceptr>(address)) == CUDA_SUCCESS &&
         facts->memory_type != 0;
}

bool is_named_stream(CUstream stream) {
  return stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

// The stream's; of the default streams the current one, if it is on the tensor's device, else that device's primary one.
CUcontext find_context(const CudaDriver& driver, CUstream stream, CUcontext current, const DeviceTensor& tensor) {
  CUcontext context = nullptr;
  if (is_named_stream(stream)) return driver.cuStreamGetCtx_(stream, &context) == CUDA_SUCCESS ? context : nullptr;
  AddressFacts facts;
  facts.device = tensor.owned_on;
  if (facts.device < 0 && (!look_up(driver, tensor.data, &facts) || facts.device < 0)) return current;
  CUdevice current_device = -1;
  if (current && driver.cuCtxGetDevice_(&current_device) == CUDA_SUCCESS && current_device == facts.device) return current;
  unsigned int flags = 0;
  int active = 0;
  if (driver.cuDevicePrimaryCtxGetState_(facts.device, &flags, &active) != CUDA_SUCCESS || !active) return current;
  // Retained once and for good: it is the host's anyway, and a release of ours could be the last. The handle of a primary
  // context stays the same when it is reset.
  static constinit std::atomic<CUcontext> retained[kMaxDevices] = {};
  if (facts.device >= kMaxDevices) return current;
  context = retained[facts.device].load(std::memory_order_acquire);
  if (context) return context;
  if (driver.cuDevicePrimaryCtxRetain_(&context, facts.device) != CUDA_SUCCESS) return current;
  retained[facts.device].store(context, std::memory_order_release);
  return context;
}

// Both lie in one allocation. (Memory that is mapped piece by piece is several.)
bool is_in_range(const AddressFacts& low, const char* lowest, const char* last) {
  const auto begin = reinterpret_cast<CUdeviceptr>(lowest), end = reinterpret_cast<CUdeviceptr>(last);
  return begin >= low.range_start && end >= begin && end - low.range_start < low.range_bytes;
}

// A kernel that reads an address which is not there destroys the host's context: look at both ends first.
// device: of the current context.
const void* reachable(const CudaDriver& driver, const DeviceTensor& tensor, CUdevice device) {
  const char* lowest = static_cast<const char*>(tensor.data) + tensor.lowest_offset;
  const char* last = static_cast<const char*>(tensor.data) + tensor.end_offset - 1;
  AddressFacts low, high;
  if (!look_up(driver, lowest, &low) || low.device_pointer == 0) return nullptr;
  if (!is_in_range(low, lowest, last)) {
    if (!look_up(driver, last, &high)) return nullptr;
    if (high.device_pointer - low.device_pointer != static_cast<size_t>(last - lowest)) return nullptr;
  }
  const bool local = low.memory_type != CU_MEMORYTYPE_DEVICE || low.is_managed || low.device == device;
  if (!local) return nullptr;
  return reinterpret_cast<const char*>(low.device_pointer) - tensor.lowest_offset;
}

template <typename Plan>
CUresult launch(const CudaDriver& driver, CudaContext& context, CUstream stream, Plan& plan) {
  void* parameters[] = {plan.params()};
  const CUresult result = driver.cuLaunchKernel_(context.kernel(plan.kernel), plan.grid, 1, 1, plan.block, 1, 1,
                                                 plan.shared_bytes, stream, parameters, nullptr);
  if (is_fatal(result)) context.mark_gone();
  return result;
}

// A slot and what is to be launched for it; nullptr: there is no slot.
DeviceSlot* plan_one(CudaContext& context, const DeviceTensor& tensor, const void* data, DigestLaunch* plan) {
  DeviceSlot* slot = context.take_slot();
  if (!slot) return nullptr;
  slot->dtype = tensor.view.dtype;
  *plan = plan_digest(data, tensor.view, context.target(*slot), context.multiprocessors());
  return slot;
}

void settle(CUresult result, DeviceOutcome& outcome) {
  if (result == CUDA_SUCCESS) return;
  outcome.slot->busy.store(0, std::memory_order_release);
  outcome = lost(Loss::cuda_launch, static_cast<int>(result));
}

DeviceOutcome launch_alone(const CudaDriver& driver, CudaContext& context, const DeviceTensor& tensor, const void* data) {
  DigestLaunch plan;
  DeviceSlot* slot = plan_one(context, tensor, data, &plan);
  if (!slot) return lost(Loss::cuda_slots);
  DeviceOutcome outcome = {Outcome::enqueued, slot, Loss::count_, 0};
  settle(launch(driver, context, static_cast<CUstream>(tensor.stream), plan), outcome);
  return outcome;
}

// Digests of one context and stream. What lies well waits until there is a launch's worth of it.
class Enqueuer {
 public:
  Enqueuer(const CudaDriver& driver, CudaContext& context, CUstream stream)
      : driver_(driver), context_(context), stream_(stream) {}

  // data: as reachable() has it. *outcome is written by launch(), if not now.
  void add(const DeviceTensor& tensor, const void* data, DeviceOutcome* outcome) {
    DigestLaunch plan;
    DeviceSlot* slot = plan_one(context_, tensor, data, &plan);
    if (!slot) return void(*outcome = lost(Loss::cuda_slots));
    *outcome = {Outcome::enqueued, slot, Loss::count_, 0};
    if (!plan.is_flat()) return settle(launch_plan(plan), *outcome);
    runs_[count_] = plan.flat;
    outcomes_[count_] = outcome;
    if (++count_ == kMostTensors) launch();
  }

  void launch() {
    DigestTensorsLaunch plan;
    for (size_t done = 0; done < count_;) {
      const size_t covered = plan_digest_tensors(runs_ + done, count_ - done, context_.multiprocessors(), &plan);
      const CUresult result = launch_plan(plan);
      for (const size_t end = done + covered; done < end; ++done) settle(result, *outcomes_[done]);
    }
    count_ = 0;
  }

 private:
  template <typename Plan>
  CUresult launch_plan(Plan& plan) {
    return forkpoint::launch(driver_, context_, stream_, plan);
  }

  const CudaDriver& driver_;
  CudaContext& context_;
  const CUstream stream_;
  DigestFlat runs_[kMostTensors];
  DeviceOutcome* outcomes_[kMostTensors];
  size_t count_ = 0;
};

// Calls body(driver, context) with the context of the tensor current, where digests may be enqueued on its stream. Otherwise
// says why not.
template <typename Body>
DeviceOutcome in_context_of(const Token& token, const DeviceTensor& tensor, uint32_t slots, Body body) {
  const CudaDriver* found = find_cuda_driver(token);
  if (!found) return lost(Loss::cuda_absent);
  const CudaDriver& driver = *found;
  const auto stream = static_cast<CUstream>(tensor.stream);
  CUcontext before = nullptr;
  CUresult result = driver.cuCtxGetCurrent_(&before);
  if (result != CUDA_SUCCESS) return lost(Loss::cuda_no_context, static_cast<int>(result));
  const RelaxedCapture relaxed(driver);
  const CUcontext wanted = find_context(driver, stream, before, tensor);
  if (!wanted) return lost(Loss::cuda_no_context);
  const CurrentContext current(driver, before, wanted);
  if (!current.holds()) return lost(Loss::cuda_no_context);

  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  result = driver.cuStreamIsCapturing_(stream, &capture);
  // The legacy stream cannot be used while another stream that waits for it is captured; trying would break that capture.
  if (result != CUDA_SUCCESS) return lost(Loss::cuda_capturing, static_cast<int>(result));
  if (capture != CU_STREAM_CAPTURE_STATUS_NONE) return {Outcome::captured, nullptr, Loss::count_, 0};

  int error = 0;
  CudaContext* context = CudaContext::of_current(driver, wanted, slots, &error);
  if (!context) return lost(Loss::cuda_setup, error);
  result = context->order_after_setup(driver, stream);
  if (result != CUDA_SUCCESS) return lost(Loss::cuda_launch, static_cast<int>(result));
  return body(driver, *context);
}

}  // namespace

DeviceOutcome enqueue_device_digest(const Token& token, const DeviceTensor& tensor, uint32_t slots) {
  return in_context_of(token, tensor, slots, [&](const CudaDriver& driver, CudaContext& context) {
    CUdevice device = -1;
    const void* data = driver.cuCtxGetDevice_(&device) == CUDA_SUCCESS ? reachable(driver, tensor, device) : nullptr;
    return data ? launch_alone(driver, context, tensor, data) : lost(Loss::cuda_bad_address);
  });
}

void enqueue_device_digests(const Token& token, const DeviceTensor* const* tensors, size_t count, uint32_t slots,
                            DeviceOutcome* outcomes) {
  if (count == 0) return;
  constexpr DeviceOutcome kNone = {Outcome::lost, nullptr, Loss::count_, 0};
  for (size_t i = 0; i < count; ++i) outcomes[i] = kNone;
  outcomes[0] = in_context_of(token, *tensors[0], slots, [&](const CudaDriver& driver, CudaContext& context) {
    Enqueuer enqueuer(driver, context, static_cast<CUstream>(tensors[0]->stream));
    DeviceOutcome first = lost(Loss::cuda_bad_address);
    CUdevice device = -1;
    if (driver.cuCtxGetDevice_(&device) != CUDA_SUCCESS) return first;
    for (size_t i = 0; i < count; ++i) {
      const void* data = reachable(driver, *tensors[i], device);
      if (data) enqueuer.add(*tensors[i], data, i == 0 ? &first : &outcomes[i]);
    }
    enqueuer.launch();
    return first;
  });
  // What this context does not reach may be another one's, where the stream is the default stream, which each has.
  for (size_t i = 1; i < count; ++i) {
    const bool none = outcomes[i].kind == Outcome::lost && outcomes[i].loss == Loss::count_;
    if (none) outcomes[i] = enqueue_device_digest(token, *tensors[i], slots);
  }
}

CudaContext* make_digest_context(const Token& token, CUctx_st* context, uint32_t slots, int* error) {
  const CudaDriver* driver = find_cuda_driver(token);
  if (!driver || !context) return nullptr;
  if (CudaContext* known = CudaContext::find(*driver, context)) return known;
  const RelaxedCapture relaxed(*driver);
  return CudaContext::of_current(*driver, context, slots, error);
}

DevicePoll poll_device_slot(const DeviceSlot& slot, DigestResult* result) {
  SlotResult arrived;
  if (read_slot(*slot.result, slot.ticket, &arrived)) {
    *result = finish(slot.dtype, arrived.raw);
    return DevicePoll::ready;
  }
  return slot.context->gone() ? DevicePoll::gone : DevicePoll::pending;
}

void release_device_slot(DeviceSlot& slot, bool finished) {
  if (finished) slot.busy.store(0, std::memory_order_release);
}

bool describe_device(const Token& token, char* device, size_t device_bytes, char* driver_text, size_t driver_bytes) {
  const CudaDriver* driver = find_cuda_driver(token);
  int version = 0;
  if (!driver || driver->cuDriverGetVersion_(&version) != CUDA_SUCCESS) return false;
  snprintf(driver_text, driver_bytes, "%d.%d", version / 1000, version % 1000 / 10);
  CUcontext current = nullptr;
  CUdevice chosen = -1;
  // Whatever this thread uses, else the first device that somebody here uses.
  if (driver->cuCtxGetCurrent_(&current) != CUDA_SUCCESS) return false;
  if (!current || driver->cuCtxGetDevice_(&chosen) != CUDA_SUCCESS) chosen = -1;
  int devices = 0;
  if (chosen < 0 && driver->cuDeviceGetCount_(&devices) != CUDA_SUCCESS) return false;
  for (int i = 0; i < devices && chosen < 0; ++i) {
    unsigned int flags = 0;
    int active = 0;
    if (driver->cuDevicePrimaryCtxGetState_(i, &flags, &active) == CUDA_SUCCESS && active) chosen = i;
  }
  return chosen >= 0 && driver->cuDeviceGetName_(device, static_cast<int>(device_bytes), chosen) == CUDA_SUCCESS;
}

void forget_devices_in_child() { CudaContext::forget_all_in_child(); }

}  // namespace forkpoint
