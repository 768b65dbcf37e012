// Programs that make it hard to record their launches, on the fake libcuda: launch_trouble_client LIBCUDA SCENARIO.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "probes/forkpoint.h"
#include "tests/fakes/fake_cupti.h"
#include "tests/probe/fake_gpu_program.h"

using forkpoint::fake_gpu::Gpu;

namespace {

constexpr int kCount = 1000;

void add_one(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] += 1;
}

// The value of each launch of a kernel that works in place.
void one_launch(Gpu& gpu) {
  const auto kernel = gpu.kernel("add_one", add_one);
  float* values = gpu.make<float>(std::vector<float>(kCount, 1));
  gpu.launch(kernel, nullptr, values, kCount);
  std::printf("%.0f\n", gpu.read(values, 1)[0]);
}

// In place, behind a table of addresses.
void table_in_place(Gpu& gpu) {
  const auto kernel = gpu.kernel("add_to_all", +[](float** table, int tables) {
    for (int i = 0; i < tables; ++i) add_one(table[i], kCount);
  });
  std::vector<float*> table;
  for (int i = 0; i < 4; ++i) table.push_back(gpu.make<float>(std::vector<float>(kCount, 1)));
  float** on_device = gpu.make<float*>(table);
  forkpoint_step_begin(0);
  gpu.launch(kernel, nullptr, on_device, 4);
  gpu.synchronize();
  forkpoint_step_end();
  std::printf("%.0f\n", gpu.read(table[3], 1)[0]);
}

// In place, further behind the pointer than the window of a block that nobody holds any more.
void past_the_window(Gpu& gpu) {
  struct Device {
    signed char type, index;
  };
  using Report = void (*)(void*, int64_t, size_t, size_t, Device);
  const auto report = reinterpret_cast<Report>(dlsym(RTLD_DEFAULT, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"));
  const auto kernel = gpu.kernel("add_far_behind", +[](float* values) { values[1 << 20] += 1; });
  float* segment = gpu.allocate<float>(5 << 20);  // 20 MiB
  if (report) report(segment, 4096, 0, 0, {1, 0}), report(segment, -4096, 0, 0, {1, 0});
  GPU_OK(gpu.driver().cuMemsetD32_(Gpu::address(segment), 0, 5 << 20));
  forkpoint_step_begin(0);
  gpu.launch(kernel, nullptr, segment);
  gpu.synchronize();
  forkpoint_step_end();
  std::printf("%.0f\n", gpu.read(segment + (1 << 20), 1)[0]);
}

struct Many {
  float* buffers[100];
};

void launch_many(Gpu& gpu, int launches, CUstream stream) {
  const auto kernel = gpu.kernel("add_to_each", +[](Many many) {
    for (float* buffer : many.buffers) buffer[0] += 1;
  });
  Many many;
  for (float*& buffer : many.buffers) buffer = gpu.make<float>({0, 0, 0, 0});
  for (int i = 0; i < launches; ++i) gpu.launch(kernel, stream, many);
  gpu.synchronize(stream);
  std::printf("%.0f\n", gpu.read(many.buffers[99], 1)[0]);
}

void mode(Gpu& gpu, int wanted) { gpu.find<decltype(fake_cuda_set_mode)>("fake_cuda_set_mode")(wanted); }

// Launches run ahead of the device, as those of an optimizer over many tensors do.
void many_buffers(Gpu& gpu) {
  mode(gpu, kFakeDeferred);
  launch_many(gpu, 600, gpu.stream());
}
// And further ahead than there is room for, before the device begins.
void far_ahead(Gpu& gpu) {
  const auto kernel = gpu.kernel("add_to_each", +[](Many many) { many.buffers[0][0] += 1; });
  Many many;
  float* buffer = gpu.make<float>({0, 0, 0, 0});
  for (float*& one : many.buffers) one = buffer;
  CUstream stream = gpu.stream();
  mode(gpu, kFakeDeferred);
  std::thread device([&] {
    usleep(1'000'000);
    gpu.find<decltype(fake_cuda_finish)>("fake_cuda_finish")();
  });
  for (int i = 0; i < 6000; ++i) gpu.launch(kernel, stream, many);
  device.join();
  std::printf("%.0f\n", gpu.read(buffer, 1)[0]);
}
void never_done(Gpu& gpu) {
  const auto kernel = gpu.kernel("add_to_each", +[](Many many) { many.buffers[0][0] += 1; });
  Many many;
  for (float*& buffer : many.buffers) buffer = gpu.allocate<float>(4);
  CUstream stream = gpu.stream();
  mode(gpu, kFakeDeferred);
  gpu.find<decltype(fake_cuda_set_stuck)>("fake_cuda_set_stuck")(1);
  for (int i = 0; i < 5000; ++i) gpu.launch(kernel, stream, many);
  std::printf("launched\n");
  std::fflush(stdout);
  _exit(0);
}

bool is_subscribed() {
  const char* path = std::getenv("FORKPOINT_CUPTI");
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  if (!library) return false;
  return reinterpret_cast<decltype(&fake_cupti_subscribed)>(dlsym(library, "fake_cupti_subscribed"))() != 0;
}

void launch_turns(Gpu& gpu) {
  const auto turn = gpu.kernel("turn", add_one);
  float* values = gpu.allocate<float>(kCount);
  for (int i = 0; i < 5; ++i) gpu.launch(turn, nullptr, values, kCount);
}
// Steps begin with a kernel, and the last wanted one is over: when is CUPTI free for others?
void free_for_others(Gpu& gpu) {
  launch_turns(gpu);
  forkpoint_micro_step(0);
  std::printf("%d\n", is_subscribed());
}
void free_at_exit(Gpu& gpu) {
  std::atexit([] { std::printf("%d\n", is_subscribed()); });
  launch_turns(gpu);
}

// Asks a stream and an event whether they are done; they are.
void ask(Gpu& gpu, CUstream stream, CUevent event) {
  GPU_OK(gpu.driver().cuStreamQuery_(stream));
  GPU_OK(gpu.driver().cuEventQuery_(event));
}
void watchdog(Gpu& gpu) {
  const auto kernel = gpu.kernel("add_one", add_one);
  float* values = gpu.allocate<float>(kCount);
  CUstream stream = gpu.stream();
  CUevent event = gpu.event();
  gpu.launch(kernel, stream, values, kCount);
  GPU_OK(gpu.driver().cuEventRecord_(event, stream));
  std::thread([&] { ask(gpu, stream, event); }).join();
  gpu.launch(kernel, gpu.stream(), values, kCount);
}
void own_questions(Gpu& gpu) {
  const auto kernel = gpu.kernel("add_one", add_one);
  float* values = gpu.allocate<float>(kCount);
  CUstream stream = gpu.stream();
  CUevent event = gpu.event();
  gpu.launch(kernel, stream, values, kCount);
  GPU_OK(gpu.driver().cuEventRecord_(event, stream));
  ask(gpu, stream, event);
  gpu.launch(kernel, gpu.stream(), values, kCount);
}

void stream_value(Gpu& gpu) {
  float* values = gpu.allocate<float>(kCount);
  const auto write = gpu.find<CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned int)>("cuStreamWriteValue32_v2");
  GPU_OK(write(nullptr, Gpu::address(values), 7, 0));
}

// A launcher that never uses CUDA; its ranks are forks of it.
int forked_rank(const std::function<int()>& rank) {
  forkpoint_rank(0, 2);
  const pid_t child = fork();
  if (child == 0) {
    forkpoint_rank(1, 2);
    forkpoint_scalar("started", FORKPOINT_ROLE_OUTPUT, 1);
    std::exit(rank());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 96;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  const std::map<std::string, std::function<void(Gpu&)>> scenarios = {
      {"one_launch", one_launch},       {"table_in_place", table_in_place}, {"past_the_window", past_the_window},
      {"many_buffers", many_buffers},   {"far_ahead", far_ahead},           {"never_done", never_done},
      {"free_for_others", free_for_others}, {"free_at_exit", free_at_exit}, {"watchdog", watchdog},
      {"own_questions", own_questions}, {"stream_value", stream_value}};
  const std::string name = argv[2];
  const auto run = [&](const std::string& scenario) {
    Gpu gpu(argv[1]);
    scenarios.at(scenario)(gpu);
    return 0;
  };
  if (name == "forked_rank") return forked_rank([&] { return run("one_launch"); });
  return scenarios.contains(name) ? run(name) : 97;
}
