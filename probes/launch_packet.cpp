#include "probes/launch_packet.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "probes/launch_recorder.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

// Virtual sizes; a page is backed when its packet is first used.
struct PoolShape {
  uint32_t buffers;
  uint32_t packets;
};
constexpr PoolShape kShapes[] = {{0, 1u << 16}, {8, 1u << 16}, {64, 1u << 13}, {kMostBuffers, 1u << 12}};
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
  bool has_memory() const { return memory_.load(std::memory_order_relaxed) != nullptr; }
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
    packet->rows = 1;
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
constinit std::atomic<uint32_t> returned{0};  // futex; counts round
constinit std::atomic<uint32_t> waiting{0};   // threads
constinit std::atomic<uint64_t> stalled_at{UINT64_MAX};  // `returned` when a wait was in vain

LaunchPacket* take_now(uint32_t buffers) {
  for (int i = 0; i < kPools; ++i) {
    if (kShapes[i].buffers < buffers) continue;
    if (LaunchPacket* packet = pools[i].take(static_cast<uint32_t>(i))) return packet;
  }
  return nullptr;
}

bool may_come_back(uint32_t buffers) {
  for (int i = 0; i < kPools; ++i) {
    if (kShapes[i].buffers >= buffers && pools[i].has_memory()) return true;
  }
  return false;
}

// As Session::claim does when the ring is full.
LaunchPacket* take_waiting(uint32_t buffers) {
  if (stalled_at.load(std::memory_order_relaxed) == returned.load() || recorder.is_stalled()) return nullptr;
  const int64_t deadline_ns = now_ns() + launch_recorder.settings().ring_wait_ms * kMillisecond;
  LaunchPacket* packet = nullptr;
  waiting.fetch_add(1);
  while (recorder.is_awake()) {  // the writer is there
    const uint32_t before = returned.load();
    packet = take_now(buffers);
    const int64_t left_ns = deadline_ns - now_ns();
    if (packet || left_ns <= 0) break;
    futex_wait(returned, before, std::min(left_ns, 10 * kMillisecond));
  }
  waiting.fetch_sub(1);
  if (packet) return packet;
  stalled_at.store(returned.load(), std::memory_order_relaxed);
  recorder.note_stall();
  return packet;
}

}  // namespace

LaunchPacket* take_packet(const Token&, uint32_t buffers, bool may_wait) {
  if (LaunchPacket* packet = take_now(buffers)) return packet;
  return may_wait && may_come_back(buffers) ? take_waiting(buffers) : nullptr;
}

void return_packet(LaunchPacket* packet) {
  pools[packet->pool].give(packet);
  returned.fetch_add(1);
  if (waiting.load() != 0) futex_wake(returned);
}

void forget_packets_in_child() {
  stalled_at.store(UINT64_MAX);
  waiting.store(0);
  for (PacketPool& pool : pools) pool.forget();
}

}  // namespace forkpoint
