// Programs that replay CUDA graphs and know nothing of the probe, on the fake libcuda:
// launch_graph_client LIBCUDA SCENARIO.
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "tests/probe/fake_gpu_program.h"

using forkpoint::fake_gpu::Gpu;
using forkpoint::fake_gpu::Kernel;

namespace {

constexpr int kCount = 100;
constexpr int kNodes = 1 << 17;  // more than the probe has numbers for

// Values of zero on the device, a stream, and a kernel that adds one to each.
class Program {
 public:
  explicit Program(Gpu& gpu) : gpu_(gpu) {
    add_ = gpu.kernel("add_one", +[](float* out, int count) { for (int i = 0; i < count; ++i) out[i] += 1; });
    values_ = gpu.make<float>(std::vector<float>(kCount));
    stream_ = gpu.stream();
  }
  CUstream stream() const { return stream_; }
  const forkpoint::fake_gpu::Driver& driver() const { return gpu_.driver(); }

  void begin() const { GPU_OK(driver().cuStreamBeginCapture_(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)); }
  void add() const { add_on(stream_); }
  void add_on(CUstream stream) const { gpu_.launch(add_, stream, values_, kCount); }
  CUgraph capture(int launches = 1) const {
    begin();
    for (int i = 0; i < launches; ++i) add();
    CUgraph graph = nullptr;
    GPU_OK(driver().cuStreamEndCapture_(stream_, &graph));
    return graph;
  }
  CUgraph empty() const {
    CUgraph graph = nullptr;
    GPU_OK(driver().cuGraphCreate_(&graph, 0));
    return graph;
  }
  CUgraphNode add_child(CUgraph parent, CUgraph child, CUgraphNode after = nullptr) const {
    CUgraphNode node = nullptr;
    GPU_OK(driver().cuGraphAddChildGraphNode_(&node, parent, after ? &after : nullptr, after ? 1 : 0, child));
    return node;
  }
  CUgraphExec instantiate(CUgraph graph) const {
    CUgraphExec executable = nullptr;
    GPU_OK(driver().cuGraphInstantiate_(&executable, graph, 0));
    return executable;
  }
  void update(CUgraphExec executable, CUgraph graph) const {
    CUgraphExecUpdateResultInfo info = {};
    GPU_OK(driver().cuGraphExecUpdate_(executable, graph, &info));
  }
  void replay(CUgraphExec executable, int times = 1) const {
    for (int i = 0; i < times; ++i) gpu_.replay(executable, stream_);
  }
  void wait() const { gpu_.synchronize(stream_); }
  void print() const {
    wait();
    std::printf("%g\n", static_cast<double>(gpu_.read(values_, kCount)[0]));
  }
  Gpu& gpu() const { return gpu_; }

 private:
  Gpu& gpu_;
  Kernel<float*, int> add_;
  float* values_ = nullptr;
  CUstream stream_ = nullptr;
};

void child_twice(Program& program) {
  const CUgraph child = program.capture(), parent = program.empty();
  program.add_child(parent, child, program.add_child(parent, child));
  program.replay(program.instantiate(parent), 3);
}

void child_of_two(Program& program) {
  const CUgraph child = program.capture(), one = program.empty(), other = program.empty();
  program.add_child(one, child);
  program.add_child(other, child);
  const CUgraphExec first = program.instantiate(one), second = program.instantiate(other);
  for (int i = 0; i < 3; ++i) program.replay(first), program.replay(second);
}

void child_once(Program& program) {
  const CUgraph child = program.capture(), parent = program.empty();
  program.add_child(parent, child);
  program.replay(program.instantiate(parent), 3);
}

void child_later(Program& program) {
  const CUgraph child = program.capture(), other = program.capture(), parent = program.empty();
  const CUgraphNode first = program.add_child(parent, child);
  const CUgraphExec executable = program.instantiate(parent);
  program.add_child(parent, other, first);  // not in the executable
  program.replay(executable, 3);
}

void two_executables(Program& program) {
  const CUgraph graph = program.capture();
  const CUgraphExec one = program.instantiate(graph), other = program.instantiate(graph);
  const CUstream stream = program.gpu().stream();
  program.replay(one);
  program.gpu().replay(other, stream);
  program.gpu().synchronize(stream);
}

void one_after_another(Program& program) {
  const CUgraph graph = program.capture();
  for (int i = 0; i < 3; ++i) {
    const CUgraphExec executable = program.instantiate(graph);
    program.replay(executable, 2);
    GPU_OK(program.driver().cuGraphExecDestroy_(executable));
  }
}

void updated(Program& program) {
  const CUgraph one = program.capture();
  const CUgraphExec executable = program.instantiate(one);
  program.replay(executable, 2);
  const CUgraph other = program.capture();
  program.update(executable, other);
  program.replay(executable, 2);
  program.update(executable, one);  // and back
  program.replay(executable, 2);
}

// Two streams in one capture: the second joins it, and is joined again.
void forked(Program& program) {
  const CUstream side = program.gpu().stream();
  program.begin();
  program.add();
  program.gpu().order(program.stream(), side);
  program.add_on(side);
  program.gpu().order(side, program.stream());
  CUgraph graph = nullptr;
  GPU_OK(program.driver().cuStreamEndCapture_(program.stream(), &graph));
  program.replay(program.instantiate(graph), 3);
}

// Somebody else tries to end the capture first: it goes on.
void ended_by_another(Program& program) {
  program.begin();
  program.add();
  std::thread([&] {
    CUgraph none = nullptr;
    if (program.driver().cuStreamEndCapture_(program.stream(), &none) == CUDA_SUCCESS) std::printf("ended\n");
  }).join();
  program.add();
  CUgraph graph = nullptr;
  GPU_OK(program.driver().cuStreamEndCapture_(program.stream(), &graph));
  program.replay(program.instantiate(graph), 3);
}

// The kernel that would bring the digests cannot be launched.
void no_flush(Program& program) {
  const auto set_error = program.gpu().find<decltype(fake_cuda_set_kernel_error)>("fake_cuda_set_kernel_error");
  set_error("forkpoint_digest_flush", CUDA_ERROR_INVALID_VALUE);
  program.replay(program.instantiate(program.capture(2)), 3);
}

// More captures than there are numbers for their digests, but never many at a time.
void recaptured(Program& program) {
  const CUgraph first = program.capture(500);
  const CUgraphExec executable = program.instantiate(first);
  for (int i = 0; i < 300; ++i) {
    const CUgraph graph = program.capture(500);
    program.update(executable, graph);
    GPU_OK(program.driver().cuGraphDestroy_(graph));
    program.replay(executable);
    program.wait();
  }
}

// Captures that become invalid.
void abandoned(Program& program) {
  for (int i = 0; i < 300; ++i) {
    program.begin();
    for (int launch = 0; launch < 500; ++launch) program.add();
    program.driver().cuStreamSynchronize_(program.stream());
    CUgraph graph = nullptr;
    if (program.driver().cuStreamEndCapture_(program.stream(), &graph) == CUDA_SUCCESS) std::printf("not invalid\n");
  }
  program.replay(program.instantiate(program.capture()), 3);
}

// All numbers are in use when the graph is captured a second time; the program needs its form to be the same.
void exhausted(Program& program) {
  const CUgraphExec executable = program.instantiate(program.capture(2));
  program.replay(executable);
  program.capture(kNodes - 3);
  program.update(executable, program.capture(2));
  program.replay(executable);
}

// More results than a small ring holds.
void crowded(Program& program) {
  const CUgraphExec executable = program.instantiate(program.capture(5000));
  for (int i = 0; i < 60; ++i) {
    program.replay(executable);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void numbered(Program& program) {
  for (int i = 0; i < 4; ++i) {
    const CUgraph graph = program.capture();
    const CUgraphExec executable = program.instantiate(graph);
    program.replay(executable, 2);
    program.wait();
    GPU_OK(program.driver().cuGraphExecDestroy_(executable));
    GPU_OK(program.driver().cuGraphDestroy_(graph));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  const std::map<std::string, std::function<void(Program&)>> scenarios = {
      {"child_twice", child_twice}, {"child_of_two", child_of_two}, {"child_once", child_once},
      {"child_later", child_later},
      {"two_executables", two_executables}, {"one_after_another", one_after_another},
      {"updated", updated},
      {"forked", forked}, {"ended_by_another", ended_by_another}, {"no_flush", no_flush},
      {"recaptured", recaptured}, {"abandoned", abandoned}, {"exhausted", exhausted},
      {"numbered", numbered},       {"crowded", crowded}};
  const auto scenario = scenarios.find(argv[2]);
  if (scenario == scenarios.end()) return 97;
  Gpu gpu(argv[1]);
  GPU_OK(gpu.driver().cuInit_(0));
  Program program(gpu);
  scenario->second(program);
  program.print();
  return 0;
}
