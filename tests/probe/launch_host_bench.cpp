// What a recorded launch costs its host, on the fakes of libcuda and CUPTI: nothing here is the driver's own time, so
// that what the probe adds shows. Prints `bench NAME VALUE GOAL -`; with the argument `measure` it is the program that
// is measured.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/probe/fake_gpu_program.h"
#include "tests/probe/harness.h"

using forkpoint::fake_gpu::Gpu;
using namespace forkpoint::probe_test;

namespace {

constexpr int kLaunches = 4000, kRounds = 7, kBuffers = 2000;

// As PyTorch's elementwise kernels are handed it: pointers, and a table of which only a part was ever filled in. The
// rest holds what lay on the stack: addresses of the program's own memory.
struct Elementwise {
  float* out;
  const float* in;
  const void* stale[80];
};

// Of this thread alone, and only while it ran.
double own_microseconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

void measure() {
  Gpu gpu(client_path("libcuda.so.1"));
  const auto plain = gpu.kernel(
      "plain", +[](float*, const float*, int) {});
  const auto elementwise = gpu.kernel(
      "elementwise", +[](Elementwise, int) {});
  std::vector<float*> buffers;
  for (int i = 0; i < kBuffers; ++i) buffers.push_back(gpu.allocate<float>(16));
  std::vector<std::unique_ptr<char[]>> heap;
  for (int i = 0; i < 600; ++i) heap.push_back(std::make_unique<char[]>(300));
  const auto best_of = [&](auto launch) {
    double best = 1e9;
    for (int round = 0; round < kRounds; ++round) {
      const double begin = own_microseconds();
      for (int i = 0; i < kLaunches; ++i) launch(i);
      best = std::min(best, (own_microseconds() - begin) / kLaunches);
      gpu.synchronize();
    }
    return best;
  };
  const double two = best_of([&](int i) {
    gpu.launch(plain, nullptr, buffers[static_cast<size_t>(i % kBuffers)],
               buffers[static_cast<size_t>((i * 7 + 1) % kBuffers)], i);
  });
  const double stale = best_of([&](int i) {
    Elementwise one;
    one.out = buffers[static_cast<size_t>(i % kBuffers)], one.in = buffers[static_cast<size_t>((i * 7 + 1) % kBuffers)];
    for (size_t k = 0; k < 80; ++k)
      one.stale[k] = k % 4 == 0 ? heap[(static_cast<size_t>(i) * 20 + k) % heap.size()].get() + k : nullptr;
    gpu.launch(elementwise, nullptr, one, i);
  });
  // Memory that comes and goes among a few thousand other allocations, as each tensor's does.
  const double memory = best_of([&](int i) {
    float*& buffer = buffers[static_cast<size_t>(i * 37 % kBuffers)];
    GPU_OK(gpu.driver().cuMemFreeAsync_(Gpu::address(buffer), nullptr));
    CUdeviceptr address = 0;
    GPU_OK(gpu.driver().cuMemAllocAsync_(&address, 64, nullptr));
    buffer = reinterpret_cast<float*>(address);
  });
  std::printf("%.3f %.3f %.3f\n", two, stale, memory);
}

void report(const char* name, double value) { std::printf("bench %s %.2f 5 -\n", name, value); }

}  // namespace

int main(int count, char** words) {
  if (count > 1 && std::strcmp(words[1], "measure") == 0) return measure(), 0;
  const TempFolder folder;
  const auto plain = run_program({words[0], "measure"}, {});
  const auto recorded = run_program(
      {words[0], "measure"},
      under_probe(folder.run(), {{"FORKPOINT_LEVEL", "launch"}, {"FORKPOINT_CUPTI", client_path("libcupti.so.13")}}));
  double before[3] = {}, after[3] = {};
  if (std::sscanf(plain.out.c_str(), "%lf %lf %lf", &before[0], &before[1], &before[2]) != 3 ||
      std::sscanf(recorded.out.c_str(), "%lf %lf %lf", &after[0], &after[1], &after[2]) != 3) {
    std::fprintf(stderr, "%s%s", plain.err.c_str(), recorded.err.c_str());
    return 1;
  }
  report("fake_launch_host_us", after[0] - before[0]);
  report("fake_launch_host_us_stale_words", after[1] - before[1]);
  report("fake_memory_host_us", after[2] - before[2]);
  return 0;
}
