// Two GPUs in one process that use each other's memory, in every way that CUDA has.
// Usage: peer [PART...] (default: all but the planted ones)
//        planted_read, planted_copy: memory of the other device gets a value that no two runs share
#include "peer.h"

// Begins the step that is recorded.
__global__ void mark_step() {}

__global__ void peer_add(float* to, const float* from, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] += from[i];
}
__global__ void peer_scale(float* x, float by, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] *= by;
}

// Leaves a value in x[5] that no two runs share; the parameters are the same in each.
__global__ void plant_time(float* x) {
  unsigned long long nanoseconds = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  x[5] = static_cast<float>((nanoseconds >> 10) % 8000000);
}

namespace {

// Device 0 reads and writes device 1's memory.
void run_kernels() {
  const Floats near = make_on(0, 2048), far = make_on(1, 3072);
  wait_for_both();
  peer_add<<<blocks_for(near.count), kThreads>>>(near.data, far.data, near.count);
  handed_peer("peer_add", {near.bytes()}, {far.bytes()});
  peer_add<<<blocks_for(near.count), kThreads>>>(far.data, near.data, near.count);
  handed_peer("peer_add", {near.bytes()}, {far.bytes()});
  peer_scale<<<blocks_for(far.count), kThreads>>>(far.data, 0.5f, far.count);
  handed_peer("peer_scale", {}, {far.bytes()});
  wait_for_both();
  CHECK(cudaSetDevice(1));
  peer_scale<<<blocks_for(far.count), kThreads>>>(far.data, 4.0f, far.count);
  handed_peer("peer_scale", {far.bytes()}, {});
  wait_for_both();
}

void run_copies() {
  const Streams streams;
  const Floats near = make_on(0, 4096), far = make_on(1, 4096), back = make_on(0, 4096);
  CHECK(cudaMemset(back.data, 0, back.bytes()));
  wait_for_both();
  CHECK(cudaMemcpyPeerAsync(far.data, 1, near.data, 0, near.bytes() / 2, streams.of[0]));
  CHECK(cudaStreamSynchronize(streams.of[0]));
  CHECK(cudaSetDevice(1));
  CHECK(cudaMemcpyPeerAsync(back.data, 0, far.data, 1, far.bytes(), streams.of[1]));
  CHECK(cudaStreamSynchronize(streams.of[1]));
  CHECK(cudaMemcpyPeer(far.data + 100, 1, back.data, 0, 400));
  CHECK(cudaMemcpy(far.data, near.data, 1000, cudaMemcpyDefault));
  CHECK(cudaMemcpyAsync(near.data + 1000, far.data, 1000, cudaMemcpyDeviceToDevice, streams.of[1]));
  wait_for_both();
}

// Both devices from one thread, each waiting for what the other has done.
void run_one_thread() {
  const Streams streams;
  const Floats x[] = {make_on(0, 5000), make_on(1, 5000)};
  cudaEvent_t done[2];
  for (const int device : {0, 1}) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaEventCreateWithFlags(&done[device], cudaEventDisableTiming));
  }
  wait_for_both();
  for (int round = 0; round < 6; ++round) {
    const int device = round % 2, other = 1 - device;
    CHECK(cudaSetDevice(device));
    if (round > 0) CHECK(cudaStreamWaitEvent(streams.of[device], done[other], 0));
    peer_add<<<blocks_for(x[0].count), kThreads, 0, streams.of[device]>>>(x[device].data, x[other].data, x[0].count);
    handed_peer("peer_add", {x[device].bytes()}, {x[other].bytes()});
    peer_scale<<<blocks_for(x[0].count), kThreads, 0, streams.of[device]>>>(x[device].data, 0.5f, x[0].count);
    handed_peer("peer_scale", {x[device].bytes()}, {});
    CHECK(cudaEventRecord(done[device], streams.of[device]));
  }
  wait_for_both();
}

void run_two_threads() {
  const Streams streams;
  const Floats x[] = {make_on(0, 6000), make_on(1, 6000)}, y[] = {make_on(0, 6000), make_on(1, 6000)};
  wait_for_both();
  for (const int device : {0, 1}) {  // who comes first on its stream is settled before the threads start
    CHECK(cudaSetDevice(device));
    peer_scale<<<blocks_for(x[0].count), kThreads, 0, streams.of[device]>>>(x[device].data, 2.0f, x[0].count);
  }
  std::vector<std::thread> threads;
  for (const int device : {0, 1}) {
    threads.emplace_back([&, device] {
      CHECK(cudaSetDevice(device));
      for (int round = 0; round < 50; ++round) {
        peer_add<<<blocks_for(x[0].count), kThreads, 0, streams.of[device]>>>(y[device].data, x[device].data,
                                                                              y[0].count);
        peer_scale<<<blocks_for(x[0].count), kThreads, 0, streams.of[device]>>>(y[device].data, 0.5f, y[0].count);
      }
      CHECK(cudaStreamSynchronize(streams.of[device]));
    });
  }
  for (std::thread& thread : threads) thread.join();
  wait_for_both();
}

// Written by device 0; read by device 1, on whose own stream it is copied to the host.
void run_planted_read() {
  const Floats far = make_on(1, 7000), seen = make_on(1, 7000);
  wait_for_both();
  plant_time<<<1, 1>>>(far.data);
  wait_for_both();
  CHECK(cudaSetDevice(1));
  peer_add<<<blocks_for(far.count), kThreads>>>(seen.data, far.data, far.count);
  std::vector<float> host(seen.count);
  CHECK(cudaMemcpy(host.data(), seen.data, seen.bytes(), cudaMemcpyDeviceToHost));
  add_to_checksum(host.data(), seen.bytes());
  CHECK(cudaSetDevice(0));
}

// Written by device 0; nothing looks at it but a copy to the host while device 0 is current.
void run_planted_copy() {
  const Floats far = make_on(1, 8000);
  wait_for_both();
  plant_time<<<1, 1>>>(far.data);
  wait_for_both();
  std::vector<float> host(far.count);
  CHECK(cudaMemcpy(host.data(), far.data, far.bytes(), cudaMemcpyDeviceToHost));
  add_to_checksum(host.data(), far.bytes());
  all_floats.pop_back();  // not looked at again
}

constexpr Part kParts[] = {{"kernels", run_kernels},       {"copies", run_copies},
                           {"one_thread", run_one_thread}, {"two_threads", run_two_threads},
                           {"mapped", run_mapped},         {"exported", run_exported},
                           {"pool", run_pool_of_both},     {"managed", run_managed_by_both}};
constexpr Part kPlanted[] = {{"planted_read", run_planted_read}, {"planted_copy", run_planted_copy}};

}  // namespace

int main(int count, char** words) {
  if (count == 4 && strcmp(words[1], "opener") == 0) return run_opener(words[2], atoi(words[3]));
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  if (devices < 2) {
    fprintf(stderr, "skipped: needs 2 GPUs, found %d\n", devices);
    return 77;
  }
  reach_each_other();
  CHECK(cudaSetDevice(0));
  mark_step<<<1, 1>>>();
  const bool planted = count == 2 && strncmp(words[1], "planted", 7) == 0;
  return planted ? run_parts(kPlanted, count, words) : run_parts(kParts, count, words);
}
