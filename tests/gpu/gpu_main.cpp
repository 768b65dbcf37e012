// As doctest's own main, but skipped (status 77) where there is no device: never passed without having looked.
#include <cuda_runtime_api.h>

#include <cstdio>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("skipped: needs a CUDA device (%s)\n", error != cudaSuccess ? cudaGetErrorString(error) : "none found");
    return 77;
  }
  doctest::Context context(argc, argv);
  return context.run();
}
