#include "tests/fakes/fake_cuda_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lib/digest_mix.h"

namespace forkpoint::fake {
namespace {

constexpr uint64_t kArenaBytes = uint64_t{16} << 30;  // of addresses; memory only where it is touched
constexpr uint64_t kAlignment = 512;

uint64_t rounded(uint64_t size_bytes) { return (size_bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Memory& Memory::get() {
  static Memory* one = new Memory;
  return *one;
}

Memory::Memory() {
  if (getenv("FAKE_CUDA_SHARED")) file_ = memfd_create("fake cuda", MFD_CLOEXEC);
  if (file_ >= 0 && ftruncate(file_, static_cast<off_t>(kArenaBytes)) != 0) abort();
  const int kind = file_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* arena = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, file_, 0);
  if (arena == MAP_FAILED) abort();
  arena_ = reinterpret_cast<uint64_t>(arena);
  free_[arena_] = kArenaBytes;
  const char* seed = getenv("FAKE_CUDA_GARBAGE");
  if (seed) garbage_seed_ = strtoull(seed, nullptr, 10);
}

// A function of the place in the arena, so that it is the same in two processes.
void Memory::fill(uint64_t start, uint64_t size_bytes) const {
  if (garbage_seed_ == 0) return;
  for (uint64_t at = 0; at < rounded(size_bytes); at += 8) {
    const uint64_t value = mix64(garbage_seed_ ^ mix64(start - arena_ + at));
    memcpy(reinterpret_cast<void*>(start + at), &value, 8);
  }
}

uint64_t Memory::allocate(size_t size_bytes, MemoryKind kind) {
  const uint64_t wanted = std::max(rounded(size_bytes), kAlignment);
  const std::lock_guard lock(lock_);
  const auto room = std::find_if(free_.begin(), free_.end(), [&](const auto& one) { return one.second >= wanted; });
  if (room == free_.end()) return 0;
  const uint64_t start = room->first, left = room->second - wanted;
  free_.erase(room);
  if (left > 0) free_[start + wanted] = left;
  blocks_[start] = {start, size_bytes, kind, ++last_id_, true, false};
  fill(start, size_bytes);
  return start;
}

void Memory::add(const void* memory, size_t size_bytes, MemoryKind kind) {
  const auto start = reinterpret_cast<uint64_t>(memory);
  const std::lock_guard lock(lock_);
  blocks_[start] = {start, size_bytes, kind, ++last_id_, false, false};
}

bool Memory::mark_released(uint64_t start) {
  const std::lock_guard lock(lock_);
  const auto found = blocks_.find(start);
  if (found == blocks_.end() || found->second.released) return false;
  found->second.released = true;
  return true;
}

bool Memory::remove(uint64_t start) {
  const std::lock_guard lock(lock_);
  const auto found = blocks_.find(start);
  if (found == blocks_.end()) return false;
  if (found->second.in_arena) give_back(start, std::max(rounded(found->second.size_bytes), kAlignment));
  blocks_.erase(found);
  return true;
}

void Memory::give_back(uint64_t start, uint64_t size_bytes) {
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + size_bytes) {
    size_bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      before->second += size_bytes;
      return;
    }
  }
  free_[start] = size_bytes;
}

const Block* Memory::block_of(uint64_t address) const {
  const auto above = blocks_.upper_bound(address);
  if (above == blocks_.begin()) return nullptr;
  const Block& block = std::prev(above)->second;
  return address - block.start < block.size_bytes ? &block : nullptr;
}

bool Memory::find(uint64_t address, Block* block) {
  const std::lock_guard lock(lock_);
  const Block* found = block_of(address);
  if (!found || found->released) return false;
  *block = *found;
  return true;
}

bool Memory::is_there(uint64_t address, uint64_t size_bytes) {
  if (size_bytes == 0) return true;
  const std::lock_guard lock(lock_);
  const Block* found = block_of(address);
  return found && address - found->start + size_bytes <= found->size_bytes;
}

void Memory::forget_device() {
  const std::lock_guard lock(lock_);
  if (file_ >= 0) std::erase_if(blocks_, [](const auto& one) { return one.second.in_arena; });
}

void Memory::set_garbage(uint64_t seed) {
  const std::lock_guard lock(lock_);
  garbage_seed_ = seed;
}

uint64_t Memory::free_bytes() {
  const std::lock_guard lock(lock_);
  uint64_t bytes = 0;
  for (const auto& room : free_) bytes += room.second;
  return bytes;
}

}  // namespace forkpoint::fake
