#include "probes/allocations.h"

#include <algorithm>
#include <cstring>

namespace forkpoint {
namespace {

constinit std::atomic<uint64_t> last_ordinal{0};

}  // namespace

constinit Memory memory;

bool AllocationTable::create() {
  const SpinGuard guard(lock_);
  if (!sorted_) sorted_ = static_cast<Allocation*>(map_zeroed(kMost * sizeof(Allocation)));
  return sorted_ != nullptr;
}

uint32_t AllocationTable::upper(uint64_t address) const {
  const Allocation* begin = sorted_;
  const Allocation* end = begin + count_.load(std::memory_order_relaxed);
  const Allocation* above =
      std::upper_bound(begin, end, address, [](uint64_t value, const Allocation& entry) { return value < entry.start; });
  return static_cast<uint32_t>(above - begin);
}

void AllocationTable::erase_at(uint32_t at) {
  const uint64_t count = count_.load(std::memory_order_relaxed);
  memmove(sorted_ + at, sorted_ + at + 1, (count - at - 1) * sizeof(Allocation));
  count_.store(count - 1, std::memory_order_relaxed);
}

uint64_t AllocationTable::add(uint64_t start, uint64_t size_bytes, MemoryKind kind, int device) {
  if (start == 0 || size_bytes == 0 || size_bytes > UINT64_MAX - start) return 0;
  const SpinGuard guard(lock_);
  if (!sorted_) return 0;
  uint32_t at = upper(start);
  while (at > 0 && sorted_[at - 1].end() > start) erase_at(--at);
  while (at < count_.load(std::memory_order_relaxed) && sorted_[at].start < start + size_bytes) erase_at(at);
  const uint64_t count = count_.load(std::memory_order_relaxed);
  if (count == kMost) return 0;
  memmove(sorted_ + at + 1, sorted_ + at, (count - at) * sizeof(Allocation));
  sorted_[at] = {start, size_bytes, last_ordinal.fetch_add(1, std::memory_order_relaxed) + 1, kind, 0,
                 static_cast<int16_t>(device)};
  count_.store(count + 1, std::memory_order_relaxed);
  lowest_.store(std::min(lowest_.load(std::memory_order_relaxed), start), std::memory_order_relaxed);
  highest_.store(std::max(highest_.load(std::memory_order_relaxed), start + size_bytes), std::memory_order_relaxed);
  return sorted_[at].ordinal;
}

uint64_t AllocationTable::remove(uint64_t start) {
  const SpinGuard guard(lock_);
  if (!sorted_) return 0;
  const uint32_t above = upper(start);
  if (above == 0 || sorted_[above - 1].start != start) return 0;
  const uint64_t ordinal = sorted_[above - 1].ordinal;
  erase_at(above - 1);
  return ordinal;
}

bool AllocationTable::find(uint64_t address, Allocation* allocation) {
  if (address < lowest_.load(std::memory_order_relaxed) || address >= highest_.load(std::memory_order_relaxed)) return false;
  const SpinGuard guard(lock_);
  const uint32_t above = upper(address);
  if (above == 0 || address >= sorted_[above - 1].end()) return false;
  *allocation = sorted_[above - 1];
  return true;
}

uint8_t AllocationTable::mark(uint64_t start, uint8_t set, uint8_t clear) {
  const SpinGuard guard(lock_);
  if (!sorted_) return 0;
  const uint32_t above = upper(start);
  if (above == 0 || sorted_[above - 1].start != start) return 0;
  const uint8_t before = sorted_[above - 1].flags;
  sorted_[above - 1].flags = static_cast<uint8_t>((before & ~clear) | set);
  return before;
}

bool AllocationTable::nth(uint64_t n, Allocation* allocation) {
  const SpinGuard guard(lock_);
  if (!sorted_ || n >= count_.load(std::memory_order_relaxed)) return false;
  *allocation = sorted_[n];
  return true;
}

}  // namespace forkpoint
