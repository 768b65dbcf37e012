// The ranks of a deterministic collective as threads of this process: each block's workers are threads too, so the
// protocol of kernels/ runs as it does on GPUs, with every interleaving that the scheduler (and random pauses) can
// think of.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/collective_lines.h"
#include "kernels/collective_protocol.h"
#include "kernels/deterministic_collective.h"

namespace forkpoint::collective {

class HostMachine {
 public:
  static constexpr uint64_t kLinePeriod = 8;  // small, so that stale lines come round

  // worker: of `workers` of a block.
  HostMachine(const uint32_t* abort, std::barrier<>& block, Share share, uint64_t seed, bool pauses)
      : abort_(abort), block_(block), share_(share), random_(seed), pauses_(pauses) {}

  static Share team() { return {0, 1}; }
  bool is_signaller() const { return share_.first == 0; }
  static Vector load_staging(const char* from) {
    Vector vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  static Vector load_program(const char* from) { return load_staging(from); }
  static void store_staging(char* to, const Vector& vector) { memcpy(to, &vector, sizeof(vector)); }
  static void store_program(char* to, const Vector& vector) { store_staging(to, vector); }

  void meet() {
    maybe_pause();
    block_.arrive_and_wait();
  }
  // One that was told to end: the others do not wait for it.
  void leave() { block_.arrive_and_drop(); }
  void signal(char* address, uint64_t value) {
    maybe_pause();
    if (address) std::atomic_ref(*reinterpret_cast<uint64_t*>(address)).store(value, std::memory_order_release);
  }
  bool await_signals(const char* base, uint32_t count, uint32_t except, uint64_t value) {
    for (uint32_t i = 0; i < count; ++i) {
      std::atomic_ref<uint64_t> one(*reinterpret_cast<uint64_t*>(const_cast<char*>(base + 8 * i)));
      while (i != except && one.load(std::memory_order_acquire) < value) {
        if (!still_waiting()) return false;
      }
    }
    maybe_pause();
    return true;
  }
  static void store_line(char* to, uint32_t low, uint32_t high, uint32_t mark) {
    for (const uint32_t half : {low, high}) {
      std::atomic_ref(*reinterpret_cast<uint64_t*>(to)).store(uint64_t{mark} << 32 | half, std::memory_order_relaxed);
      to += 8;
    }
  }
  static bool load_line(const char* from, uint32_t mark, uint32_t* low, uint32_t* high) {
    bool there = true;
    for (uint32_t* half : {low, high}) {
      const uint64_t word =
          std::atomic_ref(*reinterpret_cast<uint64_t*>(const_cast<char*>(from))).load(std::memory_order_relaxed);
      *half = static_cast<uint32_t>(word);
      there = there && word >> 32 == mark;
      from += 8;
    }
    return there;
  }
  bool still_waiting() {
    std::this_thread::yield();
    return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(*abort_)).load() == 0;
  }
  static void settle() {}

 private:
  void maybe_pause() {
    if (!pauses_) return;
    const auto roll = random_() % 64;
    if (roll == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
    else if (roll < 16)
      std::this_thread::yield();
  }

  const uint32_t* abort_;
  std::barrier<>& block_;
  const Share share_;
  std::mt19937_64 random_;
  const bool pauses_;
};

// What one kernel would be on the device.
template <typename Work>
void run_block(HostMachine& machine, Work work, Share share) {
  if (!work.work(share)) return machine.leave();
  machine.meet();
  if (share.first == 0) work.advance();
}
template <typename A, bool kTree>
void run_worker(HostMachine& machine, const CollectiveParams& call, uint32_t block, Share share) {
  if (call.protocol == Protocol::local)
    add_local<HostMachine, A, kTree>(call, share);
  else if (call.protocol == Protocol::low_latency)
    run_block(machine, LineBlock<HostMachine, A, kTree>(machine, call, block), share);
  else
    run_block(machine, Block<HostMachine, A, kTree>(machine, call, block), share);
}
using RunWorker = void (*)(HostMachine&, const CollectiveParams&, uint32_t, Share);
RunWorker worker_of(const CollectiveSpec& spec);
RunWorker worker_of_kernel(const std::string& name);
// One rank's kernel, until it ends; each block as that many threads.
void run_on_threads(const CollectiveParams& params, RunWorker run, uint32_t workers, bool pauses);

// Staging memory and threads of all ranks.
class World {
 public:
  World(StagingShape shape, uint32_t workers, bool pauses);

  struct Rank {
    const void* in;
    void* out;
  };
  using Calls = std::vector<std::pair<CollectiveSpec, std::vector<Rank>>>;  // of each rank its buffers
  // Each rank makes the calls one after another, as on a stream, and waits for nobody but by the protocol; the i-th
  // with tunings[i % size]. absent: a rank that does not come; the others are told to give up after some milliseconds.
  using Tunings = std::vector<CollectiveTuning>;
  void run(const Calls& calls, const Tunings& tunings, int absent = -1);
  bool aborted() const { return abort_ != 0; }
  uint32_t low_latency_calls() const { return low_latency_calls_; }
  uint32_t pipelined_calls() const { return pipelined_calls_; }

 private:
  void run_rank(const Calls& calls, const Tunings& tunings, uint32_t rank);

  StagingShape shape_;
  uint32_t workers_;
  bool pauses_;
  std::vector<std::vector<char>> memory_;
  std::vector<void*> staging_;
  uint32_t abort_ = 0;
  std::atomic<uint32_t> low_latency_calls_{0}, pipelined_calls_{0};
};

}  // namespace forkpoint::collective
