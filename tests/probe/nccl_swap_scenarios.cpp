// What nccl_client does to see how the members of a communicator agree on deterministic collectives, by name.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "probes/forkpoint.h"
#include "tests/probe/nccl_checks.h"

using namespace nccl_program;
using forkpoint::FakeNcclConfig;

namespace {

NcclComm communicator(const Ranks& ranks, const std::string& name) {
  NcclComm comm = nullptr;
  check(ncclCommInitRank(&comm, ranks.size, shared_id(ranks, name), ranks.rank), "init");
  return comm;
}

// One sum, and how many calls NCCL was given for it.
void sum_on(const Ranks& ranks, NcclComm comm, const std::string& what, void* stream = nullptr) {
  const int before = fake_nccl_calls();
  float* data = device_floats(values_of(ranks.rank));
  const int result = ncclAllReduce(data, data, kCount, kFloat, kSum, comm, stream);
  if (result == 7) wait_until_ready(comm);
  else check(result, "all-reduce");
  expect(what.c_str(), data, combined(ranks, kCount, plus));
  printf("%s calls %d\n", what.c_str(), fake_nccl_calls() - before);
}

void one_sum(const Ranks& ranks) {
  const NcclComm comm = communicator(ranks, "world");
  forkpoint::Step step(0);
  sum_on(ranks, comm, "sum");
}

// More communicators than a device has room for kernels that wait; one that is destroyed leaves room for another.
void many(const Ranks& ranks) {
  std::vector<NcclComm> comms;
  forkpoint::Step step(0);
  for (int i = 0; i < 4; ++i) {
    comms.push_back(communicator(ranks, "many" + std::to_string(i)));
    sum_on(ranks, comms.back(), "number " + std::to_string(i));
  }
  check(ncclCommDestroy(comms[1]), "destroy");
  sum_on(ranks, communicator(ranks, "another"), "another");
}

// The first reductions of two communicators in one group, in another order on each rank.
void group_orders(const Ranks& ranks) {
  NcclComm comms[2] = {communicator(ranks, "one"), communicator(ranks, "two")};
  void* streams[2] = {new_stream(), new_stream()};
  float* data[2] = {device_floats(values_of(ranks.rank)), device_floats(values_of(ranks.rank))};
  forkpoint::Step step(0);
  check(ncclGroupStart(), "start");
  for (int i = 0; i < 2; ++i) {
    const int which = ranks.rank == 0 ? i : 1 - i;
    check(ncclAllReduce(data[which], data[which], kCount, kFloat, kSum, comms[which], streams[which]), "all-reduce");
  }
  check(ncclGroupEnd(), "end");
  for (const float* sum : data) expect("sum of a group", sum, combined(ranks, kCount, plus));
}

// Made in a group on one rank, and one after the other on the other.
void made_apart(const Ranks& ranks) {
  NcclComm comms[2] = {};
  const NcclUniqueId ids[2] = {shared_id(ranks, "one"), shared_id(ranks, "two")};
  if (ranks.rank == 0) check(ncclGroupStart(), "start");
  for (int i = 0; i < 2; ++i) check(ncclCommInitRank(&comms[i], ranks.size, ids[i], ranks.rank), "init");
  if (ranks.rank == 0) check(ncclGroupEnd(), "end");
  forkpoint::Step step(0);
  for (NcclComm comm : comms) sum_on(ranks, comm, "sum");
}

// What a thread of the program does that finds a communicator stuck.
class Watchdog {
 public:
  explicit Watchdog(NcclComm comm) : thread_([comm, this] {
    for (int i = 0; i < 30 && !done_; ++i) usleep(100'000);
    if (!done_) check(ncclCommAbort(comm), "abort");
  }) {}
  ~Watchdog() { done_ = true, thread_.join(); }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Rank 1 does not come: to the first reduction, or to the second. Nobody may wait for ever.
void abandoned(const Ranks& ranks) {
  const NcclComm comm = communicator(ranks, "world");
  void* stream = new_stream();
  forkpoint::Step step(0);
  if (getenv("SECOND")) sum_on(ranks, comm, "sum", stream);
  if (ranks.rank == 1) {
    while (shared_id({1, 2, ranks.folder}, "given-up").bytes[0] == 0) usleep(1000);
    _exit(0);
  }
  float* data = device_floats(values_of(ranks.rank));
  {
    const Watchdog watchdog(comm);
    const auto begin = std::chrono::steady_clock::now();
    const int result = ncclAllReduce(data, data, kCount, kFloat, kSum, comm, stream);
    synchronize();
    const bool soon = std::chrono::steady_clock::now() - begin < std::chrono::seconds(8);
    printf("given up with %d %s\n", result, soon ? "soon" : "LATE");
  }
  shared_id(ranks, "given-up");
}

// One that cannot even ask fails, and the other gives up.
void failing_member(const Ranks& ranks) {
  const NcclComm comm = communicator(ranks, "world");
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  int result = 0;
  {
    const Watchdog watchdog(comm);
    result = ncclAllReduce(data, data, kCount, kFloat, kSum, comm, new_stream());
    synchronize();
  }
  const bool right = result == 0 && host_floats(data, kCount) == combined(ranks, kCount, plus);
  printf("rank %d: result %d%s\n", ranks.rank, result, right ? ", right" : "");
}

// NCCL says that the communicator has failed while its members are to agree.
void failing_nccl(const Ranks& ranks) {
  FakeNcclConfig config;
  config.blocking = getenv("NONBLOCKING") ? 0 : 1;
  NcclComm comm = nullptr;
  check(ncclCommInitRankConfig(&comm, ranks.size, shared_id(ranks, "world"), ranks.rank, &config), "init",
        config.blocking ? 0 : 7);
  wait_until_ready(comm);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  if (ranks.rank == 0) {
    std::thread([] { usleep(200'000), setenv("FAKE_NCCL_ERROR", "6", 1); }).detach();
    int result = ncclAllReduce(data, data, kCount, kFloat, kSum, comm, new_stream());
    while (result == 7) check(ncclCommGetAsyncError(comm, &result), "state");
    printf("failed with %d\n", result);
    fflush(stdout);
    shared_id(ranks, "failed");
    _exit(0);
  }
  while (shared_id(ranks, "failed").bytes[0] == 0) usleep(1000);
  _exit(0);
}

// The first reduction while another thread captures, in the mode that forbids others most.
void captured_elsewhere(const Ranks& ranks) {
  const NcclComm comm = communicator(ranks, "world");
  void *stream = new_stream(), *other = new_stream();
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  std::atomic<int> stage{0};
  std::thread capturing([&] {
    void* graph = captured(other, [&] {
      stage = 1;
      while (stage != 2) usleep(100);
    }, true);
    printf("the other capture %s\n", graph ? "right" : "WRONG");
  });
  while (stage != 1) usleep(100);
  const int before = fake_nccl_calls();
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, stream), "all-reduce");
  printf("sum calls %d\n", fake_nccl_calls() - before);
  stage = 2;
  capturing.join();
  expect("sum", data, combined(ranks, kCount, plus));
}

// The first reduction is itself captured.
void captured_first(const Ranks& ranks) {
  const NcclComm comm = communicator(ranks, "world");
  void* stream = new_stream();
  forkpoint::Step step(0);
  float *in = device_floats(values_of(ranks.rank)), *out = device_floats(std::vector<float>(kCount));
  void* graph = captured(stream, [&] { check(ncclAllReduce(in, out, kCount, kFloat, kSum, comm, stream), "all-reduce"); });
  if (!graph) return;
  for (int i = 0; i < 2; ++i) launch_graph(graph, stream);
  synchronize();
  expect("sum of a graph", out, combined(ranks, kCount, plus));
}

// Communicators come and go: what one took the next one has.
void again_and_again(const Ranks& ranks) {
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  size_t early = 0;
  for (int i = 0; i < 20; ++i) {
    const NcclComm comm = communicator(ranks, "round" + std::to_string(i));
    for (int k = 0; k < 2; ++k) check(ncclAllReduce(data, data, kCount, kFloat, kMax, comm, nullptr), "all-reduce");
    synchronize();
    check(i % 2 ? ncclCommAbort(comm) : ncclCommDestroy(comm), "end");
    if (i == 1) early = free_device_bytes();
  }
  printf("device memory %s\n", free_device_bytes() == early ? "kept" : "LOST");
}

// The context goes, and another one comes under the same address.
void new_context(const Ranks& ranks) {
  {
    forkpoint::Step step(0);
    const NcclComm comm = communicator(ranks, "before");
    sum_on(ranks, comm, "before");
    check(ncclCommDestroy(comm), "destroy");
  }
  reset_context();
  forkpoint::Step step(1);
  sum_on(ranks, communicator(ranks, "behind"), "behind");
}

void many_factors(const Ranks& ranks) {
  const NcclComm comm = communicator(ranks, "world");
  forkpoint::Step step(0);
  int op = 0;
  for (int i = 0; i < 1500; ++i) {
    float factor = i == 1499 ? 0.5f : 3;
    check(ncclRedOpCreatePreMulSum(&op, &factor, kFloat, 1, comm), "reduction");
  }
  float* data = device_floats(values_of(ranks.rank));
  check(ncclAllReduce(data, data, kCount, kFloat, op, comm, nullptr), "all-reduce");
  expect("by the last factor", data, combined(ranks, kCount, plus, 0.5f));
}

// A child is made in the background, and its parent is gone before anybody asked; another has the parent's address.
void parent_goes(const Ranks& ranks) {
  FakeNcclConfig config;
  config.blocking = 0;
  NcclComm parent = nullptr, child = nullptr, next = nullptr;
  check(ncclCommInitRankConfig(&parent, ranks.size, shared_id(ranks, "parent"), ranks.rank, &config), "init", 7);
  wait_until_ready(parent);
  check(ncclCommSplit(parent, 0, ranks.rank, &child, nullptr), "split");
  while (!__atomic_load_n(&child, __ATOMIC_ACQUIRE)) usleep(1000);
  usleep(50'000);
  check(ncclCommDestroy(parent), "destroy");
  check(ncclCommInitRankConfig(&next, ranks.size, shared_id(ranks, "next"), ranks.rank, &config), "init", 7);
  wait_until_ready(next);
  forkpoint::Step step(0);
  wait_until_ready(child);
  sum_on(ranks, child, "child");
  sum_on(ranks, next, "next");
}

}  // namespace

bool nccl_program::swap_scenario(const std::string& name, const Ranks& ranks) {
  static const std::map<std::string, void (*)(const Ranks&)> all = {
      {"one_sum", one_sum},
      {"many", many},
      {"group_orders", group_orders},
      {"made_apart", made_apart},
      {"abandoned", abandoned},
      {"failing_member", failing_member},
      {"failing_nccl", failing_nccl},
      {"captured_elsewhere", captured_elsewhere},
      {"captured_first", captured_first},
      {"again_and_again", again_and_again},
      {"new_context", new_context},
      {"many_factors", many_factors},
      {"parent_goes", parent_goes}};
  const auto found = all.find(name);
  return found != all.end() && (found->second(ranks), true);
}
