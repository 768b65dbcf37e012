// The fake libcuda's memory: a range of the process's addresses from which "device" memory is taken, first fit, so that
// addresses come round again as they do on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace forkpoint::fake {

enum class MemoryKind { device, managed, pinned };

struct Block {
  uint64_t start = 0;
  uint64_t size_bytes = 0;
  MemoryKind kind = MemoryKind::device;
  uint64_t id = 0;  // never used twice
  bool in_arena = false;
  bool released = false;  // freed in the order of a stream that has not come to it yet
};

// Any thread.
class Memory {
 public:
  static Memory& get();
  // 0: no room. Aligned to 512 bytes.
  uint64_t allocate(size_t size_bytes, MemoryKind kind);
  // Memory of the process.
  void add(const void* memory, size_t size_bytes, MemoryKind kind);
  // false: there is no such allocation.
  bool mark_released(uint64_t start);
  bool remove(uint64_t start);
  // Of what is not released.
  bool find(uint64_t address, Block* block);
  // All of the bytes lie in one allocation, or in one that is released only in the order of a stream.
  bool is_there(uint64_t address, uint64_t size_bytes);
  void set_garbage(uint64_t seed);
  void forget_device();  // where other processes may open it: with its context it is gone
  uint64_t free_bytes();
  // For other processes, with FAKE_CUDA_SHARED=1; -1: it is this process's alone.
  int shared_file() const { return file_; }
  uint64_t offset_of(uint64_t address) const { return address - arena_; }

 private:
  Memory();
  const Block* block_of(uint64_t address) const;
  void give_back(uint64_t start, uint64_t size_bytes);
  void fill(uint64_t start, uint64_t size_bytes) const;

  std::mutex lock_;
  int file_ = -1;
  uint64_t arena_ = 0;
  std::map<uint64_t, uint64_t> free_;  // start, bytes
  std::map<uint64_t, Block> blocks_;
  uint64_t last_id_ = 0;
  uint64_t garbage_seed_ = 0;
};

}  // namespace forkpoint::fake
