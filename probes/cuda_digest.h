// Digests of tensors on CUDA devices, through a libcuda that is found in the process and never linked. The kernels are
// enqueued on the caller's stream; results arrive in memory of ours that the device can write, so that the writer thread
// can wait for them without a CUDA call, and that stays mapped when the context goes.
#pragma once

#include <cstdint>

#include "lib/digest.h"
#include "probes/guard.h"
#include "probes/losses.h"

struct CUctx_st;

namespace forkpoint {

class CudaContext;
class DeviceSlot;

struct DeviceTensor {
  const void* data = nullptr;  // of element (0, 0, ...)
  TensorView view;             // REQUIRES: has elements
  // Bytes of the lowest and behind the highest element, from data.
  int64_t lowest_offset = 0;
  int64_t end_offset = 0;
  void* stream = nullptr;
  int owned_on = -1;  // number of the device on which a framework says that it lies; -1: the driver is asked. Whether it is mapped is asked always
};

struct DeviceOutcome {
  enum class Kind : uint8_t { enqueued, captured, lost };
  Kind kind = Kind::lost;
  DeviceSlot* slot = nullptr;  // enqueued
  Loss loss = Loss::internal;  // lost
  int error = 0;               // CUresult behind the loss; 0: none
};
// Any thread; returns once the kernel is enqueued. The first call in a context loads the kernels into it and allocates
// `slots` results (the same number in every call). captured: the stream is being captured, nothing was enqueued.
DeviceOutcome enqueue_device_digest(const Token& token, const DeviceTensor& tensor, uint32_t slots);

// The same of several tensors that lie on one stream, in as few launches as can be: outcomes[i] is of *tensors[i].
void enqueue_device_digests(const Token& token, const DeviceTensor* const* tensors, size_t count, uint32_t slots,
                            DeviceOutcome* outcomes);

// The probe's part of `context`, which is current; nullptr: it could not be made. error: CUresult behind it.
CudaContext* make_digest_context(const Token& token, CUctx_st* context, uint32_t slots, int* error);

// Writer thread. gone: the context failed or was destroyed, and the result will not come.
enum class DevicePoll : uint8_t { pending, ready, gone };
DevicePoll poll_device_slot(const DeviceSlot& slot, DigestResult* result);
// finished: poll said ready. A slot that is not finished is never used again: its kernel may still write it.
void release_device_slot(DeviceSlot& slot, bool finished);

// Name of the current context's device and the driver's version, where there are any. false: this process uses no CUDA.
bool describe_device(const Token& token, char* device, size_t device_bytes, char* driver, size_t driver_bytes);

// In the child of a fork: CUDA contexts do not come along.
void forget_devices_in_child();

}  // namespace forkpoint
