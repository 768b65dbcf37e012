// A trainer as far as the probe can tell: `probe_client SCENARIO [ARGUMENT...]`. Includes nothing of the tool but
// forkpoint.h. Prints nothing on stdout but what a test wants to find there unchanged.
#include "tests/probe/client.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>

#include "probes/forkpoint.h"
#include "tests/probe/sample_data.h"

void record_steps(int first, int count) {
  const std::vector<float> values = sample_floats(256, 1);
  for (int step = first; step < first + count; ++step) {
    forkpoint::Step scope(step);
    forkpoint::Layer layer(FORKPOINT_FORWARD, "blocks.0");
    forkpoint::tensor("weight", FORKPOINT_ROLE_PARAMETER, values.data(), {16, 16});
  }
}

namespace {

int kinds(const Arguments&) {
  const std::vector<float> weight = sample_floats(12, 1), input = sample_floats(24, 2), grad = sample_floats(12, 3);
  const std::vector<int64_t> batch = {5, 6, 7};
  const char rng[] = "generator state";
  forkpoint_fact("tp_rank", "0");
  forkpoint_fact("tp_rank", "3");
  forkpoint::tensor("weight", FORKPOINT_ROLE_PARAMETER, weight.data(), {3, 4});  // before the first step
  for (int step = 7; step < 9; ++step) {
    forkpoint_step_begin(step);
    forkpoint_state("torch", FORKPOINT_ROLE_RNG, rng, sizeof(rng));
    forkpoint::tensor("batch", FORKPOINT_ROLE_BATCH, batch.data(), {3});
    for (int micro = 0; micro < 2; ++micro) {
      forkpoint_micro_step(micro);
      forkpoint::Layer layer(FORKPOINT_FORWARD, "blocks.0.fc1", "linear");
      forkpoint::tensor("input", FORKPOINT_ROLE_INPUT, input.data(), {2, 3, 4});
      forkpoint::Layer inner(-1, nullptr, "gelu");
      forkpoint::tensor("output", FORKPOINT_ROLE_OUTPUT, input.data(), {24});
      forkpoint::tensor("output", FORKPOINT_ROLE_OUTPUT, input.data() + 1, {23});
    }
    {
      const int32_t members[] = {0, 2};
      forkpoint::Collective collective("all_reduce", "dp", members, 2, "blocks.0.fc1");
      forkpoint::tensor("grad", FORKPOINT_ROLE_INPUT, grad.data(), {12});
    }
    {
      const int32_t members[] = {0, 1, 2};
      forkpoint::Collective collective("all_gather", nullptr, members, 3);
      forkpoint::tensor("grad", FORKPOINT_ROLE_OUTPUT, grad.data(), {12});
    }
    forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, -1.25);
    forkpoint_scalar("scale", FORKPOINT_ROLE_SCALAR, INFINITY);
    forkpoint_step_end();
  }
  return 0;
}

forkpoint_tensor_desc describe(const char* name, const void* data, int dtype, int dims, const int64_t* shape) {
  forkpoint_tensor_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.name = name;
  desc.data = data;
  desc.dtype = dtype;
  desc.role = FORKPOINT_ROLE_PARAMETER;
  desc.ndim = dims;
  desc.shape = shape;
  return desc;
}

int views(const Arguments&) {
  const std::vector<float> values = sample_floats(8 * 8, 4);
  forkpoint::Step step(0);
  const int64_t shape[] = {8, 8}, transposed[] = {1, 8}, contiguous[] = {8, 1};
  forkpoint_tensor_desc desc = describe("transposed", values.data(), FORKPOINT_F32, 2, shape);
  desc.strides = transposed;
  forkpoint_tensor(&desc);
  desc = describe("contiguous", values.data(), FORKPOINT_F32, 2, shape);
  desc.strides = contiguous;
  forkpoint_tensor(&desc);
  const int64_t reversed[] = {-8, 1};
  desc = describe("reversed", values.data() + 56, FORKPOINT_F32, 2, shape);
  desc.strides = reversed;
  forkpoint_tensor(&desc);
  const int64_t half[] = {8, 4}, whole[] = {8, 8}, row[] = {8, 1};
  for (int64_t part = 0; part < 2; ++part) {
    const int64_t offset[] = {0, 4 * part};
    desc = describe(part == 0 ? "shard0" : "shard1", values.data() + 4 * part, FORKPOINT_F32, 2, half);
    desc.strides = row;
    desc.global_shape = whole;
    desc.global_offset = offset;
    forkpoint_tensor(&desc);
  }
  desc = describe("whole", values.data(), FORKPOINT_F32, 2, shape);
  forkpoint_tensor(&desc);
  desc = describe("scalar tensor", values.data(), FORKPOINT_F32, 0, nullptr);
  forkpoint_tensor(&desc);
  const int64_t nothing[] = {0, 8};
  desc = describe("empty", nullptr, FORKPOINT_F32, 2, nothing);
  forkpoint_tensor(&desc);
  return 0;
}

int bad(const Arguments&) {
  const float value = 1;
  const int64_t shape[] = {1}, negative[] = {-1}, huge[] = {INT64_MAX}, outside[] = {1};
  const int64_t strides[] = {INT64_MAX / 2};
  const int64_t many[17] = {};
  forkpoint_step_begin(-5);
  forkpoint::Step step(3);
  forkpoint_tensor(nullptr);
  forkpoint_tensor_desc desc = describe("x", &value, FORKPOINT_F32, 1, shape);
  const auto with = [&](auto change) {
    forkpoint_tensor_desc bad_desc = desc;
    change(bad_desc);
    forkpoint_tensor(&bad_desc);
    forkpoint_tensor(&bad_desc);
  };
  with([](auto& d) { d.struct_size = 8; });
  with([](auto& d) { d.name = nullptr; });
  with([](auto& d) { d.dtype = 99; });
  with([](auto& d) { d.dtype = -1; });
  with([](auto& d) { d.role = 11; });
  with([](auto& d) { d.device = 2; });
  with([](auto& d) { d.ndim = 17; });
  with([&](auto& d) { d.ndim = 17, d.shape = many; });
  with([](auto& d) { d.shape = nullptr; });
  with([&](auto& d) { d.shape = negative; });
  with([&](auto& d) { d.shape = huge; });
  with([](auto& d) { d.data = nullptr; });
  const int64_t two_by_two[] = {2, 2}, far[] = {INT64_MAX / 2, 1};
  with([&](auto& d) { d.ndim = 2, d.shape = two_by_two, d.strides = far; });
  with([&](auto& d) { d.global_shape = shape; });
  with([&](auto& d) { d.global_shape = shape, d.global_offset = outside; });
  forkpoint_scalar(nullptr, FORKPOINT_ROLE_LOSS, 1);
  forkpoint_scalar("s", 77, 1);
  forkpoint_state("s", FORKPOINT_ROLE_RNG, nullptr, 4);
  forkpoint_scope_begin(99, nullptr, nullptr);
  forkpoint_collective_begin("all_reduce", "w", nullptr, 3, nullptr);
  forkpoint_scope_end();
  forkpoint_scope_end();
  forkpoint_scope_end();  // one too many
  forkpoint_fact(nullptr, "x");
  (void)strides;
  desc.name = "good";
  forkpoint_tensor(&desc);
  return 0;
}

int nested(const Arguments& arguments) {
  const int depth = number(arguments, 0, 1000);
  forkpoint::Step step(0);
  for (int i = 0; i < depth; ++i) forkpoint_scope_begin(FORKPOINT_FORWARD, ("layer" + std::to_string(i)).c_str(), nullptr);
  forkpoint_scalar("deep", FORKPOINT_ROLE_SCALAR, 1);
  for (int i = 0; i < depth; ++i) forkpoint_scope_end();
  forkpoint_scalar("out", FORKPOINT_ROLE_SCALAR, 1);
  return 0;
}

int threads(const Arguments& arguments) {
  const int count = number(arguments, 0, 8), records = number(arguments, 1, 2000);
  forkpoint::Step step(0);
  std::vector<std::thread> workers;
  for (int t = 0; t < count; ++t) {
    workers.emplace_back([=] {
      const std::string layer = "thread." + std::to_string(t);
      forkpoint::Layer scope(FORKPOINT_BACKWARD, layer.c_str());
      for (int i = 0; i < records; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_GRADIENT, t * 1e6 + i);
    });
  }
  for (std::thread& worker : workers) worker.join();
  return 0;
}

int steps(const Arguments& arguments) {
  if (arguments.size() > 1) forkpoint_rank(number(arguments, 1, 0), number(arguments, 2, 1));
  record_steps(0, number(arguments, 0, 5));
  puts("trained");
  return 3;
}

int between(const Arguments&) {
  forkpoint_scalar("prologue", FORKPOINT_ROLE_SCALAR, 0);
  for (int step = 0; step < 3; ++step) {
    forkpoint_scalar("before", FORKPOINT_ROLE_SCALAR, step);
    forkpoint::Step scope(step);
    forkpoint_scalar("inside", FORKPOINT_ROLE_SCALAR, step);
  }
  forkpoint_scalar("after", FORKPOINT_ROLE_SCALAR, 3);
  return 0;
}

int batch_first(const Arguments&) {
  for (int step = 5; step < 8; ++step) {
    {
      forkpoint::Scope scope(FORKPOINT_DATA, nullptr);
      forkpoint_scalar("batch", FORKPOINT_ROLE_BATCH, step);
    }
    forkpoint::Step scope(step);
    forkpoint_scalar("inside", FORKPOINT_ROLE_SCALAR, step);
  }
  return 0;
}

int no_step(const Arguments&) {
  forkpoint::Scope scope(FORKPOINT_DATA, nullptr);
  forkpoint_scalar("batch", FORKPOINT_ROLE_BATCH, 1);
  return 0;
}

int without_end(const Arguments&) {
  for (int step = 0; step < 3; ++step) {
    forkpoint_step_begin(step);
    forkpoint_scalar("inside", FORKPOINT_ROLE_SCALAR, step);
  }
  return 0;
}

int flood(const Arguments& arguments) {
  const int records = number(arguments, 0, 1000);
  forkpoint::Step step(4);
  for (int i = 0; i < records; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
  return 0;
}

int facts(const Arguments&) {
  forkpoint_fact("early", "1");
  forkpoint_fact("changed", "1");
  record_steps(0, 1);
  usleep(50'000);
  forkpoint_fact("changed", "2");
  record_steps(1, 1);
  usleep(50'000);
  forkpoint_fact("late", "1");
  return 0;
}

int cuda_pointer(const Arguments&) {
  const int64_t shape[] = {4};
  forkpoint::Step step(0);
  forkpoint_tensor_desc desc = describe("x", reinterpret_cast<void*>(4096), FORKPOINT_F32, 1, shape);
  desc.device = FORKPOINT_CUDA;
  forkpoint_tensor(&desc);
  const int64_t empty[] = {0};
  desc.shape = empty;
  desc.name = "empty";
  forkpoint_tensor(&desc);
  return 0;
}

int same_name(const Arguments&) {
  const int32_t first[] = {0, 1}, second[] = {2, 3};
  forkpoint::Step step(0);
  const float value = 1;
  for (const int32_t* members : {first, second}) {
    forkpoint::Collective collective("all_reduce", "tp", members, 2);
    forkpoint::tensor("x", FORKPOINT_ROLE_INPUT, &value, {1});
  }
  return 0;
}

// Is the probe there, and how fine does it record?
int active(const Arguments&) {
  printf("%d %d\n", forkpoint_active(), forkpoint_level());
  forkpoint_step_begin(0);
  printf("%d\n", forkpoint_active());
  return 0;
}

}  // namespace

const Scenarios& record_scenarios() {
  static const Scenarios scenarios = {
    {"kinds", kinds}, {"views", views}, {"bad", bad}, {"nested", nested}, {"threads", threads}, {"steps", steps},
    {"between", between}, {"batch_first", batch_first}, {"no_step", no_step}, {"without_end", without_end}, {"flood", flood}, {"facts", facts},
    {"cuda_pointer", cuda_pointer}, {"same_name", same_name}, {"active", active},
  };
  return scenarios;
}

int main(int argc, char** argv) {
  const Arguments arguments(argv + std::min(argc, 2), argv + argc);
  for (const Scenarios* scenarios : {&record_scenarios(), &process_scenarios()}) {
    const auto scenario = scenarios->find(argc > 1 ? argv[1] : "");
    if (scenario != scenarios->end()) return scenario->second(arguments);
  }
  fprintf(stderr, "probe_client: no such scenario\n");
  return 98;
}
