#include "probes/launch_packet.h"

#include <atomic>
#include <new>

#include "probes/os.h"

namespace forkpoint {
namespace {

// Virtual sizes; a page is backed when its packet is first used.
struct PoolShape {
  uint32_t buffers;
  uint32_t packets;
};
constexpr PoolShape kShapes[] = {{0, 1u << 16}, {8, 1u << 16}, {64, 1u << 13}, {kMostBuffers, 1u << 8}};
constexpr int kPools = sizeof(kShapes) / sizeof(kShapes[0]);

// A stack of free packets: their numbers from 1, with a count above them against the same number coming round again.
class PacketPool {
 public:
  LaunchPacket* take(uint32_t number) {
    const PoolShape& shape = kShapes[number];
    char* memory = ensure(shape);
    if (!memory) return nullptr;
    uint64_t head = head_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(head) != 0) {
      LaunchPacket* packet = at(memory, shape, static_cast<uint32_t>(head));
      const uint64_t next = ((head >> 32) + 1) << 32 | __atomic_load_n(&packet->next_free, __ATOMIC_RELAXED);
      if (head_.compare_exchange_weak(head, next, std::memory_order_acq_rel)) return fresh(packet, shape, number);
    }
    // The first time round in order, so that no page is touched early.
    const uint32_t untouched = untouched_.fetch_add(1, std::memory_order_relaxed);
    if (untouched >= shape.packets) {
      untouched_.store(shape.packets, std::memory_order_relaxed);
      return nullptr;
    }
    return fresh(at(memory, shape, untouched + 1), shape, number);
  }
  void give(LaunchPacket* packet) {
    const PoolShape& shape = kShapes[packet->pool];
    const auto offset = reinterpret_cast<char*>(packet) - memory_.load(std::memory_order_relaxed);
    const uint32_t number = static_cast<uint32_t>(static_cast<size_t>(offset) / stride(shape)) + 1;
    uint64_t head = head_.load(std::memory_order_relaxed);
    uint64_t next = 0;
    do {
      __atomic_store_n(&packet->next_free, static_cast<uint32_t>(head), __ATOMIC_RELAXED);
      next = ((head >> 32) + 1) << 32 | number;
    } while (!head_.compare_exchange_weak(head, next, std::memory_order_acq_rel));
  }
  void forget() {
    memory_.store(nullptr);
    head_.store(0);
    untouched_.store(0);
  }

 private:
  static size_t stride(const PoolShape& shape) { return sizeof(LaunchPacket) + shape.buffers * sizeof(PacketBuffer); }
  static LaunchPacket* at(char* memory, const PoolShape& shape, uint32_t number) {
    return reinterpret_cast<LaunchPacket*>(memory + (number - 1) * stride(shape));
  }
  static LaunchPacket* fresh(LaunchPacket* packet, const PoolShape& shape, uint32_t number) {
    packet->row = {};
    packet->site = nullptr;
    packet->graph = nullptr;
    packet->discard = false;
    packet->capacity = shape.buffers;
    packet->pool = number;
    return packet;
  }
  char* ensure(const PoolShape& shape) {
    char* memory = memory_.load(std::memory_order_acquire);
    if (memory) return memory;
    auto* made = static_cast<char*>(map_zeroed(stride(shape) * shape.packets));
    if (made && !memory_.compare_exchange_strong(memory, made, std::memory_order_acq_rel)) {
      unmap(made, stride(shape) * shape.packets);
      return memory;
    }
    return made;
  }

  std::atomic<char*> memory_{nullptr};
  std::atomic<uint64_t> head_{0};
  std::atomic<uint32_t> untouched_{0};
};

constinit PacketPool pools[kPools];

}  // namespace

LaunchPacket* take_packet(const Token&, uint32_t buffers) {
  for (int i = 0; i < kPools; ++i) {
    if (kShapes[i].buffers < buffers) continue;
    if (LaunchPacket* packet = pools[i].take(static_cast<uint32_t>(i))) return packet;
  }
  return nullptr;
}

void return_packet(LaunchPacket* packet) { pools[packet->pool].give(packet); }

void forget_packets_in_child() {
  for (PacketPool& pool : pools) pool.forget();
}

}  // namespace forkpoint
