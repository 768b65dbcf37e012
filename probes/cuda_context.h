// What the probe has in one CUDA context: the kernels, and a pool of places for results. Never freed: a context that goes
// takes its device memory along; the results lie in memory of ours that stays.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/digest_launch.h"
#include "probes/cuda_driver.h"
#include "probes/cuda_digest.h"
#include "probes/graph_results.h"

namespace forkpoint {

class CudaContext;

// One result on its way. Owned by the thread that took it, then by the writer thread.
class DeviceSlot {
 public:
  CudaContext* context = nullptr;
  const DigestSlot* result = nullptr;
  DType dtype = DType::raw;
  uint32_t ticket = 0;
  std::atomic<uint32_t> busy{0};
};

class CudaContext {
 public:
  // The probe's part of `context`, which must be current; made by the first thread that asks, while others wait (bounded).
  // nullptr: it could not be made; *error says why.
  static CudaContext* of_current(const CudaDriver& driver, CUcontext context, uint32_t slots, int* error);
  static void forget_all_in_child();
  // The same without making it: nullptr where there is none (yet).
  static CudaContext* find(const CudaDriver& driver, CUcontext context);
  // A call in `context` gave an error from which it does not recover.
  static void failed(CUcontext context);
  // Writer thread: takes what captured digests of any context have given, so that the device finds room for more.
  static void drain_graph_results();

  // nullptr: all are on their way.
  DeviceSlot* take_slot();
  DigestTarget target(const DeviceSlot& slot) const;
  GraphResults& graph_results() { return graph_results_; }
  bool take_node(uint32_t* node, DigestTarget* target) { return graph_results_.take_node(node, target); }
  CUfunction kernel(int number) const { return kernels_[number]; }
  int multiprocessors() const { return multiprocessors_; }
  // Has work on `stream` wait until the scratch memory is zeroed, if it is not yet.
  CUresult order_after_setup(const CudaDriver& driver, CUstream stream);

  // The context failed or was destroyed, and long enough ago that what it had finished has arrived.
  bool gone() const;
  // After an error from which a context does not recover.
  void mark_gone();

 private:
  enum class State : uint32_t { building, ready, failed };

  static uint64_t id_of(const CudaDriver& driver, CUcontext context);
  CUresult build(const CudaDriver& driver, uint32_t slots);
  CUresult load_kernels(const CudaDriver& driver);
  CUresult make_slots(const CudaDriver& driver, uint32_t slots);
  CUresult zero_scratch(const CudaDriver& driver);
  CudaContext* once_built(int* error);

  CUcontext context_ = nullptr;
  uint64_t id_ = 0;
  CudaContext* next_ = nullptr;
  std::atomic<uint32_t> state_{0};  // enum State; futex
  std::atomic<int> error_{0};
  std::atomic<int64_t> gone_since_ns_{0};  // 0: it is there
  std::atomic<bool> scratch_zeroed_{false};
  CUevent setup_done_ = nullptr;
  CUfunction kernels_[kDigestKernelCount] = {};
  int multiprocessors_ = 0;
  uint32_t slot_count_ = 0;  // a power of two
  DeviceSlot* slots_ = nullptr;
  DigestSlot* results_ = nullptr;       // host
  CUdeviceptr device_results_ = 0;      // the same memory as the device sees it
  CUdeviceptr scratch_ = 0;
  std::atomic<uint32_t> next_slot_{0};
  GraphResults graph_results_;
};

}  // namespace forkpoint
