// What the parts of `peer` share: two devices that reach each other's memory, and floats on one of them. The program
// knows nothing of forkpoint; peer_cases.py records it.
#pragma once

#include <functional>
#include <thread>

#include "launch_plain.h"

// A launch that a recording must show, with the sizes of the allocations that it was handed: of its own device, and of
// the other one, which are declared and not hashed.
inline void handed_peer(const char* kernel, std::vector<size_t> own, std::vector<size_t> other) {
  printf("peer %s", kernel);
  for (const size_t bytes : own) printf(" own:%zu", bytes);
  for (const size_t bytes : other) printf(" other:%zu", bytes);
  printf("\n");
}

// As `make`, on that device, which is current afterwards.
inline Floats make_on(int device, int count) {
  CHECK(cudaSetDevice(device));
  return make(count);
}

inline void reach_each_other() {
  for (const int device : {0, 1}) {
    int can = 0;
    CHECK(cudaDeviceCanAccessPeer(&can, device, 1 - device));
    if (!can) {
      fprintf(stderr, "skipped: device %d cannot reach the memory of device %d\n", device, 1 - device);
      exit(77);
    }
    CHECK(cudaSetDevice(device));
    const cudaError_t error = cudaDeviceEnablePeerAccess(1 - device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
    else CHECK(error);
  }
}

inline void wait_for_both() {
  for (const int device : {1, 0}) CHECK(cudaSetDevice(device)), CHECK(cudaDeviceSynchronize());
}

// A stream of each device.
struct Streams {
  cudaStream_t of[2] = {};
  Streams() {
    for (const int device : {0, 1}) {
      CHECK(cudaSetDevice(device));
      CHECK(cudaStreamCreateWithFlags(&of[device], cudaStreamNonBlocking));
    }
  }
};

__global__ void mark_step();
__global__ void peer_add(float* to, const float* from, int count);
__global__ void peer_scale(float* x, float by, int count);

// Memory of other kinds (peer_memory.cu).
void run_mapped();
void run_exported();
void run_pool_of_both();
void run_managed_by_both();
int run_opener(const char* handle, int device);  // the other process of run_exported
