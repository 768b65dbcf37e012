// A libcuda.so.1 that is of no use: BAD_CUDA_VERSION is the version that it tells, BAD_CUDA_INIT what cuInit returns. As the
// real one, it calls the library that CUDA_INJECTION64_PATH names where cuInit succeeds. It has no other function.
#include <dlfcn.h>
#include <stdlib.h>

static int number(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text ? atoi(text) : otherwise;
}

__attribute__((visibility("default"))) int cuDriverGetVersion(int* version) {
  *version = number("BAD_CUDA_VERSION", 13000);
  return 0;
}

__attribute__((visibility("default"))) int cuInit(unsigned flags) {
  (void)flags;
  const int result = number("BAD_CUDA_INIT", 0);
  const char* path = getenv("CUDA_INJECTION64_PATH");
  void* tool = result == 0 && path ? dlopen(path, RTLD_NOW) : NULL;
  int (*begin)(void) = tool ? (int (*)(void))dlsym(tool, "InitializeInjection") : NULL;
  if (begin) begin();
  return result;
}
