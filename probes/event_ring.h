// A bounded queue from many threads to one, in a fixed block of memory (after D. Vyukov, "Bounded MPMC queue"): no lock, no
// allocation after create(). A producer claims a place, fills it and publishes it; the consumer sees places in the order
// of their claims.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#include "probes/os.h"

namespace forkpoint {

template <typename Event>
class EventRing {
 public:
  struct Claim {
    Event* event = nullptr;
    uint64_t position = 0;
  };

  EventRing() = default;
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  // REQUIRES: slots is a power of two, at least 2. false: no memory.
  bool create(uint32_t slots) {
    mask_ = slots - 1;
    cells_ = static_cast<Cell*>(map_zeroed(size_bytes()));
    return cells_ != nullptr;
  }
  // REQUIRES: no other thread uses the ring.
  void destroy() {
    unmap(cells_, size_bytes());
    cells_ = nullptr;
  }

  // Any thread. false: full.
  bool try_claim(Claim* claim) {
    uint64_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      const auto behind = static_cast<int64_t>(cell.turn.load(std::memory_order_acquire) - lap(position));
      if (behind < 0) return false;
      if (behind > 0) {
        position = tail_.load(std::memory_order_relaxed);
      } else if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        *claim = {&cell.event, position};
        return true;
      }
    }
  }
  void publish(const Claim& claim) {
    cells_[claim.position & mask_].turn.store(lap(claim.position) + 1, std::memory_order_release);
  }

  // Consumer only. nullptr: empty, or the next place is claimed but not published yet.
  Event* front() {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    Cell& cell = cells_[head & mask_];
    return cell.turn.load(std::memory_order_acquire) == lap(head) + 1 ? &cell.event : nullptr;
  }
  // REQUIRES: front() was not nullptr.
  void pop() {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    cells_[head & mask_].turn.store(lap(head) + mask_ + 1, std::memory_order_release);
    head_.store(head + 1, std::memory_order_relaxed);
  }

  uint64_t claimed() const { return tail_.load(std::memory_order_relaxed); }
  uint64_t popped() const { return head_.load(std::memory_order_relaxed); }

 private:
  // turn is kept relative to the cell's index, so that zeroed memory is a valid empty ring and no page need be touched:
  // lap(p): free for position p; lap(p) + 1: published.
  struct Cell {
    std::atomic<uint64_t> turn;
    Event event;
  };
  uint64_t lap(uint64_t position) const { return position & ~uint64_t{mask_}; }
  size_t size_bytes() const { return (size_t{mask_} + 1) * sizeof(Cell); }

  Cell* cells_ = nullptr;
  uint32_t mask_ = 0;
  alignas(64) std::atomic<uint64_t> tail_{0};
  alignas(64) std::atomic<uint64_t> head_{0};
};

}  // namespace forkpoint
