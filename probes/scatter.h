// Launches the deterministic scatter kernels (kernels/scatter_launch.h) on a stream of the host's, through the driver
// that is found in the process. They do the host's own work, in place of a kernel of the framework's: so they are
// launched outside the guard, and recorded like any other launch.
#pragma once

#include "kernels/scatter_launch.h"

namespace forkpoint {

inline constexpr int kScatterTorn = 1 << 20;

struct ScatterCall {
  ScatterType type = ScatterType::float32;
  void* stream = nullptr;
  ScatterWork work{};  // but for what the planner fills
};
// Any thread; asynchronous, may be called while the stream is captured. The first call in a context loads the kernels
// into it. The context of a default stream is the current one. Returns a CUresult; -1: there is no CUDA driver in this
// process; kScatterTorn is added where some of the kernels were launched and others were not.
int launch_scatter(const ScatterCall& call);
// Loads the kernels into the current context, so that no first call does it during a capture. As launch_scatter.
int load_scatter();

}  // namespace forkpoint
