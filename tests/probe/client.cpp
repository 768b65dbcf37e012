// A trainer as far as the probe can tell: `probe_client SCENARIO [ARGUMENT...]`. Includes nothing of the tool but
// forkpoint.h. Prints nothing on stdout but what a test wants to find there unchanged.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "probes/forkpoint.h"
#include "tests/probe/sample_data.h"

namespace {

using Arguments = std::vector<std::string>;

int number(const Arguments& arguments, size_t i, int otherwise) {
  return i < arguments.size() ? atoi(arguments[i].c_str()) : otherwise;
}

void record_steps(int first, int count) {
  const std::vector<float> values = sample_floats(256, 1);
  for (int step = first; step < first + count; ++step) {
    forkpoint::Step scope(step);
    forkpoint::Layer layer(FORKPOINT_FORWARD, "blocks.0");
    forkpoint::tensor("weight", FORKPOINT_ROLE_PARAMETER, values.data(), {16, 16});
  }
}

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

int without_end(const Arguments&) {
  for (int step = 0; step < 3; ++step) {
    forkpoint_step_begin(step);
    forkpoint_scalar("inside", FORKPOINT_ROLE_SCALAR, step);
  }
  return 0;
}

int leave(const Arguments& arguments) {
  const std::string how = arguments.at(0);
  record_steps(0, 3);
  forkpoint_step_begin(3);
  forkpoint_scalar("half", FORKPOINT_ROLE_SCALAR, 1);
  if (how == "whole step") forkpoint_step_end();
  if (how == "_exit") _exit(5);
  if (how == "_Exit") _Exit(5);
  if (how == "quick_exit") quick_exit(5);
  if (how == "abort") {
    usleep(100'000);
    abort();
  }
  if (how == "exit in a thread") std::thread([] { exit(5); }).join();
  if (how == "_exit in a handler") {
    signal(SIGUSR1, [](int) { _exit(5); });
    raise(SIGUSR1);
  }
  if (how == "main thread gone") {
    std::thread([] {
      usleep(50'000);
      forkpoint_scalar("late", FORKPOINT_ROLE_SCALAR, 1);
      exit(5);
    }).detach();
    pthread_exit(nullptr);
  }
  if (how == "static destructor") {
    static struct Late {
      ~Late() { forkpoint_scalar("late", FORKPOINT_ROLE_SCALAR, 1); }
    } late;
    exit(5);
  }
  return 5;
}

// Records for ever; the test kills it. Says so once the first steps should be on disk.
int forever(const Arguments&) {
  for (int step = 0;; ++step) {
    forkpoint::Step scope(step);
    for (int i = 0; i < 10; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
    usleep(20'000);
    if (step == 20) {
      puts("ready");
      fflush(stdout);
    }
  }
}

// One long step; the test kills it in its middle.
int long_step(const Arguments&) {
  forkpoint::Step scope(0);
  for (int i = 0;; ++i) {
    forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
    usleep(5'000);
    if (i == 120) {
      puts("ready");
      fflush(stdout);
    }
  }
}

int wait_for(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return 99;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

// ranks N: the parent records nothing and forks its ranks.
int fork_ranks(const Arguments& arguments) {
  const int count = number(arguments, 0, 4);
  forkpoint_fact("launcher", "fork");
  std::vector<pid_t> children;
  for (int rank = 0; rank < count; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      forkpoint_rank(rank, count);
      record_steps(0, 3);
      exit(0);
    }
    children.push_back(child);
  }
  int worst = 0;
  for (pid_t child : children) worst |= wait_for(child);
  return worst;
}

// The parent is a rank, its children are data-loader workers that try to record as well.
int fork_workers(const Arguments&) {
  const int before = open_descriptors();
  forkpoint_step_begin(0);
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 1);
  usleep(50'000);
  for (int how = 0; how < 3; ++how) {
    const pid_t child = fork();
    if (child == 0) {
      record_steps(100, 2);
      if (open_descriptors() != before) _exit(77);
      if (how == 0) exit(0);
      if (how == 1) _exit(0);
      return 0;
    }
    if (const int status = wait_for(child)) return status;
  }
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 2);
  forkpoint_step_end();
  return 0;
}

// The parent is rank 0 and forks rank 1 after it has begun to record.
int fork_other_rank(const Arguments&) {
  forkpoint_rank(0, 2);
  record_steps(0, 2);
  const pid_t child = fork();
  if (child == 0) {
    forkpoint_rank(1, 2);
    record_steps(0, 3);
    return 0;
  }
  const int status = wait_for(child);
  record_steps(2, 1);
  return status;
}

int fork_storm(const Arguments& arguments) {
  const int forks = number(arguments, 0, 200);
  std::atomic<bool> stop{false};
  std::vector<std::thread> recorders;
  forkpoint_step_begin(0);
  for (int t = 0; t < 2; ++t) {
    recorders.emplace_back([&, t] {
      const std::string layer = "recorder." + std::to_string(t);
      forkpoint::Layer scope(FORKPOINT_FORWARD, layer.c_str());
      for (int i = 0; !stop; ++i) {
        // New names all the time: the child must not find a table half changed.
        forkpoint_scalar(("v" + std::to_string(i % 997)).c_str(), FORKPOINT_ROLE_SCALAR, i);
        usleep(50);
      }
    });
  }
  int worst = 0;
  for (int i = 0; i < forks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      forkpoint_scalar("child", FORKPOINT_ROLE_SCALAR, i);
      if (i % 2) exit(0);
      _exit(0);
    }
    worst = std::max(worst, wait_for(child));
  }
  stop = true;
  for (std::thread& recorder : recorders) recorder.join();
  forkpoint_step_end();
  return worst;
}

int spawn(const Arguments&) {
  forkpoint_step_begin(0);
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 1);
  const int status = system("/bin/true; exit 6");
  const pid_t child = vfork();
  if (child == 0) _exit(7);
  const int vforked = wait_for(child);
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 2);
  forkpoint_step_end();
  return WEXITSTATUS(status) == 6 && vforked == 7 ? 0 : 1;
}

// Fills the disk: no file of this process may grow beyond so many bytes.
int limited_file(const Arguments& arguments) {
  const rlimit limit = {static_cast<rlim_t>(number(arguments, 0, 65536)), RLIM_INFINITY};
  setrlimit(RLIMIT_FSIZE, &limit);
  for (int step = 0; step < 40; ++step) {
    forkpoint::Step scope(step);
    for (int i = 0; i < 500; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i * 1.1 + step);
    usleep(2'000);
  }
  puts("trained");
  return 0;
}

int flood(const Arguments& arguments) {
  const int records = number(arguments, 0, 1000);
  forkpoint::Step step(4);
  for (int i = 0; i < records; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
  return 0;
}

int handlers(const Arguments&) {
  static int caught = 0;
  signal(SIGALRM, [](int) {
    ++caught;
    forkpoint_scalar("in handler", FORKPOINT_ROLE_SCALAR, caught);
  });
  const itimerval every = {{0, 500}, {0, 500}};
  setitimer(ITIMER_REAL, &every, nullptr);
  forkpoint::Step step(0);
  for (int i = 0; i < 200'000 && caught < 200; ++i) {
    errno = 1234;
    forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
    if (errno != 1234) return 9;
  }
  const itimerval never = {};
  setitimer(ITIMER_REAL, &never, nullptr);
  printf("%d\n", caught);
  return 0;
}

int remove_run(const Arguments& arguments) {
  record_steps(0, 1);
  usleep(100'000);
  const std::string command = "rm -rf '" + arguments.at(0) + "'";
  if (system(command.c_str()) != 0) return 9;
  record_steps(1, 3);
  puts("trained");
  return 0;
}

int leak(const Arguments&) {
  record_steps(0, 1);
  usleep(50'000);
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    record_steps(1 + i, 1);
    std::thread([] { forkpoint::Layer scope(FORKPOINT_FORWARD, "x"); }).join();
  }
  return open_descriptors() - before;
}

// A host that closes every descriptor, and opens a file of its own that gets the stream's number.
int close_all(const Arguments& arguments) {
  record_steps(0, 1);
  usleep(50'000);
  for (int fd = 3; fd < 256; ++fd) close(fd);
  const int mine = open(arguments.at(0).c_str(), O_WRONLY | O_CREAT, 0600);
  record_steps(1, 3);
  usleep(300'000);
  const pid_t child = fork();
  if (child == 0) _exit(fcntl(mine, F_GETFD) == -1);
  return wait_for(child);
}

// Where the writer may run, if the thread that makes the first record is pinned.
int pinned(const Arguments&) {
  cpu_set_t before, one;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) return 1;
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  sched_setaffinity(0, sizeof(one), &one);
  record_steps(0, 1);
  usleep(50'000);
  for (int tid = getpid(); tid < getpid() + 50; ++tid) {
    cpu_set_t set;
    const std::string comm = "/proc/self/task/" + std::to_string(tid) + "/comm";
    if (tid == getpid() || access(comm.c_str(), F_OK) != 0) continue;
    if (sched_getaffinity(tid, sizeof(set), &set) == 0) return CPU_EQUAL(&set, &before) ? 0 : 2;
  }
  return 3;
}

int facts(const Arguments&) {
  forkpoint_fact("early", "1");
  record_steps(0, 1);
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

const std::map<std::string, int (*)(const Arguments&)> kScenarios = {
    {"kinds", kinds}, {"views", views}, {"bad", bad}, {"nested", nested}, {"threads", threads}, {"steps", steps},
    {"between", between}, {"without_end", without_end}, {"leave", leave}, {"forever", forever}, {"long_step", long_step},
    {"fork_ranks", fork_ranks}, {"fork_workers", fork_workers}, {"fork_other_rank", fork_other_rank},
    {"fork_storm", fork_storm}, {"spawn", spawn}, {"limited_file", limited_file}, {"flood", flood},
    {"handlers", handlers}, {"remove_run", remove_run}, {"leak", leak}, {"facts", facts}, {"close_all", close_all}, {"pinned", pinned},
    {"cuda_pointer", cuda_pointer}, {"same_name", same_name}, {"active", active},
};

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argv + std::min(argc, 2), argv + argc);
  const auto scenario = kScenarios.find(argc > 1 ? argv[1] : "");
  if (scenario == kScenarios.end()) {
    fprintf(stderr, "probe_client: no such scenario\n");
    return 98;
  }
  return scenario->second(arguments);
}
