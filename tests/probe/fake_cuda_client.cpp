// Records "CUDA" tensors with the fake libcuda: fake_cuda_client LIBRARY SCENARIO.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "probes/forkpoint.h"
#include "tests/fakes/fake_cuda.h"
#include "tests/probe/sample_data.h"

namespace {

template <typename Function>
Function* find(void* library, const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(library, name));
  if (!found) exit(91);
  return found;
}

void record(const char* name, const std::vector<float>& values) {
  forkpoint::tensor(name, FORKPOINT_ROLE_PARAMETER, values.data(), {static_cast<int64_t>(values.size())},
                    FORKPOINT_CUDA);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return 92;
  const std::string scenario = argv[2];
  // Never freed: the "device" may read them until the process is gone.
  const auto& values = *new std::vector<float>(sample_floats(1000, 5));
  const auto& more = *new std::vector<float>(sample_floats(10'000, 6));
  find<decltype(fake_cuda_set_mode)>(library, "fake_cuda_set_mode")(kFakeSlow);
  for (const auto* memory : {&values, &more}) {
    find<decltype(fake_cuda_adopt)>(library, "fake_cuda_adopt")(memory->data(), memory->size() * sizeof(float));
  }
  forkpoint::Step step(0);
  if (scenario == "plain") {
    for (int i = 0; i < 200; ++i) {
      record("values", values);
      forkpoint_scalar("between", FORKPOINT_ROLE_SCALAR, i);
      record("more", more);
    }
  } else if (scenario == "threads") {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 500; ++i) record("values", values);
      });
    }
    for (std::thread& thread : threads) thread.join();
  } else if (scenario == "stuck") {
    find<decltype(fake_cuda_set_stuck)>(library, "fake_cuda_set_stuck")(1);
    for (int i = 0; i < 3; ++i) record("values", values);
    forkpoint_scalar("after", FORKPOINT_ROLE_SCALAR, 1);
  } else if (scenario == "reset") {
    record("values", values);
    usleep(50'000);
    find<decltype(fake_cuda_set_stuck)>(library, "fake_cuda_set_stuck")(1);
    for (int i = 0; i < 100; ++i) record("lost", values);
    find<decltype(fake_cuda_reset)>(library, "fake_cuda_reset")();
    find<decltype(fake_cuda_set_stuck)>(library, "fake_cuda_set_stuck")(0);
    record("more", more);
  } else if (scenario == "launch error") {
    find<decltype(fake_cuda_set_launch_error)>(library, "fake_cuda_set_launch_error")(701);
    for (int i = 0; i < 3; ++i) record("values", values);
  } else if (scenario == "captured" || scenario == "implicit") {
    find<decltype(fake_cuda_set_capture)>(library, "fake_cuda_set_capture")(scenario == "captured" ? 1 : 2);
    for (int i = 0; i < 3; ++i) record("values", values);
    find<decltype(fake_cuda_set_capture)>(library, "fake_cuda_set_capture")(0);
    record("more", more);
  } else if (scenario == "bad address") {
    forkpoint::tensor("values", FORKPOINT_ROLE_PARAMETER, reinterpret_cast<const float*>(4096), {16}, FORKPOINT_CUDA);
  }
  return 0;
}
