// Programs that launch kernels and know nothing of the probe, on the fake libcuda: launch_client LIBCUDA SCENARIO.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "probes/forkpoint.h"
#include "tests/probe/fake_gpu_program.h"

using forkpoint::fake_gpu::Gpu;
using forkpoint::fake_gpu::Kernel;

namespace {

constexpr int kCount = 1000;

void scale(float* out, const float* in, float by, int count) {
  for (int i = 0; i < count; ++i) out[i] = by * in[i];
}

std::vector<float> ramp(int count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i);
  return values;
}

void print(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += value;
  std::printf("%.0f\n", sum);
}

void plain(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  float* out = gpu.allocate<float>(kCount);
  gpu.launch(kernel, nullptr, out, in, 2.0f, kCount);
  gpu.launch(kernel, nullptr, out, out, 3.0f, kCount);
  print(gpu.read(out, kCount));
  gpu.release(out);
}

struct Pair {
  float* out;
  int count;
  const float* in;
};

void in_struct(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale_pair", +[](Pair pair, float by) { scale(pair.out, pair.in, by, pair.count); });
  float* in = gpu.make<float>(ramp(kCount));
  float* out = gpu.allocate<float>(kCount);
  Pair pair;
  std::memset(static_cast<void*>(&pair), 0, sizeof(pair));
  pair.out = out + 500;  // in the middle
  pair.count = 500;
  pair.in = in;
  gpu.launch(kernel, nullptr, pair, 2.0f);
  gpu.synchronize();
}

void in_extra(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  float* out = gpu.allocate<float>(kCount);
  struct {
    float* out;
    const float* in;
    float by;
    int count;
  } block = {out, in, 2.0f, kCount};
  size_t size = sizeof(block);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
  GPU_OK(gpu.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra));
  gpu.synchronize();
}

// A parameter of 8 bytes that is a number, equal in all processes.
void with_number(Gpu& gpu) {
  const auto kernel = gpu.kernel("seeded", +[](float* out, unsigned long long seed) { out[0] = static_cast<float>(seed % 97); });
  float* out = gpu.allocate<float>(4);
  const char* seed = std::getenv("SEED");
  gpu.launch(kernel, nullptr, out, seed ? std::strtoull(seed, nullptr, 10) : 0x300000400ull);
  gpu.synchronize();
}

// A struct of which only a part is filled in; the rest holds an address of the program's own memory. In the last step the
// driver has come to know of that memory, without a call that anybody saw.
struct PartlyFilled {
  float* out;
  const void* rest[6];
};
void own_memory_in_struct(Gpu& gpu) {
  const auto kernel = gpu.kernel("partly", +[](PartlyFilled one) { one.out[0] += 1; });
  float* out = gpu.make<float>(ramp(4));
  char* own = static_cast<char*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  PartlyFilled one;
  std::memset(static_cast<void*>(&one), 0, sizeof(one));
  one.out = out;
  for (int step = 0; step < 3; ++step) {
    forkpoint_step_begin(step);
    if (step == 2) gpu.find<decltype(fake_cuda_adopt)>("fake_cuda_adopt")(own, 4096);
    for (int i = 0; i < 5; ++i) {
      one.rest[i] = own + 64 * i;
      gpu.launch(kernel, nullptr, one);
      one.rest[i] = nullptr;
    }
  }
  gpu.synchronize();
}

void reused_address(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  for (int i = 0; i < 3; ++i) {
    float* in = gpu.make<float>(ramp(kCount));
    gpu.launch(kernel, nullptr, in, in, 2.0f, kCount);
    gpu.synchronize();
    gpu.release(in);
  }
}

void copies(Gpu& gpu) {
  float* large = gpu.allocate<float>(4 << 20);  // 16 MiB
  float* small = gpu.make<float>(ramp(kCount));
  GPU_OK(gpu.driver().cuMemcpyDtoD_(Gpu::address(large + 256), Gpu::address(small), kCount * sizeof(float)));
  GPU_OK(gpu.driver().cuMemcpyAsync_(Gpu::address(small), Gpu::address(large + 256), 400, nullptr));
  GPU_OK(gpu.driver().cuMemsetD32_(Gpu::address(small), 7, 10));
  print(gpu.read(large + 256, kCount));
}

// After a copy that the host waits for, the source may change on a stream that nothing orders behind the copy's.
void overwritten(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* values = gpu.make<float>(ramp(kCount));
  CUstream other = gpu.stream();
  print(gpu.read(values, kCount));
  gpu.launch(kernel, other, values, values, 2.0f, kCount);
  gpu.synchronize(other);
  float* copy = gpu.make<float>(ramp(kCount));
  gpu.launch(kernel, other, copy, copy, 2.0f, kCount);
  gpu.synchronize(other);
}

void ordered(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  float* out = gpu.allocate<float>(kCount);
  CUstream first = gpu.stream(), second = gpu.stream();
  gpu.launch(kernel, first, out, in, 2.0f, kCount);
  gpu.order(first, second);
  gpu.launch(kernel, second, out, out, 2.0f, kCount);
  gpu.synchronize(second);
}

void graph(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  const auto add = gpu.kernel("add_one", +[](float* out, int count) { for (int i = 0; i < count; ++i) out[i] += 1; });
  float* values = gpu.make<float>(ramp(kCount));
  CUstream stream = gpu.stream();
  CUgraphExec executable = gpu.capture(stream, [&] {
    gpu.launch(kernel, stream, values, values, 2.0f, kCount);
    gpu.launch(add, stream, values, kCount);
  });
  for (int i = 0; i < 3; ++i) gpu.replay(executable, stream);
  gpu.synchronize(stream);
  print(gpu.read(values, kCount));
}

void graph_by_hand(Gpu& gpu) {
  const auto add = gpu.kernel("add_one", +[](float* out, int count) { for (int i = 0; i < count; ++i) out[i] += 1; });
  float* values = gpu.make<float>(ramp(kCount));
  int count = kCount;
  void* params[] = {&values, &count};
  CUDA_KERNEL_NODE_PARAMS node = {};
  node.func = add.function;
  node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1;
  node.kernelParams = params;
  CUgraph built = nullptr;
  CUgraphNode added = nullptr;
  CUgraphExec executable = nullptr;
  GPU_OK(gpu.driver().cuGraphCreate_(&built, 0));
  GPU_OK(gpu.driver().cuGraphAddKernelNode_(&added, built, nullptr, 0, &node));
  GPU_OK(gpu.driver().cuGraphInstantiate_(&executable, built, 0));
  gpu.replay(executable, nullptr);
  gpu.synchronize();
}

void address_table(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale_all", +[](float** table, int tables) {
    for (int i = 0; i < tables; ++i) scale(table[i], table[i], 2.0f, kCount);
  });
  std::vector<float*> table;
  for (int i = 0; i < 4; ++i) table.push_back(gpu.make<float>(ramp(kCount)));
  float** on_device = gpu.make<float*>(table);
  gpu.launch(kernel, nullptr, on_device, 4);
  gpu.synchronize();
}

int timing = 0;  // what no two launches have alike

void unstable(Gpu& gpu) {
  const auto kernel = gpu.kernel("unstable_sum", +[](float* out, const float* in) {
    out[0] += in[0] + static_cast<float>(timing++ % 3);
  });
  const auto stable = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  float* out = gpu.make<float>({100});
  gpu.launch(stable, nullptr, in, in, 2.0f, kCount);
  gpu.launch(kernel, nullptr, out, in);
  gpu.launch(stable, nullptr, in, in, 2.0f, kCount);
  print(gpu.read(out, 1));
  print(gpu.read(in, kCount));
}

void record_output(float* data) {
  const int64_t shape = kCount;
  forkpoint_tensor_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.name = "output";
  desc.role = FORKPOINT_ROLE_OUTPUT;
  desc.dtype = FORKPOINT_F32;
  desc.ndim = 1;
  desc.shape = &shape;
  desc.data = data;
  desc.device = FORKPOINT_CUDA;
  forkpoint_tensor(&desc);
}

void steps(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  for (int step = 0; step < 4; ++step) {
    forkpoint_step_begin(step);
    forkpoint_scope_begin(FORKPOINT_FORWARD, "net.fc", nullptr);
    gpu.launch(kernel, nullptr, in, in, 2.0f, kCount);
    record_output(in);
    forkpoint_scope_end();
    forkpoint_step_end();
  }
  gpu.synchronize();
}

// As PyTorch's caching allocator does: one large allocation, blocks within it.
void blocks(Gpu& gpu) {
  struct Device {
    signed char type, index;
  };
  using Report = void (*)(void*, int64_t, size_t, size_t, Device);
  const auto report = reinterpret_cast<Report>(dlsym(RTLD_DEFAULT, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"));
  const auto kernel = gpu.kernel("scale", scale);
  float* segment = gpu.allocate<float>(5 << 20);  // 20 MiB
  const Device cuda = {1, 0};
  float* in = segment + 1024;
  float* out = segment + 4096;
  if (report) report(in, 4096, 0, 0, cuda), report(out, 8192, 0, 0, cuda);
  gpu.launch(kernel, nullptr, out, in, 2.0f, kCount);
  if (report) report(in, -4096, 0, 0, cuda);
  gpu.launch(kernel, nullptr, out, in, 2.0f, 10);  // one that nobody holds any more
  gpu.synchronize();
}

void failing(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  gpu.find<decltype(fake_cuda_set_kernel_error)>("fake_cuda_set_kernel_error")("scale", CUDA_ERROR_INVALID_VALUE);
  float* out = in;
  float by = 2;
  int count = kCount;
  void* params[] = {&out, &in, &by, &count};
  const CUresult result = gpu.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr);
  std::printf("%d\n", result);
}

// More steps than there is room for in any table of ours, with memory that comes and goes.
void many(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  for (int step = 0; step < 8000; ++step) {
    forkpoint_step_begin(step);
    float* memory = gpu.allocate<float>(100);
    for (int i = 0; i < 20; ++i) gpu.launch(kernel, nullptr, memory, memory, 0.0f, 100);
    gpu.release(memory);
    forkpoint_step_end();
    if (step == 4500 || step == 7999) {  // between two doublings of the index of steps
      long pages = 0, resident = 0;
      if (FILE* file = std::fopen("/proc/self/statm", "r")) {
        if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
        std::fclose(file);
      }
      std::printf("%ld\n", resident * 4);
    }
  }
}

// A module that comes and goes with each launch; the last hundred may do something else.
void modules(Gpu& gpu) {
  gpu.kernel("scale", scale);
  const char* last = std::getenv("LAST");
  float* in = gpu.make<float>(ramp(kCount));
  for (int i = 0; i < 50'000; ++i) {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    GPU_OK(gpu.driver().cuModuleLoadData_(&module, kFakeImage));
    GPU_OK(gpu.driver().cuModuleGetFunction_(&function, module, "scale"));
    float by = last && i >= 49'900 ? std::strtof(last, nullptr) : 1.0f;
    int count = 4;
    void* params[] = {&in, &in, &by, &count};
    GPU_OK(gpu.driver().cuLaunchKernel_(function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
    GPU_OK(gpu.driver().cuModuleUnload_(module));
  }
  gpu.synchronize();
}

// Ten rows of 400 bytes, 512 apart; what lies between them is never written.
void pitched(Gpu& gpu) {
  const auto fill = gpu.kernel("fill", +[](float* out) {
    for (int row = 0; row < 10; ++row) {
      for (int i = 0; i < 100; ++i) out[row * 128 + i] = static_cast<float>(row + i);
    }
  });
  float* memory = gpu.allocate<float>(128 * 10);
  gpu.launch(fill, nullptr, memory);
  std::vector<float> host(1000);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = Gpu::address(memory);
  copy.srcPitch = 512;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = host.data();
  copy.dstPitch = copy.WidthInBytes = 400;
  copy.Height = 10;
  GPU_OK(gpu.driver().cuMemcpy2DAsync_(&copy, nullptr));
  gpu.synchronize();
  print(host);
}

void many_records(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  for (int step = 0; step < 100; ++step) {
    forkpoint_step_begin(step);
    for (int i = 0; i < 1000; ++i) record_output(in);
    gpu.launch(kernel, nullptr, in, in, 1.0f, kCount);
    forkpoint_step_end();
  }
  gpu.synchronize();
}

// A graph's launch, whose nodes are rows too, and then three kernels.
void after_graph(Gpu& gpu) {
  const auto add = gpu.kernel("add_one", +[](float* out, int count) { for (int i = 0; i < count; ++i) out[i] += 1; });
  const Kernel<float*, const float*, float, int> kernels[] = {gpu.kernel("alpha", scale), gpu.kernel("beta", scale),
                                                              gpu.kernel("gamma", scale)};
  float* values = gpu.make<float>(ramp(kCount));
  CUstream stream = gpu.stream();
  CUgraphExec executable = gpu.capture(stream, [&] { gpu.launch(add, stream, values, kCount); });
  forkpoint_step_begin(0);
  gpu.replay(executable, stream);
  for (const auto& kernel : kernels) gpu.launch(kernel, stream, values, values, 2.0f, kCount);
  gpu.synchronize(stream);
  forkpoint_step_end();
}

// A kernel that destroys the context: nothing finishes any more.
void broken(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  gpu.launch(kernel, nullptr, in, in, 1.0f, kCount);
  gpu.find<decltype(fake_cuda_set_stuck)>("fake_cuda_set_stuck")(1);
  gpu.launch(kernel, nullptr, in, in, 1.0f, kCount);
  gpu.find<decltype(fake_cuda_set_launch_error)>("fake_cuda_set_launch_error")(CUDA_ERROR_ILLEGAL_ADDRESS);
  float by = 1;
  int count = kCount;
  void* params[] = {&in, &in, &by, &count};
  for (int i = 0; i < 3; ++i) {
    std::printf("%d\n", gpu.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
  }
  std::fflush(stdout);
  _exit(0);
}

// The entry points of programs whose default stream is a thread's own.
void per_thread_capture(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!cuda) cuda = dlopen(std::getenv("LIBCUDA"), RTLD_NOW);
  using Begin = CUresult (*)(CUstream, CUstreamCaptureMode);
  using End = CUresult (*)(CUstream, CUgraph*);
  using Launch = CUresult (*)(CUgraphExec, CUstream);
  const auto begin = reinterpret_cast<Begin>(dlsym(cuda, "cuStreamBeginCapture_v2_ptsz"));
  const auto end = reinterpret_cast<End>(dlsym(cuda, "cuStreamEndCapture_ptsz"));
  const auto launch = reinterpret_cast<Launch>(dlsym(cuda, "cuGraphLaunch_ptsz"));
  float by = 2;
  int count = kCount;
  void* params[] = {&in, &in, &by, &count};
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
  GPU_OK(begin(nullptr, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  GPU_OK(gpu.driver().cuLaunchKernel_ptsz_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
  GPU_OK(end(nullptr, &graph));
  GPU_OK(gpu.driver().cuGraphInstantiate_(&executable, graph, 0));
  GPU_OK(launch(executable, nullptr));
  gpu.synchronize();
}

// Steps that are numbered anew in each epoch; memory goes where none of them is recorded.
void epochs(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* memory = gpu.allocate<float>(4 << 20);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int step = 0; step < 4; ++step) {
      forkpoint_step_begin(step);
      if (step == 1) gpu.launch(kernel, nullptr, memory, memory, 1.0f, 10);
      gpu.synchronize();
      if (epoch == 0 && step == 3) {
        gpu.release(memory);
        memory = gpu.allocate<float>(10);
      }
      forkpoint_step_end();
    }
  }
}

void failing_often(Gpu& gpu) {
  const auto kernel = gpu.kernel("scale", scale);
  float* in = gpu.make<float>(ramp(kCount));
  const auto set_error = gpu.find<decltype(fake_cuda_set_kernel_error)>("fake_cuda_set_kernel_error");
  set_error("scale", CUDA_ERROR_INVALID_VALUE);
  float by = 1;
  int count = kCount, failed = 0;
  void* params[] = {&in, &in, &by, &count};
  for (int i = 0; i < 10'000; ++i) {
    failed += gpu.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr) != CUDA_SUCCESS;
  }
  set_error(nullptr, 0);
  std::printf("%d\n", failed);
  gpu.launch(kernel, nullptr, in, in, 1.0f, kCount);
  gpu.synchronize();
}

void second_rank(Gpu& gpu) {
  forkpoint_rank(1, 2);
  plain(gpu);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  const std::map<std::string, std::function<void(Gpu&)>> scenarios = {
      {"plain", plain},         {"struct", in_struct}, {"own_memory_in_struct", own_memory_in_struct}, {"extra", in_extra},       {"number", with_number},
      {"reused", reused_address}, {"copies", copies},  {"ordered", ordered},      {"graph", graph},
      {"graph_by_hand", graph_by_hand}, {"table", address_table}, {"unstable", unstable}, {"steps", steps},
      {"blocks", blocks},       {"failing", failing},  {"many", many},
      {"overwritten", overwritten}, {"modules", modules}, {"pitched", pitched}, {"many_records", many_records},
      {"after_graph", after_graph}, {"broken", broken}, {"per_thread_capture", per_thread_capture}, {"epochs", epochs},
      {"failing_often", failing_often}, {"second_rank", second_rank}};
  const auto scenario = scenarios.find(argv[2]);
  if (scenario == scenarios.end()) return 97;
  Gpu gpu(argv[1]);
  GPU_OK(gpu.driver().cuInit_(0));
  scenario->second(gpu);
  return 0;
}
