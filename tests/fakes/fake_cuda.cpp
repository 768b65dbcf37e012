// A libcuda.so.1 on host memory, as far as the probe and the programs of its tests use one. Lets the probe's CUDA side
// be tested where there is no GPU. One device, one context.
#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels/digest_launch.h"
#include "tests/fakes/fake_cuda_memory.h"
#include "tests/fakes/fake_cuda_objects.h"
#include "tests/fakes/fake_cuda_trace.h"

namespace forkpoint::fake {
namespace {

std::atomic<int> capture_state{0};
std::atomic<int> launch_error{0};
std::atomic<int> kernel_error{0};
std::string failing_kernel;  // under objects()
std::atomic<unsigned> failures{0};  // in a thousand calls
std::atomic<int> failure_error{0};
std::atomic<uint64_t> calls_that_may_fail{0};
std::atomic<unsigned long long> context_id{1};
std::atomic<uint32_t> last_correlation{0};
std::atomic<FakeCudaTracer> tracer{nullptr};
CUctx_st primary{0};
thread_local CUcontext current = &primary;

// What the driver does for tools: CUDA_INJECTION64_PATH names a library whose InitializeInjection is called once.
void inject() {
  const char* path = getenv("CUDA_INJECTION64_PATH");
  if (!path || !*path) return;
  void* library = dlopen(path, RTLD_NOW);
  if (!library) return;
  if (auto* start = reinterpret_cast<int (*)()>(dlsym(library, "InitializeInjection"))) start();
}

}  // namespace

std::mutex& objects() {
  static auto* one = new std::mutex;
  return *one;
}

CUcontext primary_context() { return &primary; }
unsigned long long context_number() { return context_id; }
int forced_capture() { return capture_state; }

CUresult forced_failure() {
  const unsigned per_thousand = failures;
  if (per_thousand == 0) return CUDA_SUCCESS;
  const uint64_t mixed = ++calls_that_may_fail * 0x9E3779B97F4A7C15ull;
  return (mixed >> 32) % 1000 < per_thousand ? static_cast<CUresult>(failure_error.load()) : CUDA_SUCCESS;
}

CUresult forced_launch_error(const char* kernel) {
  if (const CUresult error = forced_failure(); error != CUDA_SUCCESS) return error;
  if (launch_error != 0) return static_cast<CUresult>(launch_error.load());
  const std::lock_guard lock(objects());
  return kernel && failing_kernel == kernel ? static_cast<CUresult>(kernel_error.load()) : CUDA_SUCCESS;
}

Traced::Traced(uint32_t cbid, const char* name, const void* params, const char* symbol) {
  call_.cbid = cbid;
  call_.name = name;
  call_.params = params;
  call_.symbol = symbol;
  call_.context = current;
  call_.context_uid = static_cast<uint32_t>(context_id.load());
  call_.correlation_id = ++last_correlation;
  if (const FakeCudaTracer tell = tracer.load()) tell(&call_, 0);
}

CUresult Traced::end(CUresult result) {
  int value = result;
  call_.result = &value;
  if (const FakeCudaTracer tell = tracer.load()) tell(&call_, 1);
  return result;
}

}  // namespace forkpoint::fake

using namespace forkpoint::fake;

extern "C" {

// The "device" works until the process is gone: no static object of this library may be destroyed before.
__attribute__((visibility("hidden"))) int __cxa_atexit(void (*)(void*), void*, void*) { return 0; }

#define SWITCH __attribute__((visibility("default")))

SWITCH void fake_cuda_set_mode(int mode) { Engine::get().set_mode(mode); }
SWITCH void fake_cuda_set_order(int order) { Engine::get().set_order(order); }
SWITCH void fake_cuda_set_stuck(int now) { Engine::get().set_stuck(now != 0); }
SWITCH unsigned int fake_cuda_run(void* stream, unsigned int count) {
  const CUstream known = find_stream(static_cast<CUstream>(stream), false);
  return known ? Engine::get().run_next(known->queue, count) : 0;
}
SWITCH unsigned int fake_cuda_pending(void* stream) {
  const CUstream known = find_stream(static_cast<CUstream>(stream), false);
  return known ? Engine::get().pending(known->queue) : 0;
}
SWITCH void fake_cuda_finish() { Engine::get().finish(); }
SWITCH void fake_cuda_reset() {
  Engine::get().forget_all();
  forget_captures();
  Memory::get().forget_device();
  ++context_id;
}
SWITCH void fake_cuda_set_capture(int state) { capture_state = state; }
SWITCH void fake_cuda_set_launch_error(int error) { launch_error = error; }
SWITCH void fake_cuda_set_kernel_error(const char* kernel, int error) {
  const std::lock_guard lock(objects());
  failing_kernel = kernel ? kernel : "";
  kernel_error = error;
}
SWITCH void fake_cuda_set_failures(unsigned int per_thousand, int error) {
  failure_error = error;
  failures = per_thousand;
}
SWITCH void fake_cuda_adopt(const void* memory, size_t size_bytes) {
  Memory::get().add(memory, size_bytes, MemoryKind::device);
}
SWITCH void fake_cuda_set_garbage(uint64_t seed) { Memory::get().set_garbage(seed); }
SWITCH void fake_cuda_set_tracer(FakeCudaTracer now) { tracer = now; }

}  // extern "C"

FAKE cuInit(unsigned int flags) {
  static std::once_flag once;
  std::call_once(once, inject);
  FAKE_TRACE(cuInit, flags);
  return traced.end(CUDA_SUCCESS);
}
FAKE cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
FAKE cuDeviceGetCount(int* count) { return *count = getenv("FAKE_CUDA_LINK") ? 2 : 1, CUDA_SUCCESS; }
FAKE cuDeviceGet(CUdevice* device, int ordinal) {
  return *device = 0, ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
FAKE cuDeviceGetName(char* name, int size, CUdevice) {
  return strncpy(name, "fake", static_cast<size_t>(size)), CUDA_SUCCESS;
}
FAKE cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = 4;
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) *value = multiprocessors();
  if (static_cast<int>(attribute) == 133) *value = is_for_this_rank("FAKE_CUDA_MPS");
  return CUDA_SUCCESS;
}
FAKE cuDeviceTotalMem_v2(size_t* size_bytes, CUdevice) { return *size_bytes = size_t{16} << 30, CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxGetState(CUdevice, unsigned int* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
FAKE cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = &primary, CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
FAKE cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
FAKE cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
FAKE cuCtxPushCurrent_v2(CUcontext context) { return current = context, CUDA_SUCCESS; }
FAKE cuCtxPopCurrent_v2(CUcontext* context) {
  if (context) *context = current;
  return current = &primary, CUDA_SUCCESS;
}
FAKE cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
FAKE cuCtxGetId(CUcontext, unsigned long long* id) { return *id = context_id, CUDA_SUCCESS; }
FAKE cuCtxSynchronize() {
  Traced traced(CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, "cuCtxSynchronize", nullptr);
  const CUresult refused = before_unsafe_call();
  if (refused == CUDA_SUCCESS) Engine::get().wait_for_all();
  return traced.end(refused);
}
