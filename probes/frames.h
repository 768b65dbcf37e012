// Scopes that are named once and then by a number: what a framework's bridge hands over with each record in place of
// strings. Numbers are given for the life of the process, and the same scope has one number. Any thread, no lock.
#pragma once

#include <atomic>
#include <cstdint>

#include "probes/intern.h"
#include "probes/scopes.h"

namespace forkpoint {

struct FrameEntry {
  uint64_t hash;
  ScopeFrame frame;
  std::atomic<uint32_t> number;  // 0: not given yet

  bool equals(const ScopeFrame& other) const { return frame == other; }
  static FrameEntry* make(uint64_t hash, const ScopeFrame& frame);
  static void discard(FrameEntry* entry) { delete entry; }
};

class FrameTable {
 public:
  // May be called by several threads. false: no memory.
  bool create();
  // 0: there are too many. REQUIRES: create() was true.
  uint32_t add(const ScopeFrame& frame);
  uint32_t add(const CommunicatorEntry* communicator);
  // nullptr: no such number.
  const ScopeFrame* find(uint32_t number) const {
    const auto* numbered = numbered_.load(std::memory_order_acquire);
    if (!numbered || number == 0 || number >= kCells) return nullptr;
    const FrameEntry* entry = numbered[number].load(std::memory_order_acquire);
    return entry ? &entry->frame : nullptr;
  }
  const CommunicatorEntry* communicator(uint32_t number) const {
    return number < kMaxCommunicators ? communicators_[number].load(std::memory_order_acquire) : nullptr;
  }

 private:
  static constexpr uint32_t kCells = 1u << 17;
  static constexpr uint32_t kMaxCommunicators = 1024;
  InternTable<FrameEntry> entries_;
  std::atomic<std::atomic<FrameEntry*>*> numbered_{nullptr};
  std::atomic<uint32_t> last_{0};
  std::atomic<const CommunicatorEntry*> communicators_[kMaxCommunicators] = {};
};

}  // namespace forkpoint
