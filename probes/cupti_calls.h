// What the hooks do with each driver call: a table from CUPTI's callback numbers to handlers. Internal to the CUPTI hooks.
#pragma once

#include <cupti.h>

#include <cstdint>

#include "probes/guard.h"

namespace forkpoint {

struct DriverCall {
  const void* params = nullptr;  // the call's own structure of generated_cuda_meta.h
  CUcontext context = nullptr;
  bool per_thread = false;       // a _ptsz or _ptds entry point
  bool entry = false;            // before the call; else after it
  CUresult result = CUDA_SUCCESS;
  const char* name = "";
  uint32_t correlation = 0;      // the same before the call and after it
  bool succeeded() const { return !entry && result == CUDA_SUCCESS; }
};

// A null stream of the _ptsz and _ptds entry points is the thread's own, and is asked and used as that.
inline CUstream stream_of(const DriverCall& call, CUstream stream) {
  return call.per_thread && !stream ? CU_STREAM_PER_THREAD : stream;
}

using CallHandler = void (*)(const Token& token, const DriverCall& call);

struct CallEntry {
  uint32_t number = 0;       // CUpti_driver_api_trace_cbid
  bool per_thread = false;
  CallHandler handler = nullptr;
};

// Each file of handlers gives a part of the table.
struct CallTable {
  const CallEntry* entries = nullptr;
  size_t count = 0;
};
CallTable kernel_calls();
CallTable memory_calls();
CallTable transfer_calls();
CallTable order_calls();
CallTable graph_calls();

#define FORKPOINT_CBID(function) CUPTI_DRIVER_TRACE_CBID_##function
#define FORKPOINT_CALL(function, handler) {FORKPOINT_CBID(function), false, handler}
#define FORKPOINT_CALL_PTSZ(function, handler) \
  {FORKPOINT_CBID(function), false, handler}, {FORKPOINT_CBID(function##_ptsz), true, handler}
#define FORKPOINT_CALL_PTDS(function, handler) \
  {FORKPOINT_CBID(function), false, handler}, {FORKPOINT_CBID(function##_ptds), true, handler}

}  // namespace forkpoint
