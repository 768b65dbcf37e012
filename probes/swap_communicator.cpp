#include "probes/swap_communicator.h"

#include <new>

#include "probes/os.h"
#include "probes/swap_record.h"

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

// ---- Making

// The one in which NCCL works: the current one, if it is on the communicator's device, else the device's primary one.
bool SwapCommunicator::find_context() {
  if (library_.CommCuDevice(handle.load(), &device_) != kNcclSuccess) return false;
  CUcontext current = nullptr;
  CUdevice on = -1;
  if (driver_.cuCtxGetCurrent_(&current) != CUDA_SUCCESS) return false;
  if (current && driver_.cuCtxGetDevice_(&on) == CUDA_SUCCESS && on == device_) return context_ = current, true;
  return driver_.cuDevicePrimaryCtxRetain_(&context_, device_) == CUDA_SUCCESS;
}

bool SwapCommunicator::find_means() {
  shape_ = collective::staging_for(static_cast<uint32_t>(size_));
  means_ = take_swap_means(driver_, number_of_context(driver_, context_), staging_bytes_for(size_));
  return means_;
}

// What it asks and answers through, if only to say no. false: there is nothing.
bool SwapCommunicator::make_voice() {
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
    means.records = means.host ? means.host_on_device + kRecordsAt : 0;  // NCCL takes the host's memory too
  return means.records != 0;
}

bool SwapCommunicator::make_staging() {
  means_->staging_bytes = staging_bytes_for(size_);
  if (!means_->staging && driver_.cuMemAlloc_(&means_->staging, means_->staging_bytes) != CUDA_SUCCESS)
    return means_->staging = 0, false;
  return driver_.cuMemsetD8Async_(means_->staging, 0, means_->staging_bytes, means_->exchange) == CUDA_SUCCESS;
}

// What the kernels need. Without it this member says no.
void SwapCommunicator::make_kernels() {
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
bool SwapCommunicator::prepare() {
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

// ---- Ending

void SwapCommunicator::end(bool aborts) {
  ended_.store(true);
  // The thread that decides leaves NCCL alone from now on; inside NCCL it is the abort that ends its wait.
  static constinit std::atomic<uint32_t> nobody_wakes{0};
  for (int tries = 0; tries < 1000 && busy_.test(); ++tries) futex_wait(nobody_wakes, 0, 100'000);
  if (!aborts || !is_decided() || !means_ || !means_->host) return;
  {
    // Of a call that ends early nobody knows who still writes to this member's memory.
    const InContext here(driver_, context_);
    lost_ = !here.entered() || (any_launch_ && driver_.cuEventQuery_(means_->last) != CUDA_SUCCESS);
  }
  __atomic_store_n(reinterpret_cast<uint32_t*>(means_->host), 1u, __ATOMIC_RELEASE);
}

SwapCommunicator::~SwapCommunicator() {
  if (!means_) return;
  if (means_->blocks > 0 && (lost_ || any_capture_)) means_->kernels->give_back(means_->blocks);
  // A graph may still be replayed.
  const bool is_gone = means_->context == 0 || number_of_context(driver_, context_) != means_->context;
  if (lost_ || any_capture_ || is_gone) {
    delete means_;
    return;
  }
  const InContext here(driver_, context_);
  if (here.entered()) leave_swap_means(driver_, means_);
}

}  // namespace forkpoint
