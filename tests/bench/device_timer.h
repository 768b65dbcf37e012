// Times launches on a GPU in replays of captured graphs, so that the host's launch cost is not in it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace forkpoint {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "device_digest_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define OK(call) check(call, #call)

using Launch = std::function<void(int index, cudaStream_t)>;  // index: which repetition, to rotate buffers

class Timer {
 public:
  Timer() {
    OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    OK(cudaEventCreate(&begin_));
    OK(cudaEventCreate(&end_));
  }
  // Microseconds a launch, medians, of launches measured in turn.
  std::vector<double> medians(const std::vector<Launch>& launches, int repetitions, int samples = 15) {
    std::vector<cudaGraphExec_t> graphs;
    for (const Launch& launch : launches) graphs.push_back(capture(launch, repetitions));
    std::vector<std::vector<double>> times(launches.size());
    for (int sample = -2; sample < samples; ++sample) {
      for (size_t i = 0; i < graphs.size(); ++i) {
        OK(cudaEventRecord(begin_, stream_));
        OK(cudaGraphLaunch(graphs[i], stream_));
        OK(cudaEventRecord(end_, stream_));
        OK(cudaEventSynchronize(end_));
        float ms = 0;
        OK(cudaEventElapsedTime(&ms, begin_, end_));
        if (sample >= 0) times[i].push_back(1000.0 * ms / repetitions);
      }
    }
    std::vector<double> result;
    for (auto& all : times) {
      std::nth_element(all.begin(), all.begin() + all.size() / 2, all.end());
      result.push_back(all[all.size() / 2]);
    }
    for (cudaGraphExec_t graph : graphs) OK(cudaGraphExecDestroy(graph));
    return result;
  }

 private:
  cudaGraphExec_t capture(const Launch& launch, int repetitions) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < repetitions; ++i) launch(i, stream_);
    OK(cudaStreamEndCapture(stream_, &graph));
    OK(cudaGraphInstantiate(&executable, graph, 0));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(executable, stream_));
    OK(cudaStreamSynchronize(stream_));
    return executable;
  }
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

}  // namespace forkpoint
