// CUDA graphs in every way to make one: captured, with a child, built node by node, with conditional nodes.
// Usage: launch_plain_graphs [PART...] (default: all)
#include "launch_plain.h"

// Begins the step that is recorded.
__global__ void mark_step() {}

ADDING_KERNEL(captured_add)
ADDING_KERNEL(child_add)
ADDING_KERNEL(built_add)
ADDING_KERNEL(loop_add)
ADDING_KERNEL(branch_add)

__global__ void count_down(cudaGraphConditionalHandle again, int* left) {
  if (--*left == 0) cudaGraphSetConditional(again, 0);
}
__global__ void take_branch(cudaGraphConditionalHandle taken, const float* x) {
  cudaGraphSetConditional(taken, x[0] >= 0 ? 1 : 0);
}

namespace {

cudaGraph_t capture_adds(void (*kernel)(float*, int), const Floats& x, int times) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < times; ++i) kernel<<<blocks_for(x.count), kThreads, 0, stream>>>(x.data, x.count);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaStreamDestroy(stream));
  return graph;
}

void launch_graph(cudaGraph_t graph, int times) {
  cudaGraphExec_t executable = nullptr;
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < times; ++i) CHECK(cudaGraphLaunch(executable, nullptr));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
}

void run_captured_graph() {
  const Floats x = make(15 * 1024);
  launch_graph(capture_adds(captured_add, x, 2), 3);
  for (int i = 0; i < 6; ++i) handed("captured_add", {x.bytes()});
}

void run_child_graph() {
  const Floats x = make(16 * 1024);
  cudaGraph_t child = capture_adds(child_add, x, 2), parent = nullptr;
  cudaGraphNode_t node = nullptr;
  CHECK(cudaGraphCreate(&parent, 0));
  CHECK(cudaGraphAddChildGraphNode(&node, parent, nullptr, 0, child));
  CHECK(cudaGraphDestroy(child));
  launch_graph(parent, 2);
  for (int i = 0; i < 4; ++i) handed("child_add", {x.bytes()});
}

cudaGraphNode_t add_kernel(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, const void* kernel, int count,
                           void** arguments) {
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(kernel);
  params.gridDim = blocks_for(count);
  params.blockDim = kThreads;
  params.kernelParams = arguments;
  cudaGraphNode_t node = nullptr;
  CHECK(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
  return node;
}

void run_built_graph() {
  Floats x = make(17 * 1024), y = make(17 * 1024);
  cudaGraph_t graph = nullptr;
  CHECK(cudaGraphCreate(&graph, 0));
  void* arguments[] = {&x.data, &x.count};
  const cudaGraphNode_t add = add_kernel(graph, {}, reinterpret_cast<const void*>(built_add), x.count, arguments);
  cudaGraphNode_t copy = nullptr, set = nullptr;
  CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &add, 1, y.data, x.data, x.bytes() / 2, cudaMemcpyDeviceToDevice));
  cudaMemsetParams zeros{};
  zeros.dst = x.data, zeros.elementSize = 4, zeros.width = 100, zeros.height = 1;
  CHECK(cudaGraphAddMemsetNode(&set, graph, &copy, 1, &zeros));
  launch_graph(graph, 2);
  unseen("built_add");
}

cudaGraph_t add_conditional(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, cudaGraphConditionalHandle handle,
                            cudaGraphConditionalNodeType type) {
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle;
  params.conditional.type = type;
  params.conditional.size = 1;
  cudaGraphNode_t node = nullptr;
  CHECK(cudaGraphAddNode(&node, graph, after.data(), nullptr, after.size(), &params));
  return params.conditional.phGraph_out[0];
}

// Five times round; the body is captured.
void run_while_graph() {
  const Floats x = make(18 * 1024);
  const int rounds = 5;
  int* left = nullptr;
  CHECK(cudaMalloc(&left, sizeof(rounds)));
  CHECK(cudaMemcpy(left, &rounds, sizeof(rounds), cudaMemcpyHostToDevice));
  cudaGraph_t graph = nullptr;
  cudaGraphConditionalHandle again{};
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphConditionalHandleCreate(&again, graph, 1, cudaGraphCondAssignDefault));
  cudaGraph_t body = add_conditional(graph, {}, again, cudaGraphCondTypeWhile);
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal));
  loop_add<<<blocks_for(x.count), kThreads, 0, stream>>>(x.data, x.count);
  count_down<<<1, 1, 0, stream>>>(again, left);
  CHECK(cudaStreamEndCapture(stream, &body));
  CHECK(cudaStreamDestroy(stream));
  launch_graph(graph, 1);
  unseen("loop_add");
}

void run_if_graph() {
  Floats x = make(19 * 1024);
  cudaGraph_t graph = nullptr;
  cudaGraphConditionalHandle taken{};
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphConditionalHandleCreate(&taken, graph, 0, cudaGraphCondAssignDefault));
  void* question[] = {&taken, &x.data};
  const cudaGraphNode_t asked = add_kernel(graph, {}, reinterpret_cast<const void*>(take_branch), 1, question);
  cudaGraph_t body = add_conditional(graph, {asked}, taken, cudaGraphCondTypeIf);
  void* arguments[] = {&x.data, &x.count};
  add_kernel(body, {}, reinterpret_cast<const void*>(branch_add), x.count, arguments);
  launch_graph(graph, 2);
  unseen("branch_add");
}

constexpr Part kParts[] = {{"captured", run_captured_graph},
                           {"child", run_child_graph},
                           {"built", run_built_graph},
                           {"while", run_while_graph},
                           {"if", run_if_graph}};

}  // namespace

int main(int count, char** names) {
  mark_step<<<1, 1>>>();
  return run_parts(kParts, count, names);
}
