// What launch_plain and launch_plain_graphs have in common: memory that goes into a checksum, and what they say about
// each launch. Both are CUDA programs that know nothing of forkpoint; launch_plain.sh records them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  exit(1);
}
#define CHECK(call) check((call), #call)

inline constexpr int kThreads = 128;
inline int blocks_for(int count) { return (count + kThreads - 1) / kThreads; }

inline uint64_t checksum = 14695981039346656037ull;

inline void add_to_checksum(const void* data, size_t bytes) {
  const auto* byte = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) checksum = (checksum ^ byte[i]) * 1099511628211ull;  // FNV-1a
}

// A launch that a recording must show, with the sizes of the allocations that the kernel was handed.
inline void handed(const char* kernel, std::vector<size_t> sizes) {
  printf("handed %s", kernel);
  for (const size_t bytes : sizes) printf(" %zu", bytes);
  printf("\n");
}
// One that it cannot show: a coverage limit must say so.
inline void unseen(const char* kernel) { printf("unseen %s\n", kernel); }

// Floats on the device. Never freed: the checksum is taken at the end.
struct Floats {
  float* data = nullptr;
  int count = 0;
  size_t bytes() const { return count * sizeof(float); }
};
inline std::vector<Floats> all_floats;

// Each with a value of its own.
inline std::vector<float> values(int count) {
  std::vector<float> host(count);
  for (int i = 0; i < count; ++i) host[i] = static_cast<float>(i % 1000) / 16;
  return host;
}

inline Floats fill(float* data, int count) {
  CHECK(cudaMemcpy(data, values(count).data(), count * sizeof(float), cudaMemcpyHostToDevice));
  all_floats.push_back({data, count});
  return all_floats.back();
}

inline Floats make(int count) {
  float* data = nullptr;
  CHECK(cudaMalloc(&data, count * sizeof(float)));
  return fill(data, count);
}

// A kernel with a name of its own, so that a recording can be asked for it.
#define ADDING_KERNEL(name)                              \
  __global__ void name(float* x, int count) {            \
    const int i = blockIdx.x * blockDim.x + threadIdx.x; \
    if (i < count) x[i] += 1;                            \
  }

struct Part {
  const char* name;
  void (*run)();
};

inline bool is_wanted(const Part& part, int count, char** names) {
  for (int i = 1; i < count; ++i) {
    if (strcmp(names[i], part.name) == 0) return true;
  }
  return count == 1;
}

// The parts that the command line names (none: all), and the checksum.
template <size_t kCount>
int run_parts(const Part (&parts)[kCount], int count, char** names) {
  for (const Part& part : parts) {
    if (!is_wanted(part, count, names)) continue;
    part.run();
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }
  for (const Floats& floats : all_floats) {
    std::vector<float> host(floats.count);
    CHECK(cudaMemcpy(host.data(), floats.data, floats.bytes(), cudaMemcpyDeviceToHost));
    add_to_checksum(host.data(), floats.bytes());
  }
  printf("checksum %016llx\n", static_cast<unsigned long long>(checksum));
  return 0;
}
