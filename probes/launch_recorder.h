// Turns the host's CUDA calls, as the hooks see them, into rows of the launch level: finds the buffers that a launch was
// handed, has their digests taken on its stream, and hands the row to the recorder. Any thread; never throws; the caller's
// context is current.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "lib/launch.h"
#include "probes/cuda_driver.h"
#include "probes/guard.h"
#include "probes/settings.h"

namespace forkpoint {

class CudaContext;
struct LaunchPacket;

// Where a call works.
struct CallPlace {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  bool per_thread = false;  // a null stream is the thread's own
  uint32_t correlation = 0;  // of the call
};

struct KernelCall {
  CUfunction function = nullptr;
  uint32_t grid[3] = {0, 0, 0};
  uint32_t block[3] = {0, 0, 0};
  uint32_t shared_bytes = 0;
  void** params = nullptr;
  void** extra = nullptr;
  const CUlaunchConfig* config = nullptr;  // of cuLaunchKernelEx
  bool cooperative = false;
};

struct CopyCall {
  const char* name = "";
  uint64_t target = 0, source = 0;  // addresses; of host memory too
  uint64_t bytes = 0;
  uint64_t target_pitch = 0, source_pitch = 0, rows = 1;  // of two-dimensional ones: bytes is of one row
  bool returns_done = false;        // the host waits for it
};

struct SetCall {
  const char* name = "";
  uint64_t target = 0;
  uint64_t bytes = 0;               // of one row
  uint64_t pitch = 0, rows = 1;
  uint32_t pattern = 0;
  uint32_t pattern_bytes = 1;
  bool returns_done = false;
};

class LaunchRecorder {
 public:
  void set_up(const Settings* settings) { settings_ = settings; }
  const Settings& settings() const { return *settings_; }

  // Around the real call: `before` only where it has something to do (needs_before).
  bool needs_before() const { return settings_->inputs || settings_->retry > 0 || settings_->save.is_launch; }
  void before_kernel(const Token& token, const CallPlace& place, const KernelCall& call);
  void after_kernel(const Token& token, const CallPlace& place, const KernelCall& call, bool succeeded);
  // What is read is digested before the copy: once a copy that the host waits for has returned, the source may change at
  // any moment, on a stream that nothing orders behind ours.
  void before_copy(const Token& token, const CallPlace& place, const CopyCall& call);
  void after_copy(const Token& token, const CallPlace& place, const CopyCall& call, bool succeeded);
  void after_set(const Token& token, const CallPlace& place, const SetCall& call);
  // wanted: it gives rows; else what its nodes' digests gave is thrown away.
  void after_graph_launch(const Token& token, const CallPlace& place, CUgraphExec executable, bool wanted);
  void before_graph_launch(const Token& token, const CallPlace& place);
  // In whose context the digests of the capture may be fetched at its end; nullptr: in none.
  CudaContext* before_capture(const Token& token, const CallPlace& place);
  // The stream is the one that began the capture, so all that is in it comes before what is captured here.
  void before_capture_ends(const Token& token, const CallPlace& place, uint64_t capture_id);
  // Rows without buffers: waits, events, allocations.
  void note(const Token& token, const CallPlace& place, LaunchKind kind, uint64_t object, uint64_t bytes = 0);
  void note_everywhere(const Token& token, LaunchKind kind, uint64_t object, uint64_t bytes = 0);

  // For a record of device memory: a row that says where it lies; nullptr: there is none.
  LaunchPacket* record_row(const Token& token, const CallPlace& place, const void* data, uint64_t bytes);
  // In the child of a fork.
  void after_fork_in_child();

 private:
  const Settings* settings_ = nullptr;
};
extern LaunchRecorder launch_recorder;

}  // namespace forkpoint
