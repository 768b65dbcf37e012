// What the tests of the device digest share: random bytes on both sides, slots and scratch, and a list of digests under
// way with what the host says of the same bytes.
#pragma once

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/device_digest.h"
#include "lib/digest_mix.h"

namespace forkpoint {

#define CUDA_OK(call) REQUIRE(std::string(cudaGetErrorString(call)) == "no error")

// Slots in mapped host memory, one scratch entry each, and a buffer with random bytes on both sides.
class Bench {
 public:
  static constexpr size_t kSlots = 4096;
  explicit Bench(size_t bytes) : host(bytes) {
    CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&slots), kSlots * sizeof(DigestSlot), cudaHostAllocMapped));
    std::memset(slots, 0, kSlots * sizeof(DigestSlot));
    CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&scratch), kSlots * sizeof(DigestScratch)));
    CUDA_OK(cudaMemset(scratch, 0, kSlots * sizeof(DigestScratch)));
    CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&device), bytes));
    std::mt19937_64 random(bytes);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t value = random();
      std::memcpy(&host[i], &value, 8);
    }
    CUDA_OK(cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice));
    CUDA_OK(cudaDeviceSynchronize());
  }
  ~Bench() {
    cudaFreeHost(slots);
    cudaFree(scratch);
    cudaFree(device);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  DigestTarget target() {
    DigestTarget next;
    next.slot = slots + used_;
    next.scratch = scratch + used_;
    next.ticket = ++ticket_;
    ++used_;
    return next;
  }
  size_t room() const { return kSlots - used_; }
  void reset() { used_ = 0; }
  void check_scratch_is_clean() const {
    std::vector<DigestScratch> found(kSlots);
    CUDA_OK(cudaMemcpy(found.data(), scratch, kSlots * sizeof(DigestScratch), cudaMemcpyDeviceToHost));
    for (const DigestScratch& entry : found) {
      uint64_t left = entry.magnitude | entry.blocks_done;
      for (const uint64_t word : entry.word) left |= word;
      CHECK(left == 0);
    }
  }

  std::vector<unsigned char> host;
  unsigned char* device = nullptr;
  DigestSlot* slots = nullptr;
  DigestScratch* scratch = nullptr;

 private:
  size_t used_ = 0;
  uint32_t ticket_ = 0;
};

inline void check_equal(const DigestResult& found, const DigestResult& expected) {
  CHECK(found.digest == expected.digest);
  CHECK(found.stats.absmax == expected.stats.absmax);
  CHECK(found.stats.nonfinite == expected.stats.nonfinite);
  CHECK(found.stats.word_sum == expected.stats.word_sum);
}

// Digests that were launched, to be compared once the stream is done.
class Expected {
 public:
  explicit Expected(Bench& bench) : bench_(bench) {}
  ~Expected() { check(); }
  void bytes(size_t offset, size_t size, DType dtype, uint64_t first_byte) {
    const DigestTarget target = bench_.target();
    CUDA_OK(digest_bytes_on_device(bench_.device + offset, size, dtype, first_byte, target, nullptr));
    add(target, dtype, digest_bytes(&bench_.host[offset], size, dtype, first_byte));
  }
  void view(size_t offset, const TensorView& view) {
    const DigestTarget target = bench_.target();
    CUDA_OK(digest_on_device(bench_.device + offset, view, target, nullptr));
    add(target, view.dtype, digest_view(&bench_.host[offset], view));
  }
  void add(const DigestTarget& target, DType dtype, const DigestResult& expected) {
    all_.push_back({target, dtype, expected});
    if (bench_.room() == 0) check();
  }
  void check() {
    CUDA_OK(cudaDeviceSynchronize());
    for (size_t i = 0; i < all_.size(); ++i) {
      SlotResult found;
      CAPTURE(name(all_[i].dtype));
      CAPTURE(i);
      REQUIRE(read_slot(*all_[i].target.slot, all_[i].target.ticket, &found));
      check_equal(finish(all_[i].dtype, found.raw), all_[i].expected);
    }
    all_.clear();
    bench_.reset();
  }

 private:
  struct One {
    DigestTarget target;
    DType dtype;
    DigestResult expected;
  };
  Bench& bench_;
  std::vector<One> all_;
};

// A ring whose n-th result the test takes itself.
class Ring {
 public:
  Ring(DigestSlot* slots, uint64_t capacity) {
    CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&counters_), 16, cudaHostAllocMapped));
    counters_[0] = counters_[1] = 0;
    ring_.slots = slots;
    ring_.consumed = &counters_[0];
    ring_.dropped = &counters_[1];
    ring_.capacity = capacity;
    CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&device_), sizeof(ring_)));
    CUDA_OK(cudaMemcpy(device_, &ring_, sizeof(ring_), cudaMemcpyHostToDevice));
  }
  ~Ring() {
    cudaFree(device_);
    cudaFreeHost(counters_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  DigestRing* device() const { return device_; }
  uint64_t dropped() const { return counters_[1]; }
  // False: there is none yet.
  bool take(SlotResult* result) {
    if (!read_slot(ring_.slots[next_ % ring_.capacity], ring_ticket(next_, ring_.capacity), result)) return false;
    __atomic_store_n(&counters_[0], ++next_, __ATOMIC_RELEASE);
    return true;
  }

 private:
  DigestRing ring_;
  DigestRing* device_ = nullptr;
  uint64_t* counters_ = nullptr;
  uint64_t next_ = 0;
};

// What `enqueue` enqueues, to be launched again and again.
class Graph {
 public:
  template <typename Enqueue>
  explicit Graph(Enqueue enqueue) {
    cudaGraph_t graph;
    CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    enqueue(stream_);
    CUDA_OK(cudaStreamEndCapture(stream_, &graph));
    CUDA_OK(cudaGraphInstantiate(&executable_, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaStreamDestroy(stream_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() { CUDA_OK(cudaGraphLaunch(executable_, stream_)); }
  void wait() { CUDA_OK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace forkpoint
