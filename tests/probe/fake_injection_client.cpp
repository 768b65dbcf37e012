// Says how often the injected library was called: fake_injection_client LIBCUDA INJECTED.
#include <dlfcn.h>

#include <cstdio>

#include "tests/probe/fake_gpu_program.h"

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  const forkpoint::fake_gpu::Gpu gpu(argv[1]);
  GPU_OK(gpu.driver().cuInit_(0));
  void* injected = dlopen(argv[2], RTLD_NOW | RTLD_NOLOAD);
  const auto* calls = injected ? static_cast<const int*>(dlsym(injected, "fake_injection_calls")) : nullptr;
  if (!calls) return 97;
  std::printf("%d\n", *calls);
  return 0;
}
