#include "probes/graph_results.h"

#include <iterator>
#include <new>

#include "probes/handle_table.h"
#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr uint32_t kNodes = 1u << 17;  // 16 MiB of device memory, taken at the first capture; one more is scrap

constexpr int64_t kBuildPatienceNs = 10'000'000'000;
constexpr size_t kMostArrived = 1u << 19;  // results that nobody has taken yet: some 40 MiB
constexpr uint64_t kSweepEvery = 1u << 16;

// One for all contexts, so that the child of a fork can let it go.
constinit SpinLock nodes_lock;

bool is_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }
uint64_t key_of(uint32_t node, uint32_t n) { return uint64_t{node} << 32 | n; }

}  // namespace

CUresult GraphResults::prepare(const CudaDriver& driver, uint32_t slots) {
  if (ready()) return CUDA_SUCCESS;
  const auto building = static_cast<uint32_t>(State::building);
  auto state = static_cast<uint32_t>(State::none);
  if (state_.compare_exchange_strong(state, building, std::memory_order_acq_rel)) {
    const CUresult result = build(driver, slots);
    error_.store(static_cast<int>(result), std::memory_order_relaxed);
    state_.store(static_cast<uint32_t>(result == CUDA_SUCCESS ? State::ready : State::failed), std::memory_order_release);
    futex_wake(state_);
    return result;
  }
  const int64_t give_up_ns = now_ns() + kBuildPatienceNs;
  for (; state == building && now_ns() < give_up_ns; state = state_.load(std::memory_order_acquire)) {
    futex_wait(state_, building, 1'000'000);
  }
  if (ready()) return CUDA_SUCCESS;
  return state == building ? CUDA_ERROR_NOT_READY : static_cast<CUresult>(error_.load(std::memory_order_relaxed));
}

CUresult GraphResults::build(const CudaDriver& driver, uint32_t slots) {
  if (!driver.cuMemcpyHtoDAsync_) return CUDA_ERROR_NOT_SUPPORTED;
  if (!make_nodes()) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t host_bytes = (slots + 1) * sizeof(DigestSlot) + 2 * sizeof(uint64_t);
  auto* host = static_cast<char*>(map_zeroed(host_bytes));
  if (!host) return CUDA_ERROR_OUT_OF_MEMORY;
  slots_ = reinterpret_cast<DigestSlot*>(host);
  consumed_ = reinterpret_cast<uint64_t*>(host + (slots + 1) * sizeof(DigestSlot));
  dropped_ = consumed_ + 1;
  CUdeviceptr device_host = 0, device = 0;
  const size_t scratch_bytes = size_t{kNodes + 1} * sizeof(DigestScratch);
  CUresult result = driver.cuMemHostRegister_(host, host_bytes, CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result == CUDA_SUCCESS) result = driver.cuMemHostGetDevicePointer_(&device_host, host, 0);
  if (result == CUDA_SUCCESS) result = driver.cuMemAlloc_(&device, scratch_bytes + sizeof(DigestRing));
  if (result != CUDA_SUCCESS) return result;
  scratch_ = reinterpret_cast<DigestScratch*>(device);
  device_ring_ = reinterpret_cast<DigestRing*>(device + scratch_bytes);
  image_.slots = reinterpret_cast<DigestSlot*>(device_host);
  scrap_slot_ = image_.slots + slots;
  image_.consumed = reinterpret_cast<const uint64_t*>(scrap_slot_ + 1);
  image_.dropped = reinterpret_cast<uint64_t*>(scrap_slot_ + 1) + 1;
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

// Virtual; a page is backed when its numbers are first used.
bool GraphResults::make_nodes() {
  nodes_ = static_cast<Node*>(map_zeroed((kNodes + 1) * sizeof(Node)));
  free_ = static_cast<uint32_t*>(map_zeroed(kNodes * sizeof(uint32_t)));
  return nodes_ && free_;
}

void GraphResults::reset_lock() { nodes_lock.reset(); }

bool GraphResults::take_node(uint32_t* node, DigestTarget* target) {
  if (!ready()) return false;
  const SpinGuard guard(nodes_lock);
  *node = 0;
  if (free_count_ > 0) *node = free_[--free_count_];
  else if (numbers_ < kNodes) *node = ++numbers_;
  const bool scrap = *node == 0;
  target->slot = scrap ? scrap_slot_ : nullptr;
  target->ring = scrap ? nullptr : device_ring_;
  target->scratch = scratch_ + *node;
  target->ticket = scrap ? 1 : 0;
  target->node = *node;
  return true;
}

void GraphResults::give_node(uint32_t node, uint32_t runs) {
  const SpinGuard guard(nodes_lock);
  Node& given = nodes_[node];
  if (given.ignored) return;
  given.given = true;
  given.end = given.first + runs;
  free_if_settled(node);
}

void GraphResults::free_if_settled(uint32_t node) {
  Node& given = nodes_[node];
  if (!given.given || is_before(given.arrived, given.end)) return;
  // Runs that nobody counted: there may be more.
  if (given.arrived != given.end) given.ignored = true;
  given.given = false;
  if (given.ignored) return;
  given.first = given.end;
  free_[free_count_++] = node;
}

void GraphResults::ignore(uint32_t node) {
  const SpinGuard guard(nodes_lock);
  nodes_[node].ignored = true;
}

bool GraphResults::has_passed(uint32_t node, uint32_t n) const {
  const SpinGuard guard(nodes_lock);
  return is_before(nodes_[node].first + n + 1, nodes_[node].arrived);
}

// Will somebody ask for it?
bool GraphResults::note_arrival(const SlotResult& result) {
  const SpinGuard guard(nodes_lock);
  Node& node = nodes_[result.node];
  const bool wanted = !node.given && !node.ignored && !is_before(result.ordinal, node.taken);
  if (!is_before(result.ordinal, node.arrived)) node.arrived = result.ordinal + 1;
  free_if_settled(result.node);
  return wanted;
}

// Results of replays whose row was lost, of graphs that never ran again.
bool GraphResults::make_room() {
  if (arrived_->size() < kMostArrived) return true;
  if (overflowed_ != 0 && overflowed_ - swept_at_ < kSweepEvery) return false;
  swept_at_ = overflowed_;
  for (auto at = arrived_->begin(); at != arrived_->end();) {
    const SpinGuard guard(nodes_lock);
    const Node& node = nodes_[at->first >> 32];
    const auto ordinal = static_cast<uint32_t>(at->first);
    const bool stale = node.ignored || node.given || is_before(ordinal, node.first) || is_before(ordinal, node.taken);
    at = stale ? arrived_->erase(at) : std::next(at);
  }
  return arrived_->size() < kMostArrived;
}

void GraphResults::drain() {
  if (!ready()) return;
  if (!arrived_) arrived_ = new (std::nothrow) std::unordered_map<uint64_t, RawDigest>;
  if (!arrived_) return;
  SlotResult result;
  const uint64_t before = next_;
  while (read_slot(slots_[next_ % image_.capacity], ring_ticket(next_, image_.capacity), &result)) {
    ++next_;
    if (result.node == 0 || result.node > kNodes || !note_arrival(result)) continue;
    if (make_room()) (*arrived_)[key_of(result.node, result.ordinal)] = result.raw;
    else ++overflowed_;
  }
  if (next_ != before) __atomic_store_n(consumed_, next_, __ATOMIC_RELEASE);
}

bool GraphResults::take(uint32_t node, uint32_t n, RawDigest* digest) {
  if (!arrived_) return false;
  uint32_t from = 0, ordinal = 0;
  {
    const SpinGuard guard(nodes_lock);
    from = nodes_[node].taken;
    ordinal = nodes_[node].first + n;
  }
  const auto found = arrived_->find(key_of(node, ordinal));
  if (found == arrived_->end()) return false;
  *digest = found->second;
  for (uint32_t old = from; is_before(old, ordinal + 1); ++old) arrived_->erase(key_of(node, old));
  const SpinGuard guard(nodes_lock);
  nodes_[node].taken = ordinal + 1;
  return true;
}

}  // namespace forkpoint
