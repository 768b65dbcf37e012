// Capture, instantiation and replay of CUDA graphs.
#include <cuda.h>

#include "probes/cupti_calls.h"
#include "probes/graphs.h"
#include "probes/launch_recorder.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

// 0: the stream is not being captured; else one more than the capture's number.
uint64_t capture_on(const Token& token, CUstream stream) {
  const CudaDriver* driver = find_cuda_driver(token);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  if (!driver || !driver->cuStreamGetCaptureInfo_) return 0;
  const CUresult result = driver->cuStreamGetCaptureInfo_(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
  return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE ? id + 1 : 0;
}

// The capture that this thread is about to end: behind the call the stream no longer says which it was.
thread_local uint64_t ending_capture __attribute__((tls_model("initial-exec"))) = 0;
// Of the capture that this thread is about to begin: see Graphs::capture_begun.
thread_local CudaContext* flushed_in __attribute__((tls_model("initial-exec"))) = nullptr;

// A number that this stream alone has: the handle of a thread's own stream is the same in each.
uint64_t number_of(CUstream stream) {
  if (stream == CU_STREAM_PER_THREAD) return reinterpret_cast<uint64_t>(&ending_capture);
  return reinterpret_cast<uint64_t>(stream ? stream : CU_STREAM_LEGACY);
}

template <typename Params>
void on_begin_capture(const Token& token, const DriverCall& call) {
  const CUstream stream = stream_of(call, static_cast<const Params*>(call.params)->hStream);
  if (call.entry) {
    const CallPlace place{call.context, stream, call.per_thread};
    flushed_in = recorder.wants_launches() ? launch_recorder.before_capture(token, place) : nullptr;
  } else if (call.succeeded()) {
    const uint64_t capture = capture_on(token, stream);
    if (capture != 0) graphs.capture_begun(number_of(stream), capture - 1, flushed_in);
  }
}

// Into a graph that is there: the body of a conditional node, say, that runs as often as the device decides.
void on_begin_capture_to_graph(const Token& token, const DriverCall& call) {
  const CUstream stream = stream_of(call, static_cast<const cuStreamBeginCaptureToGraph_params*>(call.params)->hStream);
  if (!call.succeeded()) return;
  recorder.limit(Limit::graph_conditional);
  if (const uint64_t capture = capture_on(token, stream)) {
    graphs.capture_begun(number_of(stream), capture - 1, nullptr);
    graphs.capture_is_conditional(capture - 1);
  }
}

// A capture that has become invalid no longer has a number, so the one from its beginning counts.
void on_end_capture(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuStreamEndCapture_params*>(call.params);
  const CUstream stream = stream_of(call, params.hStream);
  if (call.entry) {
    ending_capture = capture_on(token, stream);
    if (const uint64_t begun = graphs.capture_of(number_of(stream))) {
      launch_recorder.before_capture_ends(token, {call.context, stream, call.per_thread}, begun - 1);
    }
    return;
  }
  const uint64_t ending = ending_capture;
  ending_capture = 0;
  if (!call.succeeded() && capture_on(token, stream)) return;  // it goes on: another stream or thread is to end it
  const uint64_t begun = graphs.take_capture_of(number_of(stream));
  const uint64_t ended = begun != 0 ? begun : ending;
  if (ended != 0) graphs.capture_ended(ended - 1, call.succeeded() && params.phGraph ? *params.phGraph : nullptr);
}

// Nodes in more than one executable: their digests cannot be told apart.
void require_alone(bool alone) {
  if (!alone) recorder.limit(Limit::graph_partial);
}

template <typename Params>
void on_instantiate(const Token&, const DriverCall& call) {
  const auto& params = *static_cast<const Params*>(call.params);
  if (call.succeeded() && params.phGraphExec) require_alone(graphs.instantiated(*params.phGraphExec, params.hGraph));
}
template <typename Params>
void on_update(const Token&, const DriverCall& call) {
  const auto& params = *static_cast<const Params*>(call.params);
  if (call.succeeded()) require_alone(graphs.updated(params.hGraphExec, params.hGraph));
}
template <typename Params>
void on_node_added(const Token&, const DriverCall& call) {
  if (call.succeeded()) graphs.node_added_by_hand(static_cast<const Params*>(call.params)->hGraph);
}
template <typename Params>
void on_node_changed(const Token&, const DriverCall& call) {
  if (call.succeeded()) graphs.changed_by_hand(static_cast<const Params*>(call.params)->hGraphExec);
}

template <typename Params>
void on_any_node_added(const Token&, const DriverCall& call) {
  const auto& params = *static_cast<const Params*>(call.params);
  if (!call.succeeded()) return;
  const bool child = params.nodeParams && params.nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH;
  if (child) graphs.child_added(params.hGraph, params.nodeParams->graph.graph);
  else graphs.node_added_by_hand(params.hGraph);
}
void on_child_replaced(const Token&, const DriverCall& call) {
  const auto& params = *static_cast<const cuGraphExecChildGraphNodeSetParams_params*>(call.params);
  if (call.succeeded()) require_alone(graphs.child_replaced(params.hGraphExec, params.childGraph));
}
void on_child_added(const Token&, const DriverCall& call) {
  const auto& params = *static_cast<const cuGraphAddChildGraphNode_params*>(call.params);
  if (call.succeeded()) graphs.child_added(params.hGraph, params.childGraph);
}
void on_clone(const Token&, const DriverCall& call) {
  const auto& params = *static_cast<const cuGraphClone_params*>(call.params);
  if (call.succeeded() && params.phGraphClone) graphs.cloned(*params.phGraphClone, params.originalGraph);
}
void on_graph_destroy(const Token&, const DriverCall& call) {
  if (call.entry) graphs.graph_destroyed(static_cast<const cuGraphDestroy_params*>(call.params)->hGraph);
}
void on_exec_destroy(const Token&, const DriverCall& call) {
  if (call.entry) graphs.executable_destroyed(static_cast<const cuGraphExecDestroy_params*>(call.params)->hGraphExec);
}

void on_graph_launch(const Token& token, const DriverCall& call) {
  const auto& params = *static_cast<const cuGraphLaunch_params*>(call.params);
  const CallPlace place{call.context, stream_of(call, params.hStream), call.per_thread, call.correlation};
  if (call.entry) {
    require_alone(graphs.about_to_launch(params.hGraph, number_of(place.stream)));
    launch_recorder.before_graph_launch(token, place);
  } else if (call.succeeded()) {
    launch_recorder.after_graph_launch(token, place, params.hGraph, recorder.wants_launches());
  }
}

constexpr CallEntry kCalls[] = {
    FORKPOINT_CALL_PTSZ(cuStreamBeginCapture, on_begin_capture<cuStreamBeginCapture_params>),
    FORKPOINT_CALL_PTSZ(cuStreamBeginCapture_v2, on_begin_capture<cuStreamBeginCapture_v2_params>),
    FORKPOINT_CALL_PTSZ(cuStreamBeginCaptureToGraph, on_begin_capture_to_graph),
    FORKPOINT_CALL_PTSZ(cuStreamEndCapture, on_end_capture),
    FORKPOINT_CALL(cuGraphInstantiate, on_instantiate<cuGraphInstantiate_params>),
    FORKPOINT_CALL(cuGraphInstantiate_v2, on_instantiate<cuGraphInstantiate_v2_params>),
    FORKPOINT_CALL(cuGraphInstantiateWithFlags, on_instantiate<cuGraphInstantiateWithFlags_params>),
    FORKPOINT_CALL_PTSZ(cuGraphInstantiateWithParams, on_instantiate<cuGraphInstantiateWithParams_params>),
    FORKPOINT_CALL(cuGraphExecUpdate, on_update<cuGraphExecUpdate_params>),
    FORKPOINT_CALL(cuGraphExecUpdate_v2, on_update<cuGraphExecUpdate_v2_params>),
    FORKPOINT_CALL(cuGraphAddKernelNode, on_node_added<cuGraphAddKernelNode_params>),
    FORKPOINT_CALL(cuGraphAddKernelNode_v2, on_node_added<cuGraphAddKernelNode_v2_params>),
    FORKPOINT_CALL(cuGraphAddMemcpyNode, on_node_added<cuGraphAddMemcpyNode_params>),
    FORKPOINT_CALL(cuGraphAddMemsetNode, on_node_added<cuGraphAddMemsetNode_params>),
    FORKPOINT_CALL(cuGraphAddNode, on_any_node_added<cuGraphAddNode_params>),
    FORKPOINT_CALL(cuGraphAddNode_v2, on_any_node_added<cuGraphAddNode_v2_params>),
    FORKPOINT_CALL(cuGraphExecKernelNodeSetParams, on_node_changed<cuGraphExecKernelNodeSetParams_params>),
    FORKPOINT_CALL(cuGraphExecKernelNodeSetParams_v2, on_node_changed<cuGraphExecKernelNodeSetParams_v2_params>),
    FORKPOINT_CALL(cuGraphExecMemcpyNodeSetParams, on_node_changed<cuGraphExecMemcpyNodeSetParams_params>),
    FORKPOINT_CALL(cuGraphExecMemsetNodeSetParams, on_node_changed<cuGraphExecMemsetNodeSetParams_params>),
    FORKPOINT_CALL(cuGraphExecNodeSetParams, on_node_changed<cuGraphExecNodeSetParams_params>),
    FORKPOINT_CALL(cuGraphExecChildGraphNodeSetParams, on_child_replaced),
    FORKPOINT_CALL(cuGraphAddChildGraphNode, on_child_added),
    FORKPOINT_CALL(cuGraphClone, on_clone),
    FORKPOINT_CALL(cuGraphDestroy, on_graph_destroy),
    FORKPOINT_CALL(cuGraphExecDestroy, on_exec_destroy),
    FORKPOINT_CALL_PTSZ(cuGraphLaunch, on_graph_launch),
};

}  // namespace

CallTable graph_calls() { return {kCalls, sizeof(kCalls) / sizeof(kCalls[0])}; }

}  // namespace forkpoint
