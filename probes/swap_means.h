// What communicators need of a context: the kernels, memory, a stream and events. What one leaves is the next one's, so
// that a program which makes and destroys them does not grow, and nothing is freed, which may wait for the device while
// a peer waits for it. All of it is told apart by the context's number, which is never used again: the address of a
// context that is gone comes round. Any thread; no lock is held across a call to CUDA.
#pragma once

#include <atomic>

#include "kernels/deterministic_collective.h"
#include "probes/cuda_driver.h"

namespace forkpoint {

// Makes a context current, and sees to it that nothing of ours breaks a capture, nor a capture anything of ours.
class InContext {
 public:
  InContext(const CudaDriver& driver, CUcontext context);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  bool entered() const { return entered_; }

 private:
  const CudaDriver& driver_;
  bool entered_ = false, pushed_ = false;
  RelaxedCapture relaxed_;
};

// 0: not known.
uint64_t number_of_context(const CudaDriver& driver, CUcontext context);

// The kernels in one context, loaded eagerly. Never freed: a context that goes takes them along.
struct SwapKernels {
  uint64_t context = 0;
  CUfunction function[collective::kCollectiveKernelCount] = {};
  uint32_t multiprocessors = 0;       // 0: other processes' kernels may be there at once, of which we know nothing
  std::atomic<uint32_t> reserved{0};  // blocks that communicators may use at once
  SwapKernels* next = nullptr;

  // At most `wanted`; 0: too few are left.
  uint32_t reserve(uint32_t wanted);
  void give_back(uint32_t blocks) { reserved.fetch_sub(blocks); }
  // On a stream of the current context. false: it could not be launched.
  bool run(const CudaDriver& driver, collective::CollectiveLaunch& launch, CUstream stream) const;
};
// REQUIRES: the context is current. nullptr: they cannot be loaded.
SwapKernels* swap_kernels(const CudaDriver& driver, uint64_t context, CUdevice device);

struct SwapMeans {
  uint64_t context = 0;
  SwapKernels* kernels = nullptr;
  uint32_t blocks = 0;  // reserved
  CUdeviceptr staging = 0;
  uint64_t staging_bytes = 0;
  CUstream exchange = nullptr;  // of the decision; nullptr: none could be made, and it is the default stream
  CUevent last = nullptr;       // behind the last kernel, of a graph's too once that runs
  CUevent captured = nullptr;   // behind the last kernel of a capture
  char* host = nullptr;         // kHostBytes, pinned; nullptr: there is none
  CUdeviceptr host_on_device = 0;
  CUdeviceptr records = 0;  // kRecordsBytes that NCCL may read and write
  CUdeviceptr opened[collective::kMostRanks] = {};  // memory of other processes
  SwapMeans* next = nullptr;

  static constexpr uint64_t kRecordBytes = 512;
  static constexpr uint64_t kRecordsBytes = (collective::kMostRanks + 1) * kRecordBytes;
  // In host: the flag that ends waiting kernels, tokens to write, those that came (swap_record.h), records.
  static constexpr uint64_t kRecordsAt = 4096;
  static constexpr uint64_t kHostBytes = kRecordsAt + kRecordsBytes;
};
// What another left, or new and empty. REQUIRES: the context is current. nullptr: no memory.
SwapMeans* take_swap_means(const CudaDriver& driver, uint64_t context, uint64_t staging_bytes);
// Nobody uses it any more, but for what its stream and events stand behind. REQUIRES: the context is current.
void leave_swap_means(const CudaDriver& driver, SwapMeans* means);
void forget_swap_means_in_child();

}  // namespace forkpoint
