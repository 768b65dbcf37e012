// Several ranks of the deterministic collectives in one process: on one GPU, or over all that reach each other.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/collective_fatbin.h"
#include "kernels/deterministic_collective.h"

namespace forkpoint::collective {

inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define MUST(call) ::forkpoint::collective::must(call, #call)

// The kernels, loaded on every device in use before anything runs: a kernel that is loaded when it is first launched
// may wait for the device, where a peer waits for it.
class Kernels {
 public:
  explicit Kernels(int devices) {
    MUST(cudaLibraryLoadData(&library_, forkpoint_collective_fatbin_data, nullptr, nullptr, 0, nullptr, nullptr, 0));
    for (int i = 0; i < kCollectiveKernelCount; ++i) {
      MUST(cudaLibraryGetKernel(&kernel_[i], library_, kCollectiveKernelNames[i]));
      for (int device = 0; device < devices; ++device) {
        cudaFuncAttributes attributes;
        MUST(cudaSetDevice(device));
        MUST(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_[i])));
      }
    }
  }
  void launch(CollectiveLaunch& launch, cudaStream_t stream) const {
    if (launch.grid == 0) return;
    MUST(cudaLaunchKernel(reinterpret_cast<const void*>(kernel_[launch.kernel]), dim3(launch.grid), dim3(launch.block),
                          launch.arguments(), 0, stream));
  }

 private:
  cudaLibrary_t library_ = nullptr;
  cudaKernel_t kernel_[kCollectiveKernelCount] = {};
};

// How many devices from 0 on reach each other's memory; they are made to.
inline int connect_devices() {
  int count = 0;
  MUST(cudaGetDeviceCount(&count));
  int connected = 1;
  for (; connected < count; ++connected) {
    for (int other = 0; other < connected; ++other) {
      int there = 0, back = 0;
      MUST(cudaDeviceCanAccessPeer(&there, connected, other));
      MUST(cudaDeviceCanAccessPeer(&back, other, connected));
      if (!there || !back) return connected;
    }
    for (int other = 0; other < connected; ++other) {
      for (const auto& [from, to] : {std::pair{connected, other}, std::pair{other, connected}}) {
        MUST(cudaSetDevice(from));
        const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled)
          (void)cudaGetLastError();
        else
          MUST(error);
      }
    }
  }
  return connected;
}

class Ranks {
 public:
  Ranks(const Kernels& kernels, StagingShape shape, int devices, CollectiveTuning tuning = {})
      : kernels_(kernels), shape_(shape), devices_(devices), tuning_(tuning) {
    MUST(cudaHostAlloc(&abort_, sizeof(*abort_), cudaHostAllocMapped | cudaHostAllocPortable));
    *abort_ = 0;
    for (uint32_t rank = 0; rank < shape.ranks; ++rank) {
      use(rank);
      staging_.push_back(nullptr);
      streams_.push_back(nullptr);
      MUST(cudaMalloc(&staging_.back(), shape.total_bytes()));
      MUST(cudaMemset(staging_.back(), 0, shape.total_bytes()));
      MUST(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking));
      MUST(cudaDeviceSynchronize());
    }
  }
  ~Ranks() {
    for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      use(rank);
      MUST(cudaStreamDestroy(streams_[rank]));
      MUST(cudaFree(staging_[rank]));
    }
    MUST(cudaFreeHost(abort_));
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  uint32_t count() const { return shape_.ranks; }
  void use(uint32_t rank) const { MUST(cudaSetDevice(static_cast<int>(rank) % devices_)); }
  cudaStream_t stream(uint32_t rank) const { return streams_[rank]; }
  void tune(const CollectiveTuning& tuning) { tuning_ = tuning; }

  void call(const CollectiveSpec& spec, uint32_t rank, const void* in, void* out) const {
    CollectiveLaunch launch;
    if (!plan_collective(spec, {shape_, rank, staging_.data(), abort_, in, out}, &launch, tuning_)) std::abort();
    use(rank);
    kernels_.launch(launch, streams_[rank]);
  }
  // false: not within the time; then the kernels were told to end, and these ranks are of no more use.
  bool finish(int seconds = 20) const {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      use(rank);
      for (;;) {
        const cudaError_t state = cudaStreamQuery(streams_[rank]);
        if (state == cudaSuccess) break;
        if (state != cudaErrorNotReady) MUST(state);
        if (std::chrono::steady_clock::now() > give_up) {
          abort();
          MUST(cudaStreamSynchronize(streams_[rank]));
          break;
        }
        std::this_thread::yield();
      }
    }
    return !*abort_;
  }
  void abort() const { *reinterpret_cast<volatile uint32_t*>(abort_) = 1; }

 private:
  const Kernels& kernels_;
  StagingShape shape_;
  int devices_;
  CollectiveTuning tuning_;
  std::vector<void*> staging_;
  std::vector<cudaStream_t> streams_;
  uint32_t* abort_ = nullptr;
};

}  // namespace forkpoint::collective
