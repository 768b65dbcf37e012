#include "probes/swap_member.h"

#include "probes/os.h"

namespace forkpoint {
namespace {

bool has_all(const CudaDriver& driver) {
  return driver.cuDeviceCanAccessPeer_ && driver.cuCtxEnablePeerAccess_ && driver.cuIpcGetMemHandle_ &&
         driver.cuIpcOpenMemHandle_ && driver.cuIpcCloseMemHandle_ && driver.cuEventRecordWithFlags_ &&
         driver.cuStreamGetCaptureInfo_ && driver.cuCtxGetId_;
}

// Whole pages of the device: smaller pieces share an allocation with others, and a handle opens all of it.
uint64_t staging_bytes_for(int size) {
  constexpr uint64_t kPage = 2 << 20;
  return (collective::staging_for(static_cast<uint32_t>(size)).total_bytes() + kPage - 1) / kPage * kPage;
}

// Pinned memory: copies to other memory would wait for the members. nullptr: there is none.
char* make_host_memory(const CudaDriver& driver, CUdeviceptr* on_device) {
  char* host = static_cast<char*>(map_zeroed(SwapMeans::kHostBytes));
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE;
  if (!host) return nullptr;
  if (driver.cuMemHostRegister_(host, SwapMeans::kHostBytes, kFlags) != CUDA_SUCCESS)
    return unmap(host, SwapMeans::kHostBytes), nullptr;
  return driver.cuMemHostGetDevicePointer_(on_device, host, 0) == CUDA_SUCCESS ? host : nullptr;
}

}  // namespace

SwapMember::SwapMember(const NcclLibrary& library, const CudaDriver& driver, SwapMode mode, const Origin& origin)
    : handle(origin.comm),
      family(origin.family),
      waits(origin.waits),
      library_(library),
      driver_(driver),
      mode_(mode) {}

void SwapMember::prepare() {
  static constinit std::atomic<uint32_t> nobody_wakes{0};
  constexpr int64_t kPauseNs = 50'000;
  if (preparing_.exchange(true)) {
    while (!prepared_.load()) futex_wait(nobody_wakes, 0, kPauseNs);
    return;
  }
  asks_ = make();
  prepared_.store(true);
}

NcclResult SwapMember::state_of_making() const {
  if (ended_.load()) return kNcclSystemError;
  NcclResult state = kNcclInProgress;
  if (!handle.load() || !library_.CommGetAsyncError) return state;
  const NcclResult asked = library_.CommGetAsyncError(handle.load(), &state);
  return asked == kNcclSuccess ? state : asked;
}

// The one in which NCCL works: the current one, if it is on the communicator's device, else the device's primary one.
bool SwapMember::find_context() {
  if (library_.CommCuDevice(handle.load(), &device_) != kNcclSuccess) return false;
  CUcontext current = nullptr;
  CUdevice on = -1;
  if (driver_.cuCtxGetCurrent_(&current) != CUDA_SUCCESS) return false;
  if (current && driver_.cuCtxGetDevice_(&on) == CUDA_SUCCESS && on == device_) return context_ = current, true;
  return driver_.cuDevicePrimaryCtxRetain_(&context_, device_) == CUDA_SUCCESS;
}

bool SwapMember::find_means() {
  shape_ = collective::staging_for(static_cast<uint32_t>(size_));
  means_ = take_swap_means(driver_, number_of_context(driver_, context_), staging_bytes_for(size_));
  return means_;
}

// What it asks and answers through, if only to say no. false: there is nothing.
bool SwapMember::make_voice() {
  SwapMeans& means = *means_;
  if (!driver_.cuMemcpyHtoDAsync_ || !driver_.cuMemcpyDtoHAsync_ || !driver_.cuStreamQuery_) return false;
  if (!means.host) means.host = make_host_memory(driver_, &means.host_on_device);
  if (means.host)
    __atomic_store_n(reinterpret_cast<uint32_t*>(means.host), 0u, __ATOMIC_RELEASE);
  else
    refuse("it has no pinned memory");
  if (!means.exchange && driver_.cuStreamCreate_(&means.exchange, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
    means.exchange = nullptr;
  if (!means.records && driver_.cuMemAlloc_(&means.records, SwapMeans::kRecordsBytes) != CUDA_SUCCESS)
    means.records = means.host ? means.host_on_device + SwapMeans::kRecordsAt : 0;  // NCCL takes the host's memory too
  return means.records != 0;
}

bool SwapMember::make_staging() {
  means_->staging_bytes = staging_bytes_for(size_);
  if (!means_->staging && driver_.cuMemAlloc_(&means_->staging, means_->staging_bytes) != CUDA_SUCCESS)
    return means_->staging = 0, false;
  return driver_.cuMemsetD8Async_(means_->staging, 0, means_->staging_bytes, means_->exchange) == CUDA_SUCCESS;
}

// What the kernels need. Without it this member says no.
void SwapMember::make_kernels() {
  SwapMeans& means = *means_;
  const auto has_event = [&](CUevent* event) {
    return *event || driver_.cuEventCreate_(event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
  };
  if (!has_all(driver_))
    refuse("the driver lacks a function");
  else if (!has_event(&means.last) || !has_event(&means.captured))
    refuse("the driver makes no event");
  else if (!(means.kernels = swap_kernels(driver_, means.context, device_)))
    refuse("the kernels could not be loaded");
  else if (!make_staging())
    refuse("there is no device memory for it");
  else if (!mode_.messages)
    means.blocks = means.kernels->reserve(shape_.blocks);
}

// false: it asks nobody. That is so on all members, or this one cannot, and is broken.
bool SwapMember::make() {
  const NcclComm comm = handle.load();
  if (!library_.AllGather || !library_.CommCount || !library_.CommUserRank || !library_.CommCuDevice)
    return refuse("NCCL lacks a function"), false;
  NcclResult result = library_.CommCount(comm, &size_);
  if (result == kNcclSuccess) result = library_.CommUserRank(comm, &place_);
  if (result != kNcclSuccess) return fail(result, "NCCL does not say how many members it has"), false;
  if (size_ < 2) return refuse("it has one member"), false;
  if (size_ > static_cast<int>(collective::kMostRanks))
    return refuse("it has more members than the kernels take"), false;
  if (!find_context()) return fail(kNcclCudaError, "its device has no context"), false;
  const InContext here(driver_, context_);
  if (!here.entered() || !find_means() || !make_voice())
    return fail(kNcclCudaError, "there is no memory to ask its members through"), false;
  make_kernels();
  return true;
}

}  // namespace forkpoint
