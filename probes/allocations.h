// The memory of the host's program that its GPUs use: which allocation an address lies in, and a number for it that means
// the same in two runs of one program (its place in the order of allocations). Fed by the hooks of the calls that
// allocate, and by frameworks that cut large allocations up themselves (see torch_allocator.cpp). Any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "probes/handle_table.h"

namespace forkpoint {

enum class MemoryKind : uint8_t {
  device,   // cuMemAlloc
  pool,     // cuMemAllocAsync
  managed,
  host,     // pinned
  mapped,   // cuMemMap
  peer,     // opened from another process
  block,    // a part of an allocation that a framework gave to one tensor
  found,    // there before we looked; its extent is what the driver says
};

enum AllocationFlags : uint8_t {
  kAllocationSeen = 1,       // a call was handed it
  kAllocationUsed = 2,       // a kernel other than NCCL's was handed it
  kAllocationAddresses = 4,  // holds a table of device addresses
  kAllocationArena = 8,      // cut up by somebody whom we cannot ask: extents in it are not known
};

struct Allocation {
  uint64_t start = 0;
  uint64_t size_bytes = 0;
  uint64_t ordinal = 0;  // from 1; never used twice
  MemoryKind kind = MemoryKind::device;
  uint8_t flags = 0;
  int16_t device = kAnyDevice;  // whose memory it is
  static constexpr int16_t kAnyDevice = -1;  // managed, or not known
  uint64_t end() const { return start + size_bytes; }
  // How many of `bytes` from address on lie in it. REQUIRES: address does.
  uint64_t within(uint64_t address, uint64_t bytes) const { return bytes < end() - address ? bytes : end() - address; }
};

class AllocationTable {
 public:
  // May be called by several threads. false: no memory.
  bool create();
  // The ordinal; 0: the table is full, or size is 0. What overlaps goes: its release was not seen.
  uint64_t add(uint64_t start, uint64_t size_bytes, MemoryKind kind, int device = Allocation::kAnyDevice);
  // Ordinal and size of what began at `start`; 0: nothing.
  uint64_t remove(uint64_t start);
  // false: in no known allocation.
  bool find(uint64_t address, Allocation* allocation);
  // Sets flags of the allocation that begins at `start`; gives those that it had before.
  uint8_t mark(uint64_t start, uint8_t set, uint8_t clear = 0);
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  // The n-th in order of addresses, for walks at the end of a recording. false: there are fewer.
  bool nth(uint64_t n, Allocation* allocation);
  // Nothing is known any more: a context went, or nobody watched for a while.
  void clear() {
    const SpinGuard guard(lock_);
    count_.store(0, std::memory_order_relaxed);
  }
  // In the child of a fork.
  void reset_lock() { lock_.reset(); }

 private:
  static constexpr uint32_t kMost = 1u << 20;
  uint32_t upper(uint64_t address) const;  // the first entry that begins above address
  void erase_at(uint32_t at);

  SpinLock lock_;
  Allocation* sorted_ = nullptr;  // by start
  std::atomic<uint64_t> count_{0};
  std::atomic<uint64_t> lowest_{UINT64_MAX};  // of all that ever were: a cheap no for numbers that are no addresses
  std::atomic<uint64_t> highest_{0};
};

// All of the process: blocks within allocations first.
class Memory {
 public:
  bool create() { return allocations.create() && blocks.create(); }
  bool find(uint64_t address, Allocation* allocation) {
    if (blocks.count() != 0 && blocks.find(address, allocation)) return true;
    return allocations.find(address, allocation);
  }
  AllocationTable& table_of(const Allocation& allocation) {
    return allocation.kind == MemoryKind::block ? blocks : allocations;
  }

  AllocationTable allocations, blocks;
};
extern Memory memory;

}  // namespace forkpoint
