// Kernel launches, through every entry point that takes one.
#include <cuda.h>

#include "probes/cupti_calls.h"
#include "probes/launch_functions.h"
#include "probes/launch_recorder.h"
#include "probes/nccl_hooks.h"
#include "probes/nvtx_ranges.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

CallPlace place_of(const DriverCall& call, CUstream stream) { return {call.context, stream_of(call, stream), call.per_thread, call.correlation}; }

// A range that matches and the kernel in it that matches too are one mark (XLA names a range after the kernel that it
// launches). Taken for two, the step between them would hold what other threads happen to do meanwhile.
void begin_step_if_marked(const Token& token, const KernelCall& kernel) {
  if (!has_step_mark() || inside_marked_range()) return;
  const CudaDriver* driver = find_cuda_driver(token);
  const KernelFacts* facts = driver ? kernel_facts(token, *driver, recorder.names(), kernel.function) : nullptr;
  if (!facts || !facts->begins_step) return;
  const RelaxedCapture relaxed(*driver);
  begin_marked_step(token);
}

void on_kernel(const Token& token, const DriverCall& call, CUstream stream, const KernelCall& kernel) {
  if (call.entry) begin_step_if_marked(token, kernel);
  if (!recorder.wants_launches()) return;
  const CallPlace place = place_of(call, stream);
  if (!call.entry) launch_recorder.after_kernel(token, place, kernel, call.succeeded());
  else if (launch_recorder.needs_before()) launch_recorder.before_kernel(token, place, kernel);
}

template <typename Params>
KernelCall kernel_of(const Params& params) {
  KernelCall kernel;
  kernel.function = params.f;
  kernel.grid[0] = params.gridDimX, kernel.grid[1] = params.gridDimY, kernel.grid[2] = params.gridDimZ;
  kernel.block[0] = params.blockDimX, kernel.block[1] = params.blockDimY, kernel.block[2] = params.blockDimZ;
  kernel.shared_bytes = params.sharedMemBytes;
  kernel.params = params.kernelParams;
  return kernel;
}

void on_launch(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuLaunchKernel_params*>(call.params);
  KernelCall kernel = kernel_of(params);
  kernel.extra = params.extra;
  on_kernel(token, call, params.hStream, kernel);
}

void on_cooperative(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuLaunchCooperativeKernel_params*>(call.params);
  KernelCall kernel = kernel_of(params);
  kernel.cooperative = true;
  on_kernel(token, call, params.hStream, kernel);
}

void on_launch_ex(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuLaunchKernelEx_params*>(call.params);
  if (!params.config) return;
  KernelCall kernel;
  kernel.function = params.f;
  const CUlaunchConfig& config = *params.config;
  kernel.grid[0] = config.gridDimX, kernel.grid[1] = config.gridDimY, kernel.grid[2] = config.gridDimZ;
  kernel.block[0] = config.blockDimX, kernel.block[1] = config.blockDimY, kernel.block[2] = config.blockDimZ;
  kernel.shared_bytes = config.sharedMemBytes;
  kernel.params = params.kernelParams;
  kernel.extra = params.extra;
  kernel.config = params.config;
  on_kernel(token, call, config.hStream, kernel);
}

// The old way, in which parameters were set one by one: seen, but not what it was handed.
void on_old_launch(const Token&, const DriverCall& call) {
  if (call.succeeded() && recorder.wants_launches()) recorder.limit(Limit::params);
}

void on_unload(const Token&, const DriverCall& call) {
  if (call.entry) forget_kernels();
}

constexpr CallEntry kCalls[] = {
    FORKPOINT_CALL_PTSZ(cuLaunchKernel, on_launch),
    FORKPOINT_CALL_PTSZ(cuLaunchCooperativeKernel, on_cooperative),
    FORKPOINT_CALL_PTSZ(cuLaunchKernelEx, on_launch_ex),
    FORKPOINT_CALL(cuLaunch, on_old_launch),
    FORKPOINT_CALL(cuLaunchGrid, on_old_launch),
    FORKPOINT_CALL(cuLaunchGridAsync, on_old_launch),
    FORKPOINT_CALL(cuLaunchCooperativeKernelMultiDevice, on_old_launch),
    FORKPOINT_CALL(cuModuleUnload, on_unload),
    FORKPOINT_CALL(cuLibraryUnload, on_unload),
};

}  // namespace

CallTable kernel_calls() { return {kCalls, sizeof(kCalls) / sizeof(kCalls[0])}; }

}  // namespace forkpoint
