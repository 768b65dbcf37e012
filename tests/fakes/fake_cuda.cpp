// A libcuda.so.1 on host memory, as far as the probe uses one: "kernels" run on a thread, some milliseconds later. Lets the
// probe's CUDA side be tested where there is no GPU. Contiguous tensors only, and no statistics but the word sum.
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "kernels/digest_launch.h"
#include "lib/digest_raw.h"
#include "tests/fakes/fake_cuda.h"

namespace {

using forkpoint::DigestFlat;

std::atomic<int> capture_state{0};
std::atomic<int> launch_error{0};
std::atomic<bool> stuck{false};
std::atomic<unsigned long long> context_id{1};
std::atomic<int> delay_us{2000};
thread_local CUcontext current = reinterpret_cast<CUcontext>(0x1000);

void put(uint64_t* words, int low, uint64_t value) {
  words[low] = static_cast<uint32_t>(value);
  words[low + 1] = value >> 32;
}

// As the kernels do; see DigestSlot.
void write(const forkpoint::DigestTarget& target, const forkpoint::RawDigest& raw) {
  uint64_t words[forkpoint::kWordCount] = {};
  put(words, forkpoint::kWordA, raw.digest.a);
  put(words, forkpoint::kWordB, raw.digest.b);
  words[forkpoint::kWordSum] = forkpoint::fold_word_sum(raw.word_sum);
  for (int i = 0; i < forkpoint::kSlotCells; ++i) {
    const uint64_t half = static_cast<uint32_t>(words[i / 2] >> (32 * (i % 2)));
    __atomic_store_n(&target.slot->cell[i], half | uint64_t{target.ticket} << 32, __ATOMIC_RELEASE);
  }
}

struct Device {
  std::mutex mutex;
  std::deque<DigestFlat> queue;
};
Device& device() {
  static Device* one = [] {
    auto* made = new Device;
    std::thread([made] {
      for (;;) {
        usleep(static_cast<useconds_t>(delay_us.load()));
        for (;;) {
          DigestFlat flat;
          {
            const std::lock_guard lock(made->mutex);
            if (made->queue.empty() || stuck) break;
            flat = made->queue.front();
            made->queue.pop_front();
          }
          forkpoint::RawDigest raw;
          forkpoint::add_contiguous(flat.data, flat.size_bytes, forkpoint::DType::raw, flat.first_byte, raw);
          write(flat.target, raw);
        }
      }
    }).detach();
    return made;
  }();
  return *one;
}

}  // namespace

extern "C" {

// The "device" works until the process is gone: no static object of this library may be destroyed before.
__attribute__((visibility("hidden"))) int __cxa_atexit(void (*)(void*), void*, void*) { return 0; }

#define FAKE __attribute__((visibility("default"))) CUresult

__attribute__((visibility("default"))) void fake_cuda_set_capture(int state) { capture_state = state; }
__attribute__((visibility("default"))) void fake_cuda_set_launch_error(int error) { launch_error = error; }
__attribute__((visibility("default"))) void fake_cuda_set_stuck(int now) { stuck = now != 0; }
__attribute__((visibility("default"))) void fake_cuda_reset() {
  const std::lock_guard lock(device().mutex);
  device().queue.clear();
  ++context_id;
}

FAKE cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
FAKE cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
FAKE cuDeviceGetName(char* name, int size, CUdevice) { return strncpy(name, "fake", static_cast<size_t>(size)), CUDA_SUCCESS; }
FAKE cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 4, CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxGetState(CUdevice, unsigned int*, int* active) { return *active = 1, CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = reinterpret_cast<CUcontext>(0x1000), CUDA_SUCCESS; }
FAKE cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
FAKE cuCtxPushCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
FAKE cuCtxPopCurrent(CUcontext* context) { return *context = current, current = reinterpret_cast<CUcontext>(0x1000), CUDA_SUCCESS; }
FAKE cuCtxGetDevice(CUdevice* number) { return *number = 0, CUDA_SUCCESS; }
FAKE cuCtxGetId(CUcontext, unsigned long long* id) { return *id = context_id, CUDA_SUCCESS; }
FAKE cuStreamGetCtx(CUstream, CUcontext* context) { return *context = reinterpret_cast<CUcontext>(0x1000), CUDA_SUCCESS; }
FAKE cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  if (capture_state == 2) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  *status = capture_state == 1 ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
FAKE cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
// Addresses below 1 MiB are not known, everything else is memory of the device.
FAKE cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  const bool known = address >= 1 << 20;
  for (unsigned int i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned int*>(values[i]) = known ? CU_MEMORYTYPE_DEVICE : 0; break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(values[i]) = known ? 0 : -2; break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned int*>(values[i]) = 0; break;
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(values[i]) = known ? address : 0; break;
      default: return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}
FAKE cuModuleLoadData(CUmodule* module, const void* image) {
  // What the probe embeds must be a fat binary.
  uint32_t magic = 0;
  memcpy(&magic, image, sizeof(magic));
  *module = reinterpret_cast<CUmodule>(0x2000);
  return magic == 0xBA55ED50 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
FAKE cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  for (int i = 0; i < forkpoint::kDigestKernelCount; ++i) {
    if (strcmp(name, forkpoint::kDigestKernelNames[i]) == 0) {
      *function = reinterpret_cast<CUfunction>(static_cast<uintptr_t>(i + 1));
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_NOT_FOUND;
}
FAKE cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
FAKE cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 32, CUDA_SUCCESS; }
FAKE cuMemHostRegister(void*, size_t, unsigned int) { return CUDA_SUCCESS; }
FAKE cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned int) {
  return *address = reinterpret_cast<CUdeviceptr>(memory), CUDA_SUCCESS;
}
FAKE cuMemAlloc(CUdeviceptr* address, size_t size) { return *address = reinterpret_cast<CUdeviceptr>(malloc(size)), CUDA_SUCCESS; }
FAKE cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream) {
  return memset(reinterpret_cast<void*>(address), value, size), CUDA_SUCCESS;
}
FAKE cuStreamCreate(CUstream* stream, unsigned int) { return *stream = reinterpret_cast<CUstream>(0x3000), CUDA_SUCCESS; }
FAKE cuEventCreate(CUevent* event, unsigned int) { return *event = reinterpret_cast<CUevent>(0x4000), CUDA_SUCCESS; }
FAKE cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
FAKE cuEventQuery(CUevent) {
  static std::atomic<int> asked{0};
  return ++asked < 3 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
FAKE cuStreamWaitEvent(CUstream, CUevent, unsigned int) { return CUDA_SUCCESS; }
FAKE cuLaunchKernel(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                    CUstream, void** parameters, void**) {
  if (launch_error != 0) return static_cast<CUresult>(launch_error.load());
  DigestFlat flat;
  memcpy(&flat, parameters[0], sizeof(flat));
  const std::lock_guard lock(device().mutex);
  device().queue.push_back(flat);
  return CUDA_SUCCESS;
}

}  // extern "C"
