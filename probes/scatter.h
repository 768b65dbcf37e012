// Launches the deterministic scatter kernels (kernels/scatter_launch.h) on a stream of the host's, through the driver
// that is found in the process. They do the host's own work, in place of a kernel of the framework's: so they are
// launched outside the guard, and recorded like any other launch.
#pragma once

#include "kernels/scatter_launch.h"
#include "kernels/scatter_sort.h"

namespace forkpoint {

inline constexpr int kScatterTorn = 1 << 20;

struct ScatterCall {
  ScatterType type = ScatterType::float32;
  void* stream = nullptr;
  ScatterWork work{};  // but for what the planner fills
};
struct SortCall {
  void* stream = nullptr;
  SortWork work{};  // but for what the planner fills
};
// Any thread; asynchronous, may be called while the stream is captured. The first call in a context loads the kernels
// into it. The context of a default stream is the current one. Returns a CUresult; -1: there is no CUDA driver in this
// process; kScatterTorn is added where some of the kernels were launched and others were not.
int launch_scatter(const ScatterCall& call);
// Likewise; what has been launched has written scratch and results alone that are without meaning before the last.
int launch_sort(const SortCall& call);
// Rows that are named by an index: `call` is completed with scratch of lay_out_scratch() and the index' sorted keys.
int launch_scatter_by_index(const ScatterCall& call, const scatter::IndexView& index, void* scratch);
// Loads the kernels into the current context, so that no first call does it during a capture. As launch_scatter.
int load_scatter();

}  // namespace forkpoint
