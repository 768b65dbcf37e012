// A program that wants CUDA, as a runtime does: loads the driver's library, asks for its version and starts it. Prints what
// it found; status 3 where there is no usable driver.
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!driver) return puts("no driver"), 3;
  int (*get_version)(int*) = (int (*)(int*))dlsym(driver, "cuDriverGetVersion");
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
  int version = 0;
  const int asked = get_version ? get_version(&version) : -1;
  const int started = init ? init(0) : -1;
  printf("version %d (%d), cuInit %d\n", version, asked, started);
  return started == 0 && version >= 12000 ? 0 : 3;
}
