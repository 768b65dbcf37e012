// The fake libcuda itself: it must do the wrong thing where a program is wrong, and only there.
#include <doctest/doctest.h>

#include "tests/probe/fake_gpu_program.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::fake_gpu;
using forkpoint::probe_test::client_path;

namespace {

// A program on the fake in its first state; the library stays loaded, its objects too.
class Program : public Gpu {
 public:
  explicit Program(FakeCudaMode mode = kFakeAtOnce, FakeCudaOrder order = kFakeNeeded)
      : Gpu(client_path("libcuda.so.1")) {
    find<decltype(fake_cuda_set_mode)>("fake_cuda_set_mode")(mode);
    find<decltype(fake_cuda_set_order)>("fake_cuda_set_order")(order);
  }
  unsigned int run(CUstream stream, unsigned int count) {
    return find<decltype(fake_cuda_run)>("fake_cuda_run")(stream, count);
  }
  int value(const int* memory) const { return *memory; }  // without waiting for anybody
};

void store(int* to, int value) { *to = value; }
void copy_one(int* to, const int* from) { *to = *from; }

struct Pair {
  int* to;
  int value;
};
void store_pair(char, Pair pair) { *pair.to = pair.value; }

}  // namespace

TEST_CASE("a kernel is launched with parameters, with a block of them, with a configuration, or together") {
  Program gpu;
  const auto kernel = gpu.kernel("store_pair", store_pair);
  int* memory = gpu.make<int>({0});
  char unused = 1;
  Pair pair = {memory, 5};
  void* params[] = {&unused, &pair};
  GPU_OK(gpu.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
  CHECK(gpu.value(memory) == 5);
  struct Block {
    char unused;
    Pair pair;
  } block = {1, {memory, 6}};
  size_t size = sizeof(block);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
  GPU_OK(gpu.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra));
  CHECK(gpu.value(memory) == 6);
  pair.value = 7;
  const CUlaunchConfig config = {2, 1, 1, 32, 1, 1, 0, nullptr, nullptr, 0};
  GPU_OK(gpu.driver().cuLaunchKernelEx_(&config, kernel.function, params, nullptr));
  CHECK(gpu.value(memory) == 7);
  pair.value = 8;
  GPU_OK(gpu.driver().cuLaunchCooperativeKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, params));
  CHECK(gpu.value(memory) == 8);
  size_t offset = 0, bytes = 0;
  GPU_OK(gpu.driver().cuFuncGetParamInfo_(kernel.function, 1, &offset, &bytes));
  CHECK(offset == 8);
  CHECK(bytes == sizeof(Pair));
  CHECK(gpu.driver().cuFuncGetParamInfo_(kernel.function, 2, &offset, &bytes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(gpu.driver().cuLaunchKernel_(kernel.function, 0, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr) ==
        CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a kernel of a library is another kind of handle, which launches take too") {
  Program gpu;
  gpu.kernel("store", store);
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  GPU_OK(gpu.driver().cuLibraryLoadData_(&library, kFakeImage, nullptr, nullptr, 0, nullptr, nullptr, 0));
  GPU_OK(gpu.driver().cuLibraryGetKernel_(&kernel, library, "store"));
  int* memory = gpu.make<int>({0});
  gpu.launch(Kernel<int*, int>{reinterpret_cast<CUfunction>(kernel)}, nullptr, memory, 4);
  CHECK(gpu.value(memory) == 4);
  size_t offset = 0, bytes = 0;
  CHECK(gpu.driver().cuFuncGetParamInfo_(reinterpret_cast<CUfunction>(kernel), 0, &offset, &bytes) ==
        CUDA_ERROR_INVALID_HANDLE);
  GPU_OK(gpu.driver().cuKernelGetParamInfo_(kernel, 1, &offset, &bytes));
  CHECK(offset == 8);
  GPU_OK(gpu.driver().cuLibraryUnload_(library));
  CHECK(gpu.driver().cuKernelGetParamInfo_(kernel, 1, &offset, &bytes) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("deferred work is done when somebody waits for it") {
  Program gpu(kFakeDeferred);
  const auto kernel = gpu.kernel("store", store);
  int* memory = gpu.make<int>({0});
  const CUstream stream = gpu.stream();
  gpu.launch(kernel, stream, memory, 1);
  gpu.launch(kernel, stream, memory, 2);
  CHECK(gpu.value(memory) == 0);
  CHECK(gpu.driver().cuStreamQuery_(stream) == CUDA_ERROR_NOT_READY);
  CHECK(gpu.run(stream, 1) == 1);
  CHECK(gpu.value(memory) == 1);
  gpu.synchronize(stream);
  CHECK(gpu.value(memory) == 2);
  CHECK(gpu.run(stream, 1) == 0);
  gpu.launch(kernel, stream, memory, 3);
  gpu.find<decltype(fake_cuda_finish)>("fake_cuda_finish")();
  CHECK(gpu.value(memory) == 3);
}

TEST_CASE("where a wait is missing a stale value is read, and nowhere else") {
  struct Case {
    bool waits;
    FakeCudaOrder order;
    int read;
  };
  for (const Case& one : {Case{false, kFakeNeeded, 0}, Case{true, kFakeNeeded, 9}, Case{false, kFakeSubmission, 9}}) {
    Program gpu(kFakeDeferred, one.order);
    const auto kernel = gpu.kernel("store", store);
    const auto copy = gpu.kernel("copy_one", copy_one);
    int* source = gpu.make<int>({0});
    int* target = gpu.make<int>({-1});
    const CUstream writer = gpu.stream(), reader = gpu.stream();
    gpu.launch(kernel, writer, source, 9);
    if (one.waits) gpu.order(writer, reader);
    gpu.launch(copy, reader, target, source);
    gpu.synchronize(reader);
    CHECK(gpu.value(target) == one.read);
    gpu.synchronize();
    CHECK(gpu.value(source) == 9);
  }
}

TEST_CASE("the legacy default stream and blocking streams wait for each other, non-blocking ones do not") {
  for (const unsigned int flags : {CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING}) {
    Program gpu(kFakeDeferred);
    const auto kernel = gpu.kernel("store", store);
    const auto copy = gpu.kernel("copy_one", copy_one);
    int* source = gpu.make<int>({0});
    int* first = gpu.make<int>({-1});
    int* second = gpu.make<int>({-1});
    const CUstream stream = gpu.stream(flags);
    gpu.launch(kernel, stream, source, 3);
    gpu.launch(copy, nullptr, first, source);
    gpu.launch(kernel, nullptr, source, 4);
    gpu.launch(copy, stream, second, source);
    gpu.synchronize(stream);
    const bool blocking = flags == CU_STREAM_DEFAULT;
    CHECK(gpu.value(first) == (blocking ? 3 : -1));
    CHECK(gpu.value(second) == (blocking ? 4 : 3));
  }
}

TEST_CASE("copies and sets are work on their stream; memory that CUDA does not know is copied by the call") {
  Program gpu(kFakeDeferred);
  const CUstream stream = gpu.stream();
  int* memory = gpu.make<int>({1, 2, 3, 4});
  int value = 77, back = 0;
  GPU_OK(gpu.driver().cuMemcpyHtoDAsync_(gpu.address(memory), &value, sizeof(value), stream));
  value = 78;
  GPU_OK(gpu.driver().cuMemsetD32Async_(gpu.address(memory + 1), 5, 2, stream));
  GPU_OK(gpu.driver().cuMemcpyDtoDAsync_(gpu.address(memory + 3), gpu.address(memory), sizeof(int), stream));
  CHECK(gpu.value(memory) == 1);
  GPU_OK(gpu.driver().cuMemcpyDtoHAsync_(&back, gpu.address(memory + 3), sizeof(int), stream));
  CHECK(back == 77);
  CHECK(gpu.read(memory, 4) == std::vector<int>{77, 5, 5, 77});
  CHECK(gpu.driver().cuMemsetD32Async_(gpu.address(memory), 5, 5, stream) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("memory is told apart by kind and range; freed addresses come round again with what was there") {
  Program gpu;
  int* memory = gpu.make<int>({1, 2, 3});
  unsigned int type = 0, managed = 9;
  CUdeviceptr start = 0;
  size_t size = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&type, &managed, &start, &size};
  const auto ask = [&](const void* address) {
    GPU_OK(gpu.driver().cuPointerGetAttributes_(4, attributes, values, gpu.address(address)));
  };
  ask(memory + 2);
  CHECK(type == CU_MEMORYTYPE_DEVICE);
  CHECK(managed == 0);
  CHECK(start == gpu.address(memory));
  CHECK(size == 12);
  int local = 0;
  ask(&local);
  CHECK(type == 0);
  void* pinned = nullptr;
  GPU_OK(gpu.driver().cuMemHostAlloc_(&pinned, 100, 0));
  ask(pinned);
  CHECK(type == CU_MEMORYTYPE_HOST);
  GPU_OK(gpu.driver().cuMemFreeHost_(pinned));
  ask(pinned);
  CHECK(type == 0);
  CUdeviceptr shared = 0;
  GPU_OK(gpu.driver().cuMemAllocManaged_(&shared, 8, CU_MEM_ATTACH_GLOBAL));
  ask(reinterpret_cast<void*>(shared));
  CHECK(managed == 1);

  gpu.release(memory);
  CHECK(gpu.driver().cuMemFree_(gpu.address(memory)) == CUDA_ERROR_INVALID_VALUE);
  int* again = gpu.allocate<int>(3);
  CHECK(again == memory);
  CHECK(gpu.value(again + 2) == 3);
  gpu.release(again);
  const auto garbage = gpu.find<decltype(fake_cuda_set_garbage)>("fake_cuda_set_garbage");
  const auto fresh = [&](uint64_t seed) {
    garbage(seed);
    int* made = gpu.allocate<int>(3);
    const int found = gpu.value(made + 2);
    gpu.release(made);
    return found;
  };
  CHECK(fresh(1) == fresh(1));
  CHECK(fresh(1) != fresh(2));
  garbage(0);
}

TEST_CASE("memory that is freed in the order of a stream is there until the stream has come to it") {
  Program gpu(kFakeDeferred);
  const auto kernel = gpu.kernel("store", store);
  const CUstream stream = gpu.stream();
  CUdeviceptr first = 0, second = 0;
  GPU_OK(gpu.driver().cuMemAllocAsync_(&first, 64, stream));
  gpu.launch(kernel, stream, reinterpret_cast<int*>(first), 1);
  GPU_OK(gpu.driver().cuMemFreeAsync_(first, stream));
  GPU_OK(gpu.driver().cuMemAllocAsync_(&second, 64, stream));
  CHECK(second != first);
  gpu.synchronize(stream);
  CUdeviceptr third = 0;
  GPU_OK(gpu.driver().cuMemAllocAsync_(&third, 64, stream));
  CHECK(third == first);
}

TEST_CASE("what is captured is done at the replays only, also what joined through events") {
  Program gpu;
  const auto kernel = gpu.kernel("store", store);
  const auto add = gpu.kernel(
      "add", +[](int* to, const int* what) { *to += *what; });
  const CUstream stream = gpu.stream(), other = gpu.stream();
  int* sum = gpu.make<int>({0});
  int* step = gpu.make<int>({0});
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUgraphExec graph = gpu.capture(stream, [&] {
    gpu.launch(kernel, stream, step, 5);
    gpu.order(stream, other);
    GPU_OK(gpu.driver().cuStreamIsCapturing_(other, &status));
    gpu.launch(add, other, sum, step);
    gpu.order(other, stream);
    GPU_OK(gpu.driver().cuMemsetD8Async_(gpu.address(step), 0, 4, stream));
  });
  CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(gpu.value(sum) == 0);
  for (int replay = 1; replay <= 3; ++replay) {
    gpu.replay(graph, stream);
    CHECK(gpu.value(sum) == 5 * replay);
    CHECK(gpu.value(step) == 0);
  }
  GPU_OK(gpu.driver().cuGraphExecDestroy_(graph));
  CHECK(gpu.driver().cuGraphLaunch_(graph, stream) == CUDA_ERROR_INVALID_HANDLE);
  GPU_OK(gpu.driver().cuStreamIsCapturing_(other, &status));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_NONE);
}

TEST_CASE("a capture fails where a stream was not joined, and where something unsafe was called meanwhile") {
  Program gpu;
  const auto kernel = gpu.kernel("store", store);
  const CUstream stream = gpu.stream(), other = gpu.stream();
  int* memory = gpu.make<int>({0});
  CUgraph graph = nullptr;
  GPU_OK(gpu.driver().cuStreamBeginCapture_(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  gpu.order(stream, other);
  gpu.launch(kernel, other, memory, 1);
  CHECK(gpu.driver().cuStreamEndCapture_(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

  CUdeviceptr fresh = 0;
  GPU_OK(gpu.driver().cuStreamBeginCapture_(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  GPU_OK(gpu.driver().cuThreadExchangeStreamCaptureMode_(&mode));
  GPU_OK(gpu.driver().cuMemAlloc_(&fresh, 64));
  GPU_OK(gpu.driver().cuThreadExchangeStreamCaptureMode_(&mode));
  cuuint64_t id = 0;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph under_way = nullptr;
  GPU_OK(gpu.driver().cuStreamGetCaptureInfo_(stream, &status, &id, &under_way, nullptr, nullptr, nullptr));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(id > 0);
  GPU_OK(gpu.driver().cuStreamEndCapture_(stream, &graph));
  CHECK(graph == under_way);

  GPU_OK(gpu.driver().cuStreamBeginCapture_(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(gpu.driver().cuMemAlloc_(&fresh, 64) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK(gpu.driver().cuStreamEndCapture_(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  const CUstream blocking = gpu.stream(CU_STREAM_DEFAULT);
  GPU_OK(gpu.driver().cuStreamBeginCapture_(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK(gpu.driver().cuStreamIsCapturing_(nullptr, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  GPU_OK(gpu.driver().cuStreamEndCapture_(blocking, &graph));
}

TEST_CASE("graphs are built by hand, nested and updated") {
  Program gpu;
  const auto add = gpu.kernel(
      "add_value", +[](int* to, int value) { *to += value; });
  const CUstream stream = gpu.stream();
  int* sum = gpu.make<int>({0});
  const auto graph_adding = [&](int value) {
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
    GPU_OK(gpu.driver().cuGraphCreate_(&graph, 0));
    void* params[] = {&sum, &value};
    CUDA_KERNEL_NODE_PARAMS made = {};
    made.func = add.function;
    made.gridDimX = made.gridDimY = made.gridDimZ = made.blockDimX = made.blockDimY = made.blockDimZ = 1;
    made.kernelParams = params;
    GPU_OK(gpu.driver().cuGraphAddKernelNode_(&node, graph, nullptr, 0, &made));
    return graph;
  };
  CUgraph outer = graph_adding(100);
  CUgraphNode node = nullptr;
  GPU_OK(gpu.driver().cuGraphAddChildGraphNode_(&node, outer, nullptr, 0, graph_adding(7)));
  CUgraphExec executable = nullptr;
  GPU_OK(gpu.driver().cuGraphInstantiate_(&executable, outer, 0));
  gpu.replay(executable, stream);
  CHECK(gpu.value(sum) == 107);
  CUgraphExecUpdateResultInfo info = {};
  CHECK(gpu.driver().cuGraphExecUpdate_(executable, graph_adding(1), &info) == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  CUgraphExec small = nullptr;
  GPU_OK(gpu.driver().cuGraphInstantiate_(&small, graph_adding(1), 0));
  GPU_OK(gpu.driver().cuGraphExecUpdate_(small, graph_adding(2), &info));
  gpu.replay(small, stream);
  CHECK(gpu.value(sum) == 109);
}
