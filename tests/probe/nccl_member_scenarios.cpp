// What nccl_client does to see which communicators the deterministic collectives know, how those were made, and who
// asks for them, by name.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "probes/forkpoint.h"
#include "tests/probe/nccl_checks.h"

using namespace nccl_program;
using forkpoint::FakeNcclConfig;

// NCCL's own names, in front of which nobody stands.
extern "C" {
NcclResult pncclCommInitRankConfig(NcclComm* comm, int size, NcclUniqueId id, int rank, void* config);
NcclResult pncclGroupStart();
NcclResult pncclGroupEnd();
}

namespace {

NcclComm background_communicator(const Ranks& ranks, const std::string& name) {
  FakeNcclConfig config;
  config.blocking = 0;
  NcclComm comm = nullptr;
  check(ncclCommInitRankConfig(&comm, ranks.size, shared_id(ranks, name), ranks.rank, &config), "init", 7);
  return comm;
}

NcclComm communicator(const Ranks& ranks, const std::string& name) {
  NcclComm comm = nullptr;
  check(ncclCommInitRank(&comm, ranks.size, shared_id(ranks, name), ranks.rank), "init");
  return comm;
}

// Two communicators of four members, made where nobody sees it, of which two processes hold two each; the first sums on
// both in one group.
void unseen(const Ranks& ranks) {
  const int all = 2 * ranks.size;
  std::vector<NcclComm> comms(4);
  const NcclUniqueId ids[2] = {shared_id(ranks, "one"), shared_id(ranks, "two")};
  check(pncclGroupStart(), "start");
  for (int i = 0; i < 4; ++i) {
    NcclComm& made = comms[static_cast<size_t>(i)];
    check(pncclCommInitRankConfig(&made, all, ids[i / 2], 2 * ranks.rank + i % 2, nullptr), "init");
  }
  check(pncclGroupEnd(), "end");
  forkpoint::Step step(0);
  for (int round = 0; round < 2; ++round) {
    std::vector<float*> data;
    check(ncclGroupStart(), "start");
    for (int i = 0; i < 4; ++i) {
      data.push_back(device_floats(values_of(2 * ranks.rank + i % 2)));
      NcclComm comm = comms[static_cast<size_t>(i)];
      check(ncclAllReduce(data.back(), data.back(), kCount, kFloat, kSum, comm, new_stream()), "all-reduce");
    }
    check(ncclGroupEnd(), "end");
    for (const float* sum : data) expect("member's sum", sum, combined({0, all, ""}, kCount, plus));
  }
}

// How a reduction's call returns on a communicator, and what comes of it.
void reduce_and_tell(const Ranks& ranks, NcclComm comm, const std::string& what) {
  float* data = device_floats(values_of(ranks.rank));
  const int result = ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr);
  printf("%s returns %d\n", what.c_str(), result);
  if (result == 7) wait_until_ready(comm);
  expect(what.c_str(), data, combined(ranks, kCount, plus));
}

// A child need not be as its parent in whether its calls wait.
void children(const Ranks& ranks) {
  NcclComm parent = background_communicator(ranks, "parent"), same = nullptr, other = nullptr;
  wait_until_ready(parent);
  FakeNcclConfig config;
  check(ncclCommSplit(parent, 0, ranks.rank, &same, nullptr), "split");
  wait_until_ready(parent);
  check(ncclCommSplit(parent, 0, ranks.rank, &other, &config), "split");
  wait_until_ready(parent);
  forkpoint::Step step(0);
  reduce_and_tell(ranks, same, "same");
  reduce_and_tell(ranks, other, "other");
}

void environment_decides(const Ranks& ranks) {
  setenv("NCCL_COMM_BLOCKING", "0", 1);
  const NcclComm comm = communicator(ranks, "world");
  wait_until_ready(comm);
  forkpoint::Step step(0);
  reduce_and_tell(ranks, comm, "sum");
}

// A thread of the program that asks all the time how a communicator is; the longest that an answer took it.
class Asking {
 public:
  explicit Asking(NcclComm comm)
      : thread_([comm, this] {
          for (int state = 0; !done_;) {
            const auto begin = std::chrono::steady_clock::now();
            check(ncclCommGetAsyncError(comm, &state), "state");
            longest_ = std::max(longest_, std::chrono::steady_clock::now() - begin);
          }
        }) {}
  ~Asking() { stop(); }
  std::chrono::steady_clock::duration stop() {
    done_ = true;
    if (thread_.joinable()) thread_.join();
    return longest_;
  }

 private:
  std::atomic<bool> done_{false};
  std::chrono::steady_clock::duration longest_{};
  std::thread thread_;
};

// On rank 0 the thread that asks is caught in launching the sum, while another one asks too: at the latest at the
// sixth.
void two_ask(const Ranks& ranks) {
  forkpoint::Step step(0);
  bool caught = false;
  for (int i = 0; i < 6; ++i) {
    const NcclComm comm = background_communicator(ranks, "world" + std::to_string(i));
    wait_until_ready(comm);
    float* data = device_floats(values_of(ranks.rank));
    Asking asking(comm);
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce", 7);
    wait_until_ready(comm);
    expect("sum", data, combined(ranks, kCount, plus));
    caught = caught || asking.stop() > std::chrono::milliseconds(100);
    check(ncclCommDestroy(comm), "destroy");
  }
  if (caught) printf("caught\n");
}

// Rank 1 asks now and then only. No answer that rank 0 gets waits for it.
void slow_partner(const Ranks& ranks) {
  const NcclComm comm = background_communicator(ranks, "world");
  wait_until_ready(comm);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  float* told = device_floats(values_of(ranks.rank));
  check(ncclBroadcast(told, told, kCount, kFloat, 0, comm, nullptr), "broadcast", 7);
  wait_until_ready(comm);
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce", 7);
  using Clock = std::chrono::steady_clock;
  Clock::duration longest{};
  for (int state = 7; state == 7;) {
    if (ranks.rank == 1) usleep(600'000);
    const auto begin = Clock::now();
    check(ncclCommGetAsyncError(comm, &state), "state");
    longest = std::max(longest, Clock::now() - begin);
  }
  expect("sum", data, combined(ranks, kCount, plus));
  if (ranks.rank == 0) printf("rank 0 was %s\n", longest < std::chrono::milliseconds(300) ? "free" : "KEPT");
}

// A graph with a sum on a communicator that goes while the graph stays, and two communicators behind it.
void graph_stays(const Ranks& ranks) {
  const NcclComm first = communicator(ranks, "first");
  void* stream = new_stream();
  forkpoint::Step step(0);
  float *in = device_floats(values_of(ranks.rank)), *out = device_floats(std::vector<float>(kCount));
  void* graph =
      captured(stream, [&] { check(ncclAllReduce(in, out, kCount, kFloat, kSum, first, stream), "all-reduce"); });
  launch_graph(graph, stream);
  synchronize();
  expect("sum of a graph", out, combined(ranks, kCount, plus));
  check(getenv("ABORTED") ? ncclCommAbort(first) : ncclCommDestroy(first), "end");
  for (const char* name : {"second", "third"}) {
    float* data = device_floats(values_of(ranks.rank));
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, communicator(ranks, name), nullptr), "all-reduce");
    expect(name, data, combined(ranks, kCount, plus));
  }
  if (getenv("ABORTED")) return;
  std::vector<float> zeros(kCount);
  std::copy(zeros.begin(), zeros.end(), out);
  launch_graph(graph, stream);
  synchronize();
  expect("sum of a replay", out, combined(ranks, kCount, plus));
}

}  // namespace

bool nccl_program::member_scenario(const std::string& name, const Ranks& ranks) {
  static const std::map<std::string, void (*)(const Ranks&)> all = {
      {"unseen", unseen},   {"children", children},         {"environment_decides", environment_decides},
      {"two_ask", two_ask}, {"slow_partner", slow_partner}, {"graph_stays", graph_stays}};
  const auto found = all.find(name);
  return found != all.end() && (found->second(ranks), true);
}
