// Digests inside captured CUDA graphs: their kernels are nodes of the host's graph and run at every replay, each time
// into a slot that the device draws from a ring. Mostly they leave their sums on the device, and one kernel at the end of
// the capture draws the slots of all (kernels/digest_flush.h): a replay's results then arrive at once, when it ends. One
// for each context that captures.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>

#include "kernels/digest_launch.h"
#include "probes/cuda_driver.h"

namespace forkpoint {

class GraphResults {
 public:
  // The context is current. Makes the ring, once; on a stream of its own, not waited for. slots: a power of two. A thread
  // that comes while another one makes it waits for that (bounded). What failed once is not tried again.
  CUresult prepare(const CudaDriver& driver, uint32_t slots);
  bool ready() const { return state_.load(std::memory_order_acquire) == static_cast<uint32_t>(State::ready); }
  // Has work on `stream` (a graph's replay) wait until the ring is set up.
  CUresult order_after_setup(const CudaDriver& driver, CUstream stream);

  // A number for a digest that is being captured, and where it is to go. Where all numbers are in use it is 0, and the
  // digest goes where nobody looks: left out, it would give the host's graph another form than the capture before, and
  // cuGraphExecUpdate would fail. false: the ring is not there.
  bool take_node(uint32_t* node, DigestTarget* target);
  // What a flush of nodes needs. REQUIRES: ready().
  DigestRing* ring() const { return device_ring_; }
  DigestScratch* scratch() const { return scratch_; }
  // What was captured under the number is gone, after `runs` replays of it. The number is used again once the results of
  // all of them have arrived; never, if one was dropped, for it may still be on its way.
  void give_node(uint32_t node, uint32_t runs);

  // Writer thread only. Takes over what has arrived, so that the device finds room.
  void drain();
  // The digest that `node` made when it ran for the n-th time (from 0) since it was taken; earlier ones are dropped.
  // false: it has not arrived.
  bool take(uint32_t node, uint32_t n, RawDigest* digest);
  // A result of a later run than the n-th has arrived.
  bool has_passed(uint32_t node, uint32_t n) const;
  // Its results are not kept from now on.
  void ignore(uint32_t node);
  // Results that nobody has taken yet. Writer thread.
  size_t waiting() const { return arrived_ ? arrived_->size() : 0; }
  // How many results found no room: the device's in the ring, or the host's among those that nobody has taken.
  uint64_t dropped() const { return overflowed_ + (dropped_ ? __atomic_load_n(dropped_, __ATOMIC_RELAXED) : 0); }

  // In the child of a fork.
  static void reset_lock();

 private:
  // One number. The device counts its runs for ever; all counts are modulo 2^32.
  struct Node {
    uint32_t first = 0;     // runs before it was taken
    uint32_t arrived = 0;   // one more than the last run whose result has arrived
    uint32_t taken = 0;     // runs whose results nobody will ask for any more
    uint32_t end = 0;       // of a given one: all of its runs
    bool given = false;
    bool ignored = false;
  };
  CUresult build(const CudaDriver& driver, uint32_t slots);
  bool make_nodes();
  void free_if_settled(uint32_t node);
  bool note_arrival(const SlotResult& result);
  bool make_room();

  enum class State : uint32_t { none, building, ready, failed };
  std::atomic<uint32_t> state_{0};  // enum State; futex
  std::atomic<int> error_{0};       // CUresult, when it failed
  std::atomic<bool> set_up_{false};
  CUevent setup_done_ = nullptr;
  DigestRing image_;                     // as it was copied to the device
  DigestRing* device_ring_ = nullptr;
  DigestScratch* scratch_ = nullptr;     // one entry a node
  DigestSlot* slots_ = nullptr;          // host
  uint64_t* consumed_ = nullptr;
  uint64_t* dropped_ = nullptr;
  DigestSlot* scrap_slot_ = nullptr;     // of digests without a number, as the device sees it
  Node* nodes_ = nullptr;                // by number; guarded by the lock, as are the next three
  uint32_t* free_ = nullptr;             // a stack of numbers
  uint32_t free_count_ = 0;
  uint32_t numbers_ = 0;                 // that were ever used
  uint64_t overflowed_ = 0;              // writer
  uint64_t swept_at_ = 0;                // writer: overflowed_ when it last looked for room
  uint64_t next_ = 0;                    // writer: the next result
  std::unordered_map<uint64_t, RawDigest>* arrived_ = nullptr;  // writer, by node and n
};

}  // namespace forkpoint
