#include "probes/graph_results.h"

#include <new>

#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr uint32_t kNodes = 1u << 17;  // 16 MiB of device memory, taken at the first capture

uint64_t key_of(uint32_t node, uint32_t n) { return uint64_t{node} << 32 | n; }

}  // namespace

CUresult GraphResults::prepare(const CudaDriver& driver, uint32_t slots) {
  if (ready()) return CUDA_SUCCESS;
  if (building_.exchange(true)) return CUDA_ERROR_NOT_READY;
  const CUresult result = build(driver, slots);
  if (result == CUDA_SUCCESS) ready_.store(true, std::memory_order_release);
  return result;
}

CUresult GraphResults::build(const CudaDriver& driver, uint32_t slots) {
  if (!driver.cuMemcpyHtoDAsync_) return CUDA_ERROR_NOT_SUPPORTED;
  const size_t host_bytes = slots * sizeof(DigestSlot) + 2 * sizeof(uint64_t);
  auto* host = static_cast<char*>(map_zeroed(host_bytes));
  if (!host) return CUDA_ERROR_OUT_OF_MEMORY;
  slots_ = reinterpret_cast<DigestSlot*>(host);
  consumed_ = reinterpret_cast<uint64_t*>(host + slots * sizeof(DigestSlot));
  dropped_ = consumed_ + 1;
  CUdeviceptr device_host = 0, device = 0;
  const size_t scratch_bytes = size_t{kNodes} * sizeof(DigestScratch);
  CUresult result = driver.cuMemHostRegister_(host, host_bytes, CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result == CUDA_SUCCESS) result = driver.cuMemHostGetDevicePointer_(&device_host, host, 0);
  if (result == CUDA_SUCCESS) result = driver.cuMemAlloc_(&device, scratch_bytes + sizeof(DigestRing));
  if (result != CUDA_SUCCESS) return result;
  scratch_ = reinterpret_cast<DigestScratch*>(device);
  device_ring_ = reinterpret_cast<DigestRing*>(device + scratch_bytes);
  image_.slots = reinterpret_cast<DigestSlot*>(device_host);
  image_.consumed = reinterpret_cast<const uint64_t*>(device_host + slots * sizeof(DigestSlot));
  image_.dropped = reinterpret_cast<uint64_t*>(device_host + slots * sizeof(DigestSlot) + sizeof(uint64_t));
  image_.capacity = slots;
  CUstream stream = nullptr;
  result = driver.cuStreamCreate_(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver.cuEventCreate_(&setup_done_, CU_EVENT_DISABLE_TIMING);
  if (result == CUDA_SUCCESS) result = driver.cuMemsetD8Async_(device, 0, scratch_bytes, stream);
  if (result == CUDA_SUCCESS) {
    result = driver.cuMemcpyHtoDAsync_(reinterpret_cast<CUdeviceptr>(device_ring_), &image_, sizeof(image_), stream);
  }
  if (result == CUDA_SUCCESS) result = driver.cuEventRecord_(setup_done_, stream);
  return result;
}

CUresult GraphResults::order_after_setup(const CudaDriver& driver, CUstream stream) {
  if (set_up_.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  const CUresult result = driver.cuEventQuery_(setup_done_);
  if (result == CUDA_SUCCESS) set_up_.store(true, std::memory_order_release);
  if (result != CUDA_ERROR_NOT_READY) return result;
  return driver.cuStreamWaitEvent_(stream, setup_done_, 0);
}

bool GraphResults::take_node(uint32_t* node, DigestTarget* target) {
  if (!ready()) return false;
  const uint32_t index = nodes_.fetch_add(1, std::memory_order_relaxed);
  if (index >= kNodes) {
    nodes_.store(kNodes, std::memory_order_relaxed);
    return false;
  }
  *node = index + 1;
  target->slot = nullptr;
  target->ring = device_ring_;
  target->scratch = scratch_ + index;
  target->ticket = 0;
  target->node = index + 1;
  return true;
}

void GraphResults::drain() {
  if (!ready()) return;
  if (!arrived_) arrived_ = new (std::nothrow) std::unordered_map<uint64_t, RawDigest>;
  if (!arrived_) return;
  SlotResult result;
  const uint64_t before = next_;
  while (read_slot(slots_[next_ % image_.capacity], ring_ticket(next_, image_.capacity), &result)) {
    (*arrived_)[key_of(result.node, result.ordinal)] = result.raw;
    ++next_;
  }
  if (next_ != before) __atomic_store_n(consumed_, next_, __ATOMIC_RELEASE);
}

bool GraphResults::take(uint32_t node, uint32_t n, RawDigest* digest) {
  if (!arrived_) return false;
  const auto found = arrived_->find(key_of(node, n));
  if (found == arrived_->end()) return false;
  *digest = found->second;
  arrived_->erase(found);
  return true;
}

}  // namespace forkpoint
