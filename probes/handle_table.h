// From a handle or an address of the host's to a number of ours. Any thread; fixed memory; a short lock that is never held
// across a call.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "lib/digest_mix.h"
#include "probes/os.h"

namespace forkpoint {

// Held for some tens of nanoseconds. Not a mutex: it needs no memory and no construction, and the child of a fork can let
// it go.
class SpinLock {
 public:
  void lock() {
    for (int tries = 0; held_.exchange(true, std::memory_order_acquire); ++tries) {
      if (tries > 100) sched_yield();
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }
  // In the child of a fork: the thread that held it is not here.
  void reset() { held_.store(false, std::memory_order_relaxed); }

 private:
  std::atomic<bool> held_{false};
};

class SpinGuard {
 public:
  explicit SpinGuard(SpinLock& lock) : lock_(lock) { lock_.lock(); }
  ~SpinGuard() { lock_.unlock(); }
  SpinGuard(const SpinGuard&) = delete;
  SpinGuard& operator=(const SpinGuard&) = delete;

 private:
  SpinLock& lock_;
};

class HandleTable {
 public:
  // REQUIRES: capacity is a power of two. false: no memory. Keys are never 0, nor are values.
  bool create(uint32_t capacity) {
    const SpinGuard guard(lock_);
    if (!cells_) cells_ = static_cast<Cell*>(map_zeroed(capacity * sizeof(Cell)));
    mask_ = capacity - 1;
    return cells_ != nullptr;
  }
  // 0: not there.
  uint64_t find(uint64_t key) {
    const SpinGuard guard(lock_);
    return cells_ ? cells_[place_of(key)].value : 0;
  }
  // false: the table is full.
  bool set(uint64_t key, uint64_t value) {
    const SpinGuard guard(lock_);
    return insert(key, value);
  }
  // What is there, else what make() gives.
  template <typename Make>
  uint64_t find_or_set(uint64_t key, Make make) {
    const SpinGuard guard(lock_);
    if (!cells_) return 0;
    const uint64_t known = cells_[place_of(key)].value;
    if (known != 0) return known;
    const uint64_t made = make();
    return insert(key, made) ? made : 0;
  }
  // What was there, or 0.
  uint64_t erase(uint64_t key) {
    const SpinGuard guard(lock_);
    if (!cells_) return 0;
    uint32_t hole = place_of(key);
    const uint64_t value = cells_[hole].value;
    if (value == 0) return 0;
    --count_;
    // Close the gap, so that no search ends early.
    for (uint32_t at = (hole + 1) & mask_; cells_[at].key != 0; at = (at + 1) & mask_) {
      const uint32_t home = home_of(cells_[at].key);
      if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
      cells_[hole] = cells_[at];
      hole = at;
    }
    cells_[hole] = {};
    return value;
  }
  // Nothing is there any more.
  void clear() {
    const SpinGuard guard(lock_);
    for (uint32_t i = 0; cells_ && count_ > 0 && i <= mask_; ++i) cells_[i] = {};
    count_ = 0;
  }
  // The same, with visit(value) of each before; it must not use the table.
  template <typename Visit>
  void clear(Visit visit) {
    const SpinGuard guard(lock_);
    for (uint32_t i = 0; cells_ && count_ > 0 && i <= mask_; ++i) {
      if (cells_[i].value != 0) visit(cells_[i].value);
      cells_[i] = {};
    }
    count_ = 0;
  }
  // In the child of a fork.
  void reset_lock() { lock_.reset(); }

 private:
  struct Cell {
    uint64_t key = 0;
    uint64_t value = 0;
  };
  uint32_t home_of(uint64_t key) const { return static_cast<uint32_t>(mix64(key)) & mask_; }
  uint32_t place_of(uint64_t key) const {
    uint32_t at = home_of(key);
    while (cells_[at].key != 0 && cells_[at].key != key) at = (at + 1) & mask_;
    return at;
  }
  bool insert(uint64_t key, uint64_t value) {
    if (!cells_) return false;
    Cell& cell = cells_[place_of(key)];
    if (cell.key == 0) {
      if (count_ > mask_ / 4 * 3) return false;
      ++count_;
    }
    cell = {key, value};
    return true;
  }

  SpinLock lock_;
  Cell* cells_ = nullptr;
  uint32_t mask_ = 0;
  uint32_t count_ = 0;
};

}  // namespace forkpoint
