// Digests inside captured CUDA graphs: their kernels are nodes of the host's graph and run at every replay, each time into a
// slot that the device draws from a ring. One for each context that captures.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>

#include "kernels/digest_launch.h"
#include "probes/cuda_driver.h"

namespace forkpoint {

class GraphResults {
 public:
  // The context is current. Makes the ring, once; on a stream of its own, not waited for. slots: a power of two.
  CUresult prepare(const CudaDriver& driver, uint32_t slots);
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  // Has work on `stream` (a graph's replay) wait until the ring is set up.
  CUresult order_after_setup(const CudaDriver& driver, CUstream stream);

  // A number for a digest that is being captured, and where it is to go. false: there are no more.
  bool take_node(uint32_t* node, DigestTarget* target);

  // Writer thread only. Takes over what has arrived, so that the device finds room.
  void drain();
  // The digest that `node` made when it ran for the n-th time (from 0). false: it has not arrived.
  bool take(uint32_t node, uint32_t n, RawDigest* digest);
  uint64_t dropped() const { return dropped_ ? __atomic_load_n(dropped_, __ATOMIC_RELAXED) : 0; }

 private:
  CUresult build(const CudaDriver& driver, uint32_t slots);

  std::atomic<bool> building_{false};
  std::atomic<bool> ready_{false};
  std::atomic<bool> set_up_{false};
  CUevent setup_done_ = nullptr;
  DigestRing image_;                     // as it was copied to the device
  DigestRing* device_ring_ = nullptr;
  DigestScratch* scratch_ = nullptr;     // one entry a node
  DigestSlot* slots_ = nullptr;          // host
  uint64_t* consumed_ = nullptr;
  uint64_t* dropped_ = nullptr;
  std::atomic<uint32_t> nodes_{0};
  uint64_t next_ = 0;                    // writer: the next result
  std::unordered_map<uint64_t, RawDigest>* arrived_ = nullptr;  // writer, by node and n
};

}  // namespace forkpoint
