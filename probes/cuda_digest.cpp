#include "probes/cuda_digest.h"

#include <atomic>
#include <cstdio>
#include <cstring>

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
};

bool look_up(const CudaDriver& driver, const void* address, AddressFacts* facts) {
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_POINTER};
  void* values[] = {&facts->memory_type, &facts->device, &facts->is_managed, &facts->device_pointer};
  return driver.cuPointerGetAttributes_(4, attributes, values, reinterpret_cast<CUdeviceptr>(address)) == CUDA_SUCCESS &&
         facts->memory_type != 0;
}

bool is_named_stream(CUstream stream) {
  return stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

// The stream's; of the default streams the current one, if it is on the tensor's device, else that device's primary one.
CUcontext find_context(const CudaDriver& driver, CUstream stream, CUcontext current, const void* data) {
  CUcontext context = nullptr;
  if (is_named_stream(stream)) return driver.cuStreamGetCtx_(stream, &context) == CUDA_SUCCESS ? context : nullptr;
  AddressFacts facts;
  if (!look_up(driver, data, &facts) || facts.device < 0) return current;
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

// A kernel that reads an address which is not there destroys the host's context: look at both ends first.
const void* reachable(const CudaDriver& driver, const DeviceTensor& tensor) {
  const char* lowest = static_cast<const char*>(tensor.data) + tensor.lowest_offset;
  const char* last = static_cast<const char*>(tensor.data) + tensor.end_offset - 1;
  AddressFacts low, high;
  if (!look_up(driver, lowest, &low) || !look_up(driver, last, &high)) return nullptr;
  if (low.device_pointer == 0 || high.device_pointer - low.device_pointer != static_cast<size_t>(last - lowest)) return nullptr;
  CUdevice device = -1;
  if (driver.cuCtxGetDevice_(&device) != CUDA_SUCCESS) return nullptr;
  const bool local = low.memory_type != CU_MEMORYTYPE_DEVICE || low.is_managed || low.device == device;
  if (!local) return nullptr;
  return reinterpret_cast<const char*>(low.device_pointer) - tensor.lowest_offset;
}

DeviceOutcome launch(const CudaDriver& driver, CudaContext& context, const DeviceTensor& tensor, const void* data) {
  const auto stream = static_cast<CUstream>(tensor.stream);
  CUresult result = context.order_after_setup(driver, stream);
  if (result != CUDA_SUCCESS) return lost(Loss::cuda_launch, static_cast<int>(result));
  DeviceSlot* slot = context.take_slot();
  if (!slot) return lost(Loss::cuda_slots);
  slot->dtype = tensor.view.dtype;
  DigestLaunch plan = plan_digest(data, tensor.view, context.target(*slot), context.multiprocessors());
  void* parameters[] = {plan.params()};
  result = driver.cuLaunchKernel_(context.kernel(plan.kernel), plan.grid, 1, 1, plan.block, 1, 1, plan.shared_bytes, stream,
                                  parameters, nullptr);
  if (result == CUDA_SUCCESS) return {Outcome::enqueued, slot, Loss::count_, 0};
  if (is_fatal(result)) context.mark_gone();
  slot->busy.store(0, std::memory_order_release);
  return lost(Loss::cuda_launch, static_cast<int>(result));
}

}  // namespace

DeviceOutcome enqueue_device_digest(const Token& token, const DeviceTensor& tensor, uint32_t slots) {
  const CudaDriver* found = find_cuda_driver(token);
  if (!found) return lost(Loss::cuda_absent);
  const CudaDriver& driver = *found;
  const auto stream = static_cast<CUstream>(tensor.stream);
  CUcontext before = nullptr;
  CUresult result = driver.cuCtxGetCurrent_(&before);
  if (result != CUDA_SUCCESS) return lost(Loss::cuda_no_context, static_cast<int>(result));
  const RelaxedCapture relaxed(driver);
  const CUcontext wanted = find_context(driver, stream, before, tensor.data);
  if (!wanted) return lost(Loss::cuda_no_context);
  const CurrentContext current(driver, before, wanted);
  if (!current.holds()) return lost(Loss::cuda_no_context);

  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  result = driver.cuStreamIsCapturing_(stream, &capture);
  // The legacy stream cannot be used while another stream that waits for it is captured; trying would break that capture.
  if (result != CUDA_SUCCESS) return lost(Loss::cuda_capturing, static_cast<int>(result));
  if (capture != CU_STREAM_CAPTURE_STATUS_NONE) return {Outcome::captured, nullptr, Loss::count_, 0};

  const void* data = reachable(driver, tensor);
  if (!data) return lost(Loss::cuda_bad_address);
  int error = 0;
  CudaContext* context = CudaContext::of_current(driver, wanted, slots, &error);
  if (!context) return lost(Loss::cuda_setup, error);
  return launch(driver, *context, tensor, data);
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
