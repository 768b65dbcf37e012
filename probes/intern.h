// A table of things seen so far, of which each gets one address for the life of the process. Any thread may look up and
// add at any time: no lock, and no allocation when the thing is known. Entries are never freed, so that the child of a
// fork, a thread that ends late and the writer can all still read them.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "lib/digest_mix.h"
#include "probes/os.h"

namespace forkpoint {

// Within a process only; never written to a stream.
inline uint64_t hash_bytes(const void* data, size_t size_bytes, uint64_t seed) {
  const char* bytes = static_cast<const char*>(data);
  uint64_t hash = seed ^ (size_bytes * 0x9E3779B97F4A7C15ull);
  uint64_t word = 0;
  for (; size_bytes >= 8; bytes += 8, size_bytes -= 8) {
    memcpy(&word, bytes, 8);
    hash = (hash ^ word) * 0xD6E8FEB86659FD93ull;
    hash ^= hash >> 32;
  }
  word = 0;
  memcpy(&word, bytes, size_bytes);
  return mix64(hash ^ word);
}

// Entry has: uint64_t hash; bool equals(const Key&) const; static Entry* make(uint64_t hash, const Key&) (nullptr: no
// memory); static void discard(Entry*).
template <typename Entry>
class InternTable {
 public:
  // May be called by several threads; REQUIRES: capacity is a power of two, and always the same.
  bool create(uint32_t capacity) {
    if (cells_.load(std::memory_order_acquire)) return true;
    auto* cells = static_cast<Cell*>(map_zeroed(capacity * sizeof(Cell)));
    if (!cells) return false;
    mask_.store(capacity - 1, std::memory_order_relaxed);
    Cell* none = nullptr;
    if (!cells_.compare_exchange_strong(none, cells, std::memory_order_release)) unmap(cells, capacity * sizeof(Cell));
    return true;
  }

  // nullptr: not seen so far. REQUIRES: create() was true.
  template <typename Key>
  Entry* find(uint64_t hash, const Key& key) const {
    const Cell* cells = cells_.load(std::memory_order_acquire);
    const uint32_t mask = mask_.load(std::memory_order_relaxed);
    for (uint64_t i = hash;; ++i) {
      Entry* entry = cells[i & mask].load(std::memory_order_acquire);
      if (!entry || (entry->hash == hash && entry->equals(key))) return entry;
    }
  }

  // nullptr: the table is full or there is no memory. REQUIRES: create() was true.
  template <typename Key>
  Entry* intern(uint64_t hash, const Key& key) {
    Cell* cells = cells_.load(std::memory_order_acquire);
    const uint32_t mask = mask_.load(std::memory_order_relaxed);
    Entry* made = nullptr;
    for (uint64_t i = hash;; ++i) {
      Cell& cell = cells[i & mask];
      Entry* entry = cell.load(std::memory_order_acquire);
      if (!entry) {
        if (count_.load(std::memory_order_relaxed) > mask / 4 * 3) break;
        if (!made) made = Entry::make(hash, key);
        if (!made) return nullptr;
        if (cell.compare_exchange_strong(entry, made, std::memory_order_acq_rel)) {
          count_.fetch_add(1, std::memory_order_relaxed);
          return made;
        }
      }
      if (entry->hash == hash && entry->equals(key)) {
        if (made) Entry::discard(made);
        return entry;
      }
    }
    if (made) Entry::discard(made);
    return nullptr;
  }

 private:
  using Cell = std::atomic<Entry*>;
  std::atomic<Cell*> cells_{nullptr};
  std::atomic<uint32_t> mask_{0};
  std::atomic<uint32_t> count_{0};
};

}  // namespace forkpoint
