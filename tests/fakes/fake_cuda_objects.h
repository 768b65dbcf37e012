// The objects behind the handles of the fake libcuda, and what its parts share.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/fakes/fake_cuda.h"
#include "tests/fakes/fake_cuda_engine.h"

namespace forkpoint::fake {

// Guards all objects but streams' queues; never held while work is done.
std::mutex& objects();

// The capture of one stream and of those that joined it through events.
struct Capture {
  uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  CUstream origin = nullptr;
  CUgraph graph = nullptr;
  bool invalid = false;
  bool ended = false;
};

struct KernelDefinition {
  std::string name;
  FakeKernel kernel = nullptr;
  void* user = nullptr;
  std::vector<FakeKernelParam> params;
  size_t param_bytes() const { return params.empty() ? 0 : params.back().offset + params.back().size_bytes; }
};

// A null handle is the legacy default stream, or with per_thread the thread's. nullptr: there is no such stream.
CUstream find_stream(CUstream handle, bool per_thread);
bool is_legacy(CUstream stream);
// All but the legacy default stream. REQUIRES: objects() is held.
std::vector<CUstream> all_streams();
// Enqueues on a stream, or makes a node of it where the stream is captured. stream: of find_stream.
CUresult submit(CUstream stream, CUgraphNodeType type, Work work);
// The calls below are made before something that cannot be done while a stream is captured.
CUresult before_unsafe_call();
CUresult before_legacy_use(CUstream stream);
bool is_captured(CUstream stream);
void forget_captures();
CUresult wait_for_stream(CUstream stream);
// REQUIRES: objects() is held; the stream, or the event, is of a capture.
void abandon_capture(CUstream stream);
CUresult join_capture(CUstream stream, const CUevent_st& event);

CUcontext primary_context();
int multiprocessors();
bool is_for_this_rank(const char* variable);  // does it name RANK?
bool fails_here(const char* call, size_t size_bytes = 0);  // FAKE_CUDA_FAILS (fake_cuda_collective.cpp)
void stall_at(const char* kernel);                         // FAKE_CUDA_STALL (likewise)
unsigned long long context_number();
CUresult forced_launch_error(const char* kernel);
CUresult forced_failure();
int forced_capture();

// As the driver does it: kernels of both forms of handle.
struct LaunchShape {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
};
const char* kernel_name(CUfunction function);
// What the launch does, with a copy of its parameters.
CUresult make_launch(CUfunction function, const LaunchShape& shape, void** params, void** extra, Work* work);

}  // namespace forkpoint::fake

struct CUctx_st {
  int device;
};

struct CUstream_st {
  std::shared_ptr<forkpoint::fake::Queue> queue;
  unsigned int flags = 0;
  uint64_t id = 0;
  std::shared_ptr<forkpoint::fake::Capture> capture;
  std::vector<CUgraphNode> captured;  // what the next captured operation comes after
};

struct CUevent_st {
  bool recorded = false;
  forkpoint::fake::Point point;
  std::shared_ptr<forkpoint::fake::Capture> capture;
  std::vector<CUgraphNode> captured;
};

struct CUgraphNode_st {
  CUgraphNodeType type;
  forkpoint::fake::Work work;
  std::vector<CUgraphNode> after;
};

struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;  // in an order in which they may be done
  std::vector<CUevent> waits, records;                 // events outside, of which its nodes wait for or record
};

struct CUgraphExec_st {
  std::shared_ptr<const std::vector<forkpoint::fake::Work>> steps;
  std::vector<CUevent> waits, records;
};
