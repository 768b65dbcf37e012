// Switches of the fake libcuda, found with dlsym, and how test programs give it kernels. The library needs no GPU: its
// device memory is memory of the process, so that what a kernel is handed can be read and written directly.
//
// The same can be chosen for programs that nobody can edit, by environment variables read when the library is first
// used:
//   FAKE_CUDA_MODE=at_once|deferred|slow   FAKE_CUDA_ORDER=needed|submission   FAKE_CUDA_GARBAGE=SEED
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// When work on streams is done.
enum FakeCudaMode {
  kFakeAtOnce = 0,    // before the call that enqueues it returns (default)
  kFakeDeferred = 1,  // when somebody waits for it, or fake_cuda_run says so
  kFakeSlow = 2,      // by a thread, some milliseconds later
};
void fake_cuda_set_mode(int mode);

// Of deferred work, while somebody waits for a part of it.
enum FakeCudaOrder {
  kFakeNeeded = 0,  // nothing but what that part depends on (default): where a wait is missing, its work comes too late
  kFakeSubmission = 1,  // everything in the order of the calls: a missing wait does not show
};
void fake_cuda_set_order(int order);
// Deferred: does the next `count` operations of a stream, and what they depend on. Returns how many of them there were.
unsigned int fake_cuda_run(void* stream, unsigned int count);
unsigned int fake_cuda_pending(void* stream);
// Deferred: does all that is left, and from now on everything at once, as a device does it whether anybody waits or
// not. A program on the fake ends with this.
void fake_cuda_finish();

void fake_cuda_set_stuck(int stuck);  // nothing finishes any more
void fake_cuda_reset();               // the context is destroyed, and made again under the same address

// Of cuStreamIsCapturing and cuStreamGetCaptureInfo, whatever is really captured. 0: nothing special; 1: the stream is
// captured; 2: another one is that forbids the default stream.
void fake_cuda_set_capture(int state);
void fake_cuda_set_launch_error(int error);  // what every launch returns; 0: they succeed
// The same for launches of one kernel only (nullptr: of none).
void fake_cuda_set_kernel_error(const char* kernel, int error);
// So many in a thousand launches and allocations of device memory give the error, whoever makes them.
void fake_cuda_set_failures(unsigned int per_thousand, int error);

// Memory of the process counts as device memory from now on.
void fake_cuda_adopt(const void* memory, size_t size_bytes);
// Fresh device memory holds bytes that depend on the seed and on nothing else; 0: what was there, zeros at first.
void fake_cuda_set_garbage(uint64_t seed);

// ---- Kernels of test programs.
struct FakeKernelCall {
  const unsigned char* params;  // the parameter block
  size_t param_bytes;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
};
struct FakeKernelParam {
  size_t offset;
  size_t size_bytes;
};
typedef void (*FakeKernel)(const FakeKernelCall* call, void* user);
// Modules and libraries that are loaded from an image which begins with kFakeImage hold every kernel defined so far.
inline constexpr char kFakeImage[] = "FAKE CUDA IMAGE";
void fake_cuda_define_kernel(const char* name, FakeKernel kernel, void* user, const FakeKernelParam* params,
                             size_t count);
// A __device__ variable of these modules.
void fake_cuda_define_global(const char* name, size_t size_bytes);

// ---- For the fake CUPTI: told at the begin and the end of each call.
struct FakeCudaCall {
  uint32_t cbid;
  const char* name;
  const void* params;  // of generated_cuda_meta.h
  const char* symbol;  // of launches: the kernel's name
  void* context;
  uint32_t context_uid;
  uint32_t correlation_id;
  uint64_t correlation_data;
  int* result;  // at the end
};
typedef void (*FakeCudaTracer)(FakeCudaCall* call, int at_end);
void fake_cuda_set_tracer(FakeCudaTracer tracer);
}
