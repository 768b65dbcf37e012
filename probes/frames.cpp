#include "probes/frames.h"

#include <new>

namespace forkpoint {

FrameEntry* FrameEntry::make(uint64_t hash, const ScopeFrame& frame) {
  return new (std::nothrow) FrameEntry{hash, frame, {0}};
}

bool FrameTable::create() {
  if (numbered_.load(std::memory_order_acquire)) return true;
  if (!entries_.create(kCells)) return false;
  constexpr size_t kBytes = kCells * sizeof(std::atomic<FrameEntry*>);
  auto* made = static_cast<std::atomic<FrameEntry*>*>(map_zeroed(kBytes));
  std::atomic<FrameEntry*>* none = nullptr;
  if (made && !numbered_.compare_exchange_strong(none, made, std::memory_order_acq_rel)) unmap(made, kBytes);
  return made != nullptr;
}

uint32_t FrameTable::add(const ScopeFrame& frame) {
  const uint64_t numbers[] = {static_cast<uint64_t>(static_cast<uint8_t>(frame.phase)) | uint64_t{frame.collective} << 8 |
                                  uint64_t{frame.flags} << 16,
                              reinterpret_cast<uint64_t>(frame.layer), reinterpret_cast<uint64_t>(frame.op),
                              reinterpret_cast<uint64_t>(frame.communicator)};
  FrameEntry* entry = entries_.intern(hash_bytes(numbers, sizeof(numbers), 3), frame);
  if (!entry) return 0;
  uint32_t known = entry->number.load(std::memory_order_acquire);
  if (known != 0) return known;
  const uint32_t number = last_.fetch_add(1) + 1;
  if (number >= kCells) return 0;
  numbered_.load(std::memory_order_relaxed)[number].store(entry, std::memory_order_release);
  // Of two threads that name it at once both numbers are good, and one is told from now on.
  return entry->number.compare_exchange_strong(known, number, std::memory_order_acq_rel) ? number : known;
}

uint32_t FrameTable::add(const CommunicatorEntry* communicator) {
  for (uint32_t number = 1; number < kMaxCommunicators; ++number) {
    const CommunicatorEntry* known = nullptr;
    if (communicators_[number].compare_exchange_strong(known, communicator) || known == communicator) return number;
  }
  return 0;
}

}  // namespace forkpoint
