// A "training" of three layers with a few launches each, on the fake libcuda; one launch of layer blocks.1 can be at fault:
//   launch_trainer LIBCUDA STEPS [other|drawn STEP]
//     other  in that step it gives another value for one element
//     drawn  from that step on each of its runs gives values of its own, as unordered additions do
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "probes/forkpoint.h"
#include "tests/probe/fake_gpu_program.h"

using namespace forkpoint::fake_gpu;

namespace {

constexpr int kCount = 256;
constexpr int kLayers = 3;
enum Fault { none, other, drawn };

void linear(float* out, const float* in, const float* weight, int count) {
  for (int i = 0; i < count; ++i) out[i] = weight[i] * in[i] + 0.5f;
}

void smooth(float* out, const float* in, int count, int fault) {
  for (int i = 0; i < count; ++i) out[i] = 0.25f * in[i] + 0.75f * in[(i + 1) % count];
  if (fault == other) out[17] *= 1.5f;
  static std::random_device device;
  for (int i = 0; fault == drawn && i < count; ++i) out[i] += 1e-5f * static_cast<float>(device() % 1024);
}

void update(float* weight, const float* out, int count) {
  for (int i = 0; i < count; ++i) weight[i] += 0.001f * out[i];
}

void record(const char* name, forkpoint_role role, const float* data) {
  forkpoint::tensor(name, role, data, {kCount}, FORKPOINT_CUDA, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 5) return 98;
  const int steps = std::atoi(argv[2]);
  const Fault fault = argc == 3 ? none : std::string(argv[3]) == "other" ? other : drawn;
  const int faulty = fault ? std::atoi(argv[4]) : -1;
  Gpu gpu(argv[1]);
  GPU_OK(gpu.driver().cuInit_(0));
  const auto linear_kernel = gpu.kernel("linear", linear);
  const auto smooth_kernel = gpu.kernel("smooth", smooth);
  const auto update_kernel = gpu.kernel("update", update);
  std::vector<float*> weights, outs;
  for (int k = 0; k < kLayers; ++k) {
    weights.push_back(gpu.make(std::vector<float>(kCount, 0.5f + 0.1f * static_cast<float>(k))));
    outs.push_back(gpu.allocate<float>(kCount));
  }
  float* hidden = gpu.allocate<float>(kCount);
  for (int step = 0; step < steps; ++step) {
    forkpoint_step_begin(step);
    std::vector<float> batch(kCount);
    for (int i = 0; i < kCount; ++i) batch[static_cast<size_t>(i)] = static_cast<float>((i + step) % 13);
    float* in = gpu.make(batch);
    for (int k = 0; k < kLayers; ++k) {
      const forkpoint::Layer layer(FORKPOINT_FORWARD, ("blocks." + std::to_string(k)).c_str());
      const float* from = k ? outs[static_cast<size_t>(k) - 1] : in;
      record("input", FORKPOINT_ROLE_INPUT, from);
      gpu.launch(linear_kernel, nullptr, hidden, from, weights[static_cast<size_t>(k)], kCount);
      const bool now = fault == drawn ? step >= faulty : step == faulty;
      gpu.launch(smooth_kernel, nullptr, outs[static_cast<size_t>(k)], hidden, kCount, k == 1 && now ? fault : none);
      record("output", FORKPOINT_ROLE_OUTPUT, outs[static_cast<size_t>(k)]);
    }
    forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, static_cast<double>(gpu.read(outs.back(), 1)[0]));
    for (int k = 0; k < kLayers; ++k) {
      const forkpoint::Layer layer(FORKPOINT_OPTIMIZER, ("blocks." + std::to_string(k)).c_str());
      gpu.launch(update_kernel, nullptr, weights[static_cast<size_t>(k)], outs[static_cast<size_t>(k)], kCount);
      record("weight", FORKPOINT_ROLE_PARAMETER, weights[static_cast<size_t>(k)]);
    }
    forkpoint_step_end();
    gpu.synchronize();
    gpu.release(in);
  }
  return 0;
}
