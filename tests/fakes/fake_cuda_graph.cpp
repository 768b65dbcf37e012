// Graphs of the fake libcuda: what was captured or added, done again at each launch in the order of the nodes.
#include <cuda.h>

#include <set>

#include "tests/fakes/fake_cuda_objects.h"
#include "tests/fakes/fake_cuda_trace.h"

namespace forkpoint::fake {
namespace {

using Steps = std::vector<Work>;

struct Graphs {
  std::set<CUgraphExec> executables;
};
Graphs& graphs() {
  static Graphs* one = new Graphs;
  return *one;
}

std::shared_ptr<const Steps> steps_of(const CUgraph_st& graph) {
  auto steps = std::make_shared<Steps>();
  for (const auto& node : graph.nodes) steps->push_back(node->work);
  return steps;
}

Work all_of(std::shared_ptr<const Steps> steps) {
  return [steps] {
    for (const Work& step : *steps) step();
  };
}

CUresult instantiate(CUgraphExec* executable, CUgraph graph) {
  const std::lock_guard lock(objects());
  *executable = new CUgraphExec_st{steps_of(*graph), graph->waits, graph->records};
  graphs().executables.insert(*executable);
  return CUDA_SUCCESS;
}

CUresult launch(CUgraphExec executable, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult error = forced_launch_error(nullptr); error != CUDA_SUCCESS) return error;
  Work work;
  std::vector<Point> after;
  {
    const std::lock_guard lock(objects());
    if (graphs().executables.count(executable) == 0) return CUDA_ERROR_INVALID_HANDLE;
    work = all_of(executable->steps);
    for (const CUevent event : executable->waits) {
      if (event->recorded && !event->capture) after.push_back(event->point);
    }
  }
  // Events outside are what they are when the graph is launched.
  if (!after.empty()) Engine::get().enqueue(stream->queue, [] {}, after);
  const CUresult result = submit(stream, CU_GRAPH_NODE_TYPE_GRAPH, std::move(work));
  const Point end = Engine::get().end_of(stream->queue);
  const std::lock_guard lock(objects());
  for (const CUevent event : executable->records) event->recorded = true, event->capture = nullptr, event->point = end;
  return result;
}

CUresult add_node(CUgraphNode* handle, CUgraph graph, CUgraphNodeType type, Work work, const CUgraphNode* after,
                  size_t count) {
  const std::lock_guard lock(objects());
  auto node = std::make_unique<CUgraphNode_st>(CUgraphNode_st{type, std::move(work), {after, after + count}});
  *handle = node.get();
  graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

CUresult add_kernel(CUgraphNode* handle, CUgraph graph, const CUgraphNode* after, size_t count,
                    const CUDA_KERNEL_NODE_PARAMS& params) {
  const LaunchShape shape = {{params.gridDimX, params.gridDimY, params.gridDimZ},
                             {params.blockDimX, params.blockDimY, params.blockDimZ},
                             params.sharedMemBytes};
  const CUfunction function = params.func ? params.func : reinterpret_cast<CUfunction>(params.kern);
  Work work;
  const CUresult result = make_launch(function, shape, params.kernelParams, params.extra, &work);
  return result == CUDA_SUCCESS ? add_node(handle, graph, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work), after, count)
                                : result;
}

CUresult add_child(CUgraphNode* handle, CUgraph graph, const CUgraphNode* after, size_t count, CUgraph child) {
  std::shared_ptr<const Steps> steps;
  {
    const std::lock_guard lock(objects());
    steps = steps_of(*child);
  }
  return add_node(handle, graph, CU_GRAPH_NODE_TYPE_GRAPH, all_of(steps), after, count);
}

CUresult clone(CUgraph* copy, CUgraph original) {
  const std::lock_guard lock(objects());
  auto* made = new CUgraph_st;
  // The copies come after each other: every order of the original's that is one is theirs too.
  for (const auto& node : original->nodes) {
    made->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{node->type, node->work, {}}));
  }
  *copy = made;
  return CUDA_SUCCESS;
}

CUresult update(CUgraphExec executable, CUgraph graph) {
  const std::lock_guard lock(objects());
  if (graphs().executables.count(executable) == 0) return CUDA_ERROR_INVALID_HANDLE;
  if (executable->steps->size() != graph->nodes.size()) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  executable->steps = steps_of(*graph);
  return CUDA_SUCCESS;
}

CUresult destroy(CUgraphExec executable) {
  const std::lock_guard lock(objects());
  if (graphs().executables.erase(executable) == 0) return CUDA_ERROR_INVALID_HANDLE;
  delete executable;
  return CUDA_SUCCESS;
}

CUresult nodes_of(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  const std::lock_guard lock(objects());
  const size_t room = nodes ? *count : 0;
  for (size_t i = 0; i < room && i < graph->nodes.size(); ++i) nodes[i] = graph->nodes[i].get();
  *count = graph->nodes.size();
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace forkpoint::fake

using namespace forkpoint::fake;

FAKE cuGraphCreate(CUgraph* graph, unsigned int flags) {
  FAKE_TRACE(cuGraphCreate, graph, flags);
  return *graph = new CUgraph_st, traced.end(CUDA_SUCCESS);
}
FAKE cuGraphDestroy(CUgraph graph) {
  FAKE_TRACE(cuGraphDestroy, graph);
  return delete graph, traced.end(CUDA_SUCCESS);
}
FAKE cuGraphClone(CUgraph* copy, CUgraph original) {
  FAKE_TRACE(cuGraphClone, copy, original);
  return traced.end(clone(copy, original));
}
FAKE cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  FAKE_TRACE(cuGraphGetNodes, graph, nodes, count);
  return traced.end(nodes_of(graph, nodes, count));
}
FAKE cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  FAKE_TRACE(cuGraphNodeGetType, node, type);
  return *type = node->type, traced.end(CUDA_SUCCESS);
}
FAKE cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t count,
                             const CUDA_KERNEL_NODE_PARAMS* params) {
  FAKE_TRACE(cuGraphAddKernelNode_v2, node, graph, after, count, params);
  return traced.end(add_kernel(node, graph, after, count, *params));
}
FAKE cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t count, CUgraph child) {
  FAKE_TRACE(cuGraphAddChildGraphNode, node, graph, after, count, child);
  return traced.end(add_child(node, graph, after, count, child));
}
FAKE cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  FAKE_TRACE(cuGraphInstantiateWithFlags, executable, graph, flags);
  return traced.end(instantiate(executable, graph));
}
FAKE_TWINS(cuGraphInstantiateWithParams, _ptsz,
           (params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS, instantiate(executable, graph)),
           (CUgraphExec * executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params), executable, graph, params)
FAKE_TWINS(cuGraphLaunch, _ptsz, launch(executable, find_stream(stream, per_thread)),
           (CUgraphExec executable, CUstream stream), executable, stream)
FAKE cuGraphExecUpdate_v2(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  FAKE_TRACE(cuGraphExecUpdate_v2, executable, graph, info);
  const CUresult result = update(executable, graph);
  info->result = result == CUDA_SUCCESS ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  return traced.end(result);
}
FAKE cuGraphExecDestroy(CUgraphExec executable) {
  FAKE_TRACE(cuGraphExecDestroy, executable);
  return traced.end(destroy(executable));
}
