// Kernels of one communicator run one after another, on whatever streams, as NCCL's do. In one graph each comes behind
// the one before by an edge. The first of a graph waits for whatever was launched before the graph was, and each tells
// who is launched later: by an event that lies outside, so that it is so for each replay. One thread at a time; whether
// there was any, any thread may ask. REQUIRES: the communicator's context is current.
#pragma once

#include "probes/swap_means.h"

namespace forkpoint {

class SwapOrder {
 public:
  SwapOrder(const CudaDriver& driver) : driver_(driver) {}

  // Of a stream: a number of its capture; 0: it is not capturing.
  CUresult capture_of(CUstream stream, uint64_t* capture) const;
  // Around what is launched to `stream`.
  CUresult before(const SwapMeans& means, CUstream stream, uint64_t capture);
  CUresult behind(const SwapMeans& means, CUstream stream, uint64_t capture);

  bool any_launch() const { return any_launch_; }
  bool any_capture() const { return any_capture_; }  // graphs may hold some of them

 private:
  const CudaDriver& driver_;
  uint64_t capture_ = 0;
  std::atomic<bool> any_launch_{false}, any_capture_{false};
};

}  // namespace forkpoint
