// A CUDA trainer as far as the probe can tell. Each tensor is recorded twice: NAME from the device and NAME.host from host
// memory with the same bytes, so that a test compares the two. Includes nothing of the tool but forkpoint.h.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "probes/forkpoint.h"

namespace {

#define CHECK_CUDA(call)                                                                       \
  do {                                                                                         \
    const cudaError_t check_error = (call);                                                    \
    if (check_error != cudaSuccess) {                                                          \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(check_error));     \
      exit(90);                                                                                \
    }                                                                                          \
  } while (false)

std::vector<uint8_t> random_bytes(size_t count, uint64_t seed) {
  std::vector<uint8_t> bytes(count);
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (uint8_t& byte : bytes) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return bytes;
}

struct Form {
  std::string name;
  int dtype = FORKPOINT_F32;
  std::vector<int64_t> shape, strides, global_shape, global_offset;
  int64_t first_element = 0;
  size_t element_bytes = 4;
};

// name: alive until the descriptor was used.
forkpoint_tensor_desc describe(const Form& form, const char* name, const void* base, int device, void* stream) {
  forkpoint_tensor_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.name = name;
  desc.data = static_cast<const char*>(base) + form.first_element * static_cast<int64_t>(form.element_bytes);
  desc.dtype = form.dtype;
  desc.role = FORKPOINT_ROLE_OUTPUT;
  desc.device = device;
  desc.ndim = static_cast<int32_t>(form.shape.size());
  desc.shape = form.shape.data();
  if (!form.strides.empty()) desc.strides = form.strides.data();
  if (!form.global_shape.empty()) desc.global_shape = form.global_shape.data();
  if (!form.global_offset.empty()) desc.global_offset = form.global_offset.data();
  desc.stream = stream;
  return desc;
}

// The bytes go to the device, are recorded there and overwritten at once, all on `stream`; then the host's copy.
void record_both(const Form& form, size_t bytes, cudaStream_t stream, uint64_t seed) {
  const std::vector<uint8_t> host = random_bytes(bytes, seed);
  void* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, bytes));
  CHECK_CUDA(cudaMemcpyAsync(device, host.data(), bytes, cudaMemcpyHostToDevice, stream));
  const forkpoint_tensor_desc on_device = describe(form, form.name.c_str(), device, FORKPOINT_CUDA, stream);
  forkpoint_tensor(&on_device);
  CHECK_CUDA(cudaMemsetAsync(device, 0xEE, bytes, stream));
  const std::string host_name = form.name + ".host";
  const forkpoint_tensor_desc on_host = describe(form, host_name.c_str(), host.data(), FORKPOINT_HOST, nullptr);
  forkpoint_tensor(&on_host);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaFree(device));
}

constexpr size_t kElementBytes[19] = {1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 4, 8, 1, 1, 1, 8, 16, 1};

int dtypes() {
  cudaStream_t streams[4] = {nullptr, nullptr, cudaStreamLegacy, cudaStreamPerThread};
  CHECK_CUDA(cudaStreamCreate(&streams[0]));
  CHECK_CUDA(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking));
  forkpoint::Step step(0);
  int count = 0;
  for (int dtype = 0; dtype < 19; ++dtype) {
    for (int64_t elements : {1, 7, 1000, 100'003}) {
      Form form;
      form.name = "dtype" + std::to_string(dtype) + "." + std::to_string(elements);
      form.dtype = dtype;
      form.element_bytes = kElementBytes[dtype];
      form.shape = {elements};
      record_both(form, static_cast<size_t>(elements) * form.element_bytes, streams[count % 4], static_cast<uint64_t>(count));
      ++count;
    }
  }
  return 0;
}

int views() {
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  forkpoint::Step step(0);
  const std::vector<Form> forms = {
      {"transposed", FORKPOINT_F32, {300, 200}, {1, 300}, {}, {}, 0, 4},
      {"rows", FORKPOINT_BF16, {100, 64}, {1000, 1}, {}, {}, 3, 2},
      {"reversed", FORKPOINT_F32, {100, 64}, {-64, 1}, {}, {}, 99 * 64, 4},
      {"broadcast", FORKPOINT_F64, {50, 70}, {0, 1}, {}, {}, 0, 8},
      {"columns", FORKPOINT_U8, {1000}, {17}, {}, {}, 5, 1},
      {"permuted", FORKPOINT_F16, {8, 16, 32}, {1, 256, 8}, {}, {}, 0, 2},
      {"shard", FORKPOINT_F32, {64, 32}, {}, {64, 128}, {0, 96}, 0, 4},
      {"strided shard", FORKPOINT_BF16, {64, 32}, {100, 1}, {128, 128}, {64, 32}, 7, 2},
      {"odd shard", FORKPOINT_U8, {33, 7}, {}, {99, 77}, {11, 13}, 1, 1},
      {"misaligned", FORKPOINT_F32, {12'345}, {}, {}, {}, 1, 4},
  };
  for (size_t i = 0; i < forms.size(); ++i) record_both(forms[i], 1 << 20, stream, 100 + i);
  Form large;
  large.name = "large";
  large.dtype = FORKPOINT_BF16;
  large.element_bytes = 2;
  large.shape = {1 << 26};
  record_both(large, size_t{1} << 27, stream, 7);
  return 0;
}

int memory_kinds() {
  forkpoint::Step step(0);
  const std::vector<uint8_t> bytes = random_bytes(4096, 9);
  Form form;
  form.shape = {1024};
  const auto record_memory = [&](const char* name, void* memory) {
    memcpy(memory, bytes.data(), bytes.size());
    const forkpoint_tensor_desc desc = describe(form, name, memory, FORKPOINT_CUDA, nullptr);
    forkpoint_tensor(&desc);
    const std::string host_name = std::string(name) + ".host";
    const forkpoint_tensor_desc host = describe(form, host_name.c_str(), bytes.data(), FORKPOINT_HOST, nullptr);
    forkpoint_tensor(&host);
  };
  void *pinned = nullptr, *managed = nullptr;
  CHECK_CUDA(cudaMallocHost(&pinned, 4096));
  CHECK_CUDA(cudaMallocManaged(&managed, 4096));
  record_memory("pinned", pinned);
  record_memory("managed", managed);
  void* pooled = nullptr;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaMallocAsync(&pooled, 4096, stream));
  CHECK_CUDA(cudaMemcpyAsync(pooled, bytes.data(), 4096, cudaMemcpyHostToDevice, stream));
  const forkpoint_tensor_desc desc = describe(form, "pooled", pooled, FORKPOINT_CUDA, stream);
  forkpoint_tensor(&desc);
  const forkpoint_tensor_desc host = describe(form, "pooled.host", bytes.data(), FORKPOINT_HOST, nullptr);
  forkpoint_tensor(&host);
  CHECK_CUDA(cudaFreeAsync(pooled, stream));
  CHECK_CUDA(cudaDeviceSynchronize());
  return 0;
}

int bad_addresses() {
  forkpoint::Step step(0);
  std::vector<float> heap(1024);
  void* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, 4096));
  Form form;
  form.shape = {1024};
  for (const void* address : {reinterpret_cast<const void*>(4096), static_cast<const void*>(heap.data())}) {
    const forkpoint_tensor_desc desc = describe(form, "bad", address, FORKPOINT_CUDA, nullptr);
    forkpoint_tensor(&desc);
  }
  form.shape = {int64_t{1} << 40};  // begins inside an allocation and ends far outside
  const forkpoint_tensor_desc beyond = describe(form, "beyond", device, FORKPOINT_CUDA, nullptr);
  forkpoint_tensor(&beyond);
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaGetLastError());
  return 0;
}

int capture() {
  cudaStream_t stream = nullptr, other = nullptr;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  void* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, 4096));
  CHECK_CUDA(cudaMemset(device, 1, 4096));
  CHECK_CUDA(cudaDeviceSynchronize());
  Form form;
  form.shape = {1024};
  forkpoint::Step step(0);
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(cudaMemsetAsync(device, 2, 4096, stream));
  const forkpoint_tensor_desc captured = describe(form, "captured", device, FORKPOINT_CUDA, stream);
  forkpoint_tensor(&captured);
  // The first CUDA record of this process, in the middle of a capture in global mode on another stream.
  const forkpoint_tensor_desc beside = describe(form, "beside", device, FORKPOINT_CUDA, other);
  forkpoint_tensor(&beside);
  cudaGraph_t graph = nullptr;
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 3; ++i) CHECK_CUDA(cudaGraphLaunch(executable, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  uint8_t byte = 0;
  CHECK_CUDA(cudaMemcpy(&byte, device, 1, cudaMemcpyDeviceToHost));
  return byte == 2 ? 0 : 1;
}

int threads() {
  forkpoint::Step step(0);
  std::vector<std::thread> workers;
  for (int t = 0; t < 4; ++t) {
    workers.emplace_back([t] {
      cudaStream_t stream = nullptr;
      CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (int i = 0; i < 25; ++i) {
        Form form;
        form.name = "thread" + std::to_string(t) + "." + std::to_string(i);
        form.shape = {1000 + i};
        record_both(form, 4 * (1000 + static_cast<size_t>(i)), stream, static_cast<uint64_t>(t * 100 + i));
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return 0;
}

// Enqueues without ever waiting, then leaves as `how` says.
int leave(const char* how) {
  constexpr int kRecords = 2000;
  void* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, 64 << 20));
  CHECK_CUDA(cudaMemset(device, 3, 64 << 20));
  Form form;
  form.shape = {16 << 20};
  forkpoint::Step step(0);
  for (int i = 0; i < kRecords; ++i) {
    const forkpoint_tensor_desc desc = describe(form, "value", device, FORKPOINT_CUDA, nullptr);
    forkpoint_tensor(&desc);
  }
  if (strcmp(how, "_exit") == 0) _exit(0);
  if (strcmp(how, "exit") == 0) exit(0);
  if (strcmp(how, "reset") == 0) CHECK_CUDA(cudaDeviceReset());
  return 0;
}

int reset_and_go_on() {
  forkpoint::Step step(0);
  for (int round = 0; round < 3; ++round) {
    Form form;
    form.name = "round" + std::to_string(round);
    form.shape = {1000};
    record_both(form, 4000, nullptr, static_cast<uint64_t>(round));
    CHECK_CUDA(cudaDeviceReset());
  }
  return 0;
}

int forks() {
  forkpoint_step_begin(0);
  Form form;
  form.shape = {1000};
  form.name = "before";
  record_both(form, 4000, nullptr, 1);
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const forkpoint_tensor_desc desc = describe(form, "child", reinterpret_cast<void*>(4096), FORKPOINT_CUDA, nullptr);
      forkpoint_tensor(&desc);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return 1;
  }
  form.name = "after";
  record_both(form, 4000, nullptr, 2);
  forkpoint_step_end();
  return 0;
}

// On every device, while device 0 is the current one.
int devices() {
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  forkpoint::Step step(0);
  for (int device = 0; device < count; ++device) {
    const std::vector<uint8_t> bytes = random_bytes(40'000, static_cast<uint64_t>(device));
    void* memory = nullptr;
    CHECK_CUDA(cudaSetDevice(device));
    CHECK_CUDA(cudaMalloc(&memory, bytes.size()));
    CHECK_CUDA(cudaMemcpy(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    cudaStream_t stream = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaSetDevice(0));
    for (cudaStream_t used : {stream, cudaStream_t{}}) {
      Form form;
      form.shape = {10'000};
      const std::string name = (used ? "device" : "default stream of device") + std::to_string(device);
      const forkpoint_tensor_desc on_device = describe(form, name.c_str(), memory, FORKPOINT_CUDA, used);
      forkpoint_tensor(&on_device);
      const std::string host_name = name + ".host";
      const forkpoint_tensor_desc on_host = describe(form, host_name.c_str(), bytes.data(), FORKPOINT_HOST, nullptr);
      forkpoint_tensor(&on_host);
    }
    int current = -1;
    CHECK_CUDA(cudaGetDevice(&current));
    if (current != 0) return 1;
  }
  return 0;
}

// What a record costs its caller: microseconds, on stdout.
int cost() {
  void* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, 1 << 20));
  CHECK_CUDA(cudaMemset(device, 0, 1 << 20));
  Form form;
  form.shape = {4096};
  forkpoint::Step step(0);
  const forkpoint_tensor_desc desc = describe(form, "value", device, FORKPOINT_CUDA, nullptr);
  for (int i = 0; i < 100; ++i) forkpoint_tensor(&desc);
  CHECK_CUDA(cudaDeviceSynchronize());
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < 500; ++i) forkpoint_tensor(&desc);
    best = std::min(best, std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 500);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  printf("%.3f\n", best);
  return 0;
}

int count_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  printf("%d\n", count);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scenario = argc > 1 ? argv[1] : "";
  const std::map<std::string, int (*)()> scenarios = {
      {"count", count_devices}, {"dtypes", dtypes}, {"views", views}, {"memory_kinds", memory_kinds},
      {"bad_addresses", bad_addresses}, {"capture", capture}, {"threads", threads}, {"reset_and_go_on", reset_and_go_on},
      {"forks", forks}, {"devices", devices}, {"cost", cost}};
  if (scenario == "leave" && argc > 2) return leave(argv[2]);
  const auto found = scenarios.find(scenario);
  return found == scenarios.end() ? 98 : found->second();
}
