#include "probes/cuda_driver.h"

#include <dlfcn.h>
#include <sched.h>

#include <atomic>

namespace forkpoint {
namespace {

bool load(CudaDriver* driver) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return false;
  // Through two macros: cuda.h maps most names to versioned ones.
#define FORKPOINT_TEXT_OF(name) #name
#define FORKPOINT_TEXT(name) FORKPOINT_TEXT_OF(name)
#define FORKPOINT_FIND(function) \
  driver->function##_ = reinterpret_cast<decltype(&::function)>(dlsym(library, FORKPOINT_TEXT(function)));
  FORKPOINT_DRIVER_FUNCTIONS(FORKPOINT_FIND)
  FORKPOINT_DRIVER_OPTIONAL_FUNCTIONS(FORKPOINT_FIND)
#define FORKPOINT_THERE(function) &&driver->function##_ != nullptr
  return true FORKPOINT_DRIVER_FUNCTIONS(FORKPOINT_THERE);
}

constinit CudaDriver found_driver;
constinit std::atomic<const CudaDriver*> published{nullptr};

}  // namespace

const CudaDriver* find_cuda_driver(const Token&) {
  if (const CudaDriver* driver = published.load(std::memory_order_acquire)) return driver;
  CudaDriver driver;
  if (!load(&driver)) return nullptr;
  static constinit std::atomic<bool> writing{false};
  if (!writing.exchange(true)) {
    found_driver = driver;
    published.store(&found_driver, std::memory_order_release);
  }
  // Another thread may be writing: it needs some nanoseconds more.
  const CudaDriver* there = nullptr;
  while (!(there = published.load(std::memory_order_acquire))) sched_yield();
  return there;
}

}  // namespace forkpoint
