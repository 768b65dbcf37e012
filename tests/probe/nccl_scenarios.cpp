// What nccl_client does, by name.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <thread>

#include "probes/forkpoint.h"
#include "tests/probe/nccl_checks.h"
#include "tests/probe/nccl_program.h"

using namespace nccl_program;
using forkpoint::FakeNcclConfig;

namespace {

// Every call once; prints what came out, which the probe must not change.
void all_calls(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  void* stream = new_stream();
  const auto shares = static_cast<size_t>(ranks.size);
  forkpoint::Step step(0);
  float* in = device_floats(values_of(ranks.rank, kCount * shares));
  float* out = device_floats(std::vector<float>(kCount * shares));
  const auto show = [&](const char* what) {
    double sum = 0;
    for (const float value : host_floats(out, kCount * shares)) sum += value;
    printf("%s %.1f\n", what, sum);
  };
  check(ncclAllReduce(in, out, kCount, kFloat, kSum, comm, stream), "all-reduce"), show("all_reduce");
  check(ncclReduceScatter(in, out, kCount, kFloat, kAvg, comm, stream), "reduce-scatter"), show("reduce_scatter");
  check(ncclReduce(in, ranks.rank == 1 ? out : nullptr, kCount, kFloat, kMax, 1, comm, stream), "reduce"),
      show("reduce");
  check(ncclBroadcast(ranks.rank == 0 ? in : nullptr, out, kCount, kFloat, 0, comm, stream), "broadcast"),
      show("broadcast");
  check(ncclAllGather(in, out, kCount, kFloat, comm, stream), "all-gather"), show("all_gather");
  check(ncclAlltoAll(in, out, kCount, kFloat, comm, stream), "all-to-all"), show("all_to_all");
  check(ncclGather(in, ranks.rank == 0 ? out : nullptr, kCount, kFloat, 0, comm, stream), "gather"), show("gather");
  check(ncclScatter(ranks.rank == 1 ? in : nullptr, out, kCount, kFloat, 1, comm, stream), "scatter"), show("scatter");
  if (ranks.rank == 0) check(ncclSend(in, kCount, kFloat, 1, comm, stream), "send");
  if (ranks.rank == 1) check(ncclRecv(out, kCount, kFloat, 0, comm, stream), "recv");
  show("received");
  check(ncclBcast(out, kCount, kFloat, 1, comm, stream), "bcast"), show("bcast");
  check(ncclAllReduce(nullptr, nullptr, 0, kFloat, kSum, comm, stream), "nothing");
  check(ncclCommDestroy(comm), "destroy");
}

void in_place(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  for (int i = 0; i < 2; ++i) check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce");
  synchronize();
}

// Two all-reduces of which the second reads what the first puts out, on two streams, and messages in a ring: in one
// group, where nothing runs before it ends.
void group(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  void *left = new_stream(), *right = new_stream();
  forkpoint::Step step(0);
  float* a = device_floats(values_of(ranks.rank));
  float* b = device_floats(values_of(ranks.rank + 10));
  float* received = device_floats(std::vector<float>(kCount));
  const int next = (ranks.rank + 1) % ranks.size, before = (ranks.rank + ranks.size - 1) % ranks.size;
  check(ncclGroupStart(), "start");
  check(ncclGroupStart(), "start");
  check(ncclAllReduce(a, a, kCount, kFloat, kSum, comm, left), "all-reduce");
  check(ncclGroupEnd(), "end");
  check(ncclAllReduce(b, b, kCount, kFloat, kMax, comm, right), "all-reduce");
  check(ncclSend(b, kCount, kFloat, next, comm, right), "send");
  check(ncclRecv(received, kCount, kFloat, before, comm, left), "recv");
  memset(received, 0, kCount * sizeof(float));  // a group that has run already would have filled it
  check(ncclGroupEnd(), "end");
  synchronize();
}

void failing(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  const int expected = getenv("FAKE_NCCL_FAIL") ? 3 : 0;
  if (getenv("IN_GROUP")) {
    check(ncclGroupStart(), "start");
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce");
    check(ncclGroupEnd(), "end", expected);
  } else {
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce", expected);
  }
  check(ncclGroupEnd(), "an end too many", 5);
  check(ncclGroupStart(), "start");
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce",
        getenv("IN_GROUP") ? 0 : expected);
  check(ncclGroupSimulateEnd(nullptr), "simulated");
  synchronize();
}

// The program tells of the collective itself: the probe must not tell of it again.
void reported(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  const int32_t members[] = {0, 1};
  {
    forkpoint::Collective scope("all_reduce", "world", members, 2, "fc");
    forkpoint::tensor("weight.grad", FORKPOINT_ROLE_INPUT, data, {kCount}, FORKPOINT_CUDA);
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce");
    forkpoint::tensor("weight.grad", FORKPOINT_ROLE_OUTPUT, data, {kCount}, FORKPOINT_CUDA);
  }
  forkpoint::Scope layer(FORKPOINT_BACKWARD, "blocks.0");
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce");
  synchronize();
}

int number_of(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text ? atoi(text) : otherwise;
}

// A training: an all-reduce a step on the world, one on a half of it. A short one, unless TRAIN_STEPS says so; of
// TRAIN_PAUSE_MS between two steps.
void train(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks), half = nullptr;
  check(ncclCommSplit(comm, ranks.rank / 2, ranks.rank, &half, nullptr), "split");
  float* data = device_floats(values_of(ranks.rank));
  float* sum = device_floats(std::vector<float>(kCount));
  const int steps = number_of("TRAIN_STEPS", 3);
  for (int i = 0; i < steps; ++i) {
    usleep(1000u * static_cast<useconds_t>(number_of("TRAIN_PAUSE_MS", 0)));
    forkpoint::Step step(i);
    check(ncclAllReduce(data, sum, kCount, kFloat, getenv("OTHER_REDUCTION") && i == 1 ? kMax : kSum, comm, nullptr),
          "world");
    check(ncclAllReduce(sum, data, kCount / 2, kFloat, kAvg, half, nullptr), "half");
    synchronize();
  }
}

// Ranks 0-1 and 2-3 each with an id of their own.
void sub_groups(const Ranks& ranks) {
  NcclComm comm = nullptr, extra = nullptr;
  const Ranks middle = {ranks.rank - 1, 2, ranks.folder};
  if (getenv("EXTRA_COMMUNICATOR") &&
      (ranks.rank == 1 || ranks.rank == 2)) {  // the pair has another name there than on 0 and 3
    check(ncclCommInitRank(&extra, 2, shared_id(middle, "middle"), middle.rank), "init");
  }
  const Ranks pair = {ranks.rank % 2, 2, ranks.folder};
  check(ncclCommInitRank(&comm, 2, shared_id(pair, "pair" + std::to_string(ranks.rank / 2)), pair.rank), "init");
  const bool other_input = getenv("OTHER_INPUT") && atoi(getenv("OTHER_INPUT")) == ranks.rank;
  float* data = device_floats(values_of(ranks.rank + (other_input ? 7 : 0)));
  forkpoint::Step step(0);
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "pair");
  synchronize();
}

void all_reduce_in_threads(const std::vector<NcclComm>& comms) {
  std::vector<std::thread> threads;
  for (size_t place = 0; place < comms.size(); ++place) {
    threads.emplace_back([&, place] {
      float* data = device_floats(values_of(static_cast<int>(place)));
      check(ncclAllReduce(data, data, kCount, kFloat, kSum, comms[place], new_stream()), "all-reduce");
    });
  }
  for (std::thread& thread : threads) thread.join();
  synchronize();
}

void threads(const Ranks& ranks) {
  std::vector<NcclComm> comms(4);
  const NcclUniqueId id = shared_id(ranks, "threads");
  std::vector<std::thread> makers;
  for (int place = 0; place < 4; ++place) {
    makers.emplace_back(
        [&, place] { check(ncclCommInitRank(&comms[static_cast<size_t>(place)], 4, id, place), "init"); });
  }
  for (std::thread& maker : makers) maker.join();
  forkpoint::Step step(0);
  all_reduce_in_threads(comms);
}

void init_all(const Ranks&) {
  std::vector<NcclComm> comms(3);
  check(ncclCommInitAll(comms.data(), 3, nullptr), "init all");
  forkpoint::Step step(0);
  std::vector<float*> data;
  check(ncclGroupStart(), "start");
  for (int place = 0; place < 3; ++place) {
    data.push_back(device_floats(values_of(place)));
    check(
        ncclAllReduce(data.back(), data.back(), kCount, kFloat, kSum, comms[static_cast<size_t>(place)], new_stream()),
        "all-reduce");
  }
  check(ncclGroupEnd(), "end");
  synchronize();
}

// Two processes with two GPUs each, made in a group.
void two_each(const Ranks& ranks) {
  std::vector<NcclComm> comms(2);
  const NcclUniqueId id = shared_id(ranks, "four");
  check(ncclGroupStart(), "start");
  for (int i = 0; i < 2; ++i)
    check(ncclCommInitRank(&comms[static_cast<size_t>(i)], 4, id, 2 * ranks.rank + i), "init");
  check(ncclGroupEnd(), "end");
  forkpoint::Step step(0);
  check(ncclGroupStart(), "start");
  for (int i = 0; i < 2; ++i) {
    float* data = device_floats(values_of(2 * ranks.rank + i));
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, comms[static_cast<size_t>(i)], new_stream()), "all-reduce");
  }
  check(ncclGroupEnd(), "end");
  synchronize();
}

void nonblocking(const Ranks& ranks) {
  FakeNcclConfig config;
  config.blocking = 0;
  NcclComm comm = nullptr, child = nullptr;
  check(ncclCommInitRankConfig(&comm, ranks.size, shared_id(ranks, "world"), ranks.rank, &config), "init", 7);
  if (!getenv("STUCK")) wait_until_ready(comm);
  float* data = device_floats(values_of(ranks.rank));
  forkpoint::Step step(0);
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce", 7);
  if (getenv("STUCK")) {
    for (int i = 0; i < 20; ++i) check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce", 7);
    return;
  }
  wait_until_ready(comm);
  check(ncclGroupStart(), "start");
  check(ncclAllReduce(data, data, kCount, kFloat, kMax, comm, nullptr), "all-reduce");
  check(ncclGroupEnd(), "end", 7);
  wait_until_ready(comm);
  check(ncclCommSplit(comm, 0, -ranks.rank, &child, nullptr), "split");
  wait_until_ready(comm);
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, child, nullptr), "all-reduce", 7);
  wait_until_ready(child);
  synchronize();
}

void shrink(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks), smaller = nullptr;
  int excluded[] = {1};
  forkpoint::Step step(0);
  if (ranks.rank == 1) return;
  check(ncclCommShrink(comm, excluded, 1, &smaller, nullptr, 0), "shrink");
  float* data = device_floats(values_of(ranks.rank));
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, smaller, nullptr), "all-reduce");
  synchronize();
}

// Factors made and dropped around each call, as frameworks do.
void premul(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  float factor = getenv("OTHER_FACTOR") ? 0.25f : 0.5f;
  int op = 0;
  check(ncclRedOpCreatePreMulSum(&op, &factor, kFloat, 1, comm), "operator");
  check(ncclAllReduce(data, data, kCount, kFloat, op, comm, nullptr), "all-reduce");
  check(ncclRedOpDestroy(op, comm), "operator's end");
  float* on_device = device_floats({0.125f});
  check(ncclRedOpCreatePreMulSum(&op, on_device, kFloat, 0, comm), "operator");
  check(ncclAllReduce(data, data, kCount, kFloat, op, comm, nullptr), "all-reduce");
  synchronize();
  check(ncclRedOpDestroy(op, comm), "operator's end");
}

// The same address for another communicator.
void made_again(const Ranks& ranks) {
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  for (int i = 0; i < 3; ++i) {
    NcclComm comm = nullptr;
    check(ncclCommInitRank(&comm, ranks.size, shared_id(ranks, "round" + std::to_string(i)), ranks.rank), "init");
    check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce");
    synchronize();
    check(ncclCommDestroy(comm), "destroy");
  }
}

void from_scopes(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  float* data = device_floats(values_of(ranks.rank));
  float* sum = device_floats(std::vector<float>(kCount));
  forkpoint::Step step(0);
  for (const char* layer : {"a", "b"}) {
    forkpoint::Scope scope(FORKPOINT_BACKWARD,
                           (std::string("of rank ") + std::to_string(ranks.rank) + "." + layer).c_str());
    check(ncclAllReduce(data, sum, kCount, kFloat, kSum, comm, nullptr), "all-reduce");
  }
  synchronize();
}

// ---- Reductions, each of which looks at what comes out. Says how many calls NCCL itself was given for them.
void check_reduced(NcclComm comm, forkpoint::NcclResult result, const char* what) {
  if (result == 7) wait_until_ready(comm);
  else check(result, what);
}

void reduce_on(const Ranks& ranks, const std::string& what, NcclComm comm, void* stream, size_t count) {
  const auto shares = static_cast<size_t>(ranks.size);
  float* in = device_floats(values_of(ranks.rank, count * shares));
  float* out = device_floats(std::vector<float>(count * shares));
  check_reduced(comm, ncclAllReduce(in, out, count, kFloat, kSum, comm, stream), "all-reduce");
  const std::vector<float> sum = combined(ranks, count * shares, plus);
  expect((what + " all-reduce").c_str(), out, {sum.begin(), sum.begin() + static_cast<long>(count)});
  check(ncclReduceScatter(in, in + count * static_cast<size_t>(ranks.rank), count, kFloat, kSum, comm, stream), "scatter");
  const auto own = sum.begin() + static_cast<long>(count) * ranks.rank;
  expect((what + " reduce-scatter in place").c_str(), in + count * static_cast<size_t>(ranks.rank), {own, own + static_cast<long>(count)});
  float* again = device_floats(values_of(ranks.rank, count));
  check(ncclReduce(again, ranks.rank == 1 ? out : nullptr, count, kFloat, kMax, 1, comm, stream), "reduce");
  if (ranks.rank == 1) expect((what + " reduce").c_str(), out, combined(ranks, count, [](float a, float b) { return std::max(a, b); }));
  check(ncclAllReduce(again, again, count, kFloat, kSum, comm, nullptr), "all-reduce");
  expect((what + " all-reduce in place").c_str(), again, {sum.begin(), sum.begin() + static_cast<long>(count)});
}

void reduce_in_group(const Ranks& ranks, NcclComm comm) {
  void *left = new_stream(), *right = new_stream();
  float* a = device_floats(values_of(ranks.rank));
  float* b = device_floats(values_of(ranks.rank));
  float* early = device_floats(std::vector<float>(kCount, 7));
  check(ncclGroupStart(), "start");
  check(ncclAllReduce(a, early, kCount, kFloat, kSum, comm, left), "all-reduce");
  check(ncclAllReduce(b, b, kCount, kFloat, kSum, comm, right), "all-reduce");
  expect("nothing runs before the group ends", early, std::vector<float>(kCount, 7));
  check(ncclGroupEnd(), "end");
  expect("group", early, combined(ranks, kCount, plus));
  expect("group in place", b, combined(ranks, kCount, plus));
}

void reduce_by_factor(const Ranks& ranks, NcclComm comm) {
  float half = 0.5f;
  int op = 0;
  float* data = device_floats(values_of(ranks.rank));
  check(ncclRedOpCreatePreMulSum(&op, &half, kFloat, 1, comm), "reduction");
  half = 100;  // it was read
  check(ncclAllReduce(data, data, kCount, kFloat, op, comm, nullptr), "all-reduce");
  expect("scaled", data, combined(ranks, kCount, plus, 0.5f));
  check(ncclRedOpDestroy(op, comm), "destroy");
}

void reductions(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  forkpoint::Step step(0);
  int before = fake_nccl_calls();
  reduce_on(ranks, "world", comm, new_stream(), kCount);
  if (!getenv("FEW_BYTES")) reduce_on(ranks, "large", comm, new_stream(), 15'000);  // more than the fake NCCL takes
  reduce_in_group(ranks, comm);
  reduce_by_factor(ranks, comm);
  float* none = device_floats({1, 2});
  check(ncclAllReduce(none, none, 0, kFloat, kSum, comm, nullptr), "nothing");
  expect("nothing", none, {1, 2});
  printf("world calls %d\n", fake_nccl_calls() - before);

  NcclComm child = nullptr;
  check(ncclCommSplit(comm, 0, ranks.rank, &child, nullptr), "split");
  before = fake_nccl_calls();
  reduce_on(ranks, "child", child, nullptr, 1);  // fewer elements than ranks
  printf("child calls %d\n", fake_nccl_calls() - before);
  check(ncclCommDestroy(child), "destroy");
  check(ncclCommDestroy(comm), "destroy");  // a device has room for the kernels of two

  FakeNcclConfig config;
  config.blocking = 0;
  NcclComm slow = nullptr;
  check(ncclCommInitRankConfig(&slow, ranks.size, shared_id(ranks, "slow"), ranks.rank, &config), "init", 7);
  wait_until_ready(slow);
  if (!getenv("FEW_BYTES")) reduce_on(ranks, "nonblocking", slow, nullptr, 5);  // NCCL's own return before they are enqueued
  NcclComm grouped = nullptr;
  check(ncclGroupStart(), "start");
  check(ncclCommInitRank(&grouped, ranks.size, shared_id(ranks, "grouped"), ranks.rank), "init");
  check(ncclGroupEnd(), "end");
  before = fake_nccl_calls();
  reduce_on(ranks, "grouped", grouped, nullptr, 3);
  printf("grouped calls %d\n", fake_nccl_calls() - before);
  float* gathered = device_floats(std::vector<float>(kCount * static_cast<size_t>(ranks.size)));
  before = fake_nccl_calls();
  check(ncclAllGather(gathered, gathered, 1, kFloat, grouped, nullptr), "all-gather");
  printf("gather calls %d\n", fake_nccl_calls() - before);
}

// Two processes that hold two members each, and one thread for both.
void members(const Ranks& ranks) {
  std::vector<NcclComm> comms(2);
  const NcclUniqueId id = shared_id(ranks, "members");
  const bool blocks = !getenv("NONBLOCKING");
  FakeNcclConfig config;
  config.blocking = blocks;
  if (blocks) check(ncclGroupStart(), "start");
  for (int i = 0; i < 2; ++i) {
    check(ncclCommInitRankConfig(&comms[static_cast<size_t>(i)], 4, id, 2 * ranks.rank + i, &config), "init",
          blocks ? 0 : 7);
  }
  if (blocks) check(ncclGroupEnd(), "end");
  for (NcclComm comm : comms) wait_until_ready(comm);
  printf("ready\n");
  if (getenv("NO_CALLS")) return;  // the fake device does one kernel at a time
  forkpoint::Step step(0);
  std::vector<float*> data;
  check(ncclGroupStart(), "start");
  for (int i = 0; i < 4; ++i) {
    const int member = i % 2;
    data.push_back(device_floats(values_of(2 * ranks.rank + member)));
    check(ncclAllReduce(data.back(), data.back(), kCount, kFloat, kSum, comms[static_cast<size_t>(member)], new_stream()),
          "all-reduce");
  }
  const int ended = ncclGroupEnd();
  if (ended != 7) check(ended, "end");
  for (NcclComm comm : comms) wait_until_ready(comm);
  for (const float* sum : data) expect("member's sum", sum, combined({0, 4, ""}, kCount, plus));
}

// On a communicator that does not block.
void asked(const Ranks& ranks) {
  FakeNcclConfig config;
  config.blocking = 0;
  NcclComm comm = nullptr, child = nullptr;
  check(ncclCommInitRankConfig(&comm, ranks.size, shared_id(ranks, "asked"), ranks.rank, &config), "init", 7);
  wait_until_ready(comm);
  forkpoint::Step step(0);
  float* data = device_floats(values_of(ranks.rank));
  // Rank 1 comes to its reduction only when rank 0 has left its own.
  const bool late = getenv("LATE");
  if (late && ranks.rank == 1 && shared_id(ranks, "left").bytes[0] == 0) printf("rank 0 was kept WRONG\n");
  check(ncclAllReduce(data, data, kCount, kFloat, kSum, comm, nullptr), "all-reduce", 7);
  if (late && ranks.rank == 0) shared_id(ranks, "left");
  wait_until_ready(comm);
  expect("asked", data, combined(ranks, kCount, plus));

  check(ncclCommSplit(comm, 0, ranks.rank, &child, nullptr), "split");
  wait_until_ready(comm);
  wait_until_ready(child);
  float* more = device_floats(values_of(ranks.rank));
  check(ncclGroupStart(), "start");
  check(ncclAllReduce(more, more, kCount, kFloat, kSum, child, nullptr), "all-reduce");
  check(ncclGroupEnd(), "end", 7);
  wait_until_ready(child);
  expect("child in a group", more, combined(ranks, kCount, plus));

  // In one group with a call of NCCL's, which has it in the stream at once on rank 1 and late on rank 0.
  NcclComm uneven = nullptr;
  config.blocking = ranks.rank == 1;
  const int later = ranks.rank == 1 ? 0 : 7;
  check(ncclCommInitRankConfig(&uneven, ranks.size, shared_id(ranks, "uneven"), ranks.rank, &config), "init", later);
  wait_until_ready(uneven);
  setenv("FAKE_NCCL_DELAY_MS", "200", 1);
  void* stream = new_stream();
  float* mixed = device_floats(values_of(ranks.rank));
  float* told = device_floats(values_of(ranks.rank));
  check(ncclGroupStart(), "start");
  check(ncclAllReduce(mixed, mixed, kCount, kFloat, kSum, uneven, stream), "all-reduce");
  check(ncclBroadcast(told, told, kCount, kFloat, 1, uneven, stream), "broadcast");
  check(ncclGroupEnd(), "end", later);
  wait_until_ready(uneven);
  expect("mixed", mixed, combined(ranks, kCount, plus));
  expect("broadcast", told, values_of(1));
}

void scaled_in_group(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  forkpoint::Step step(0);
  float half = 0.5f;
  int op = 0;
  float* data = device_floats(values_of(ranks.rank));
  check(ncclGroupStart(), "start");
  check(ncclRedOpCreatePreMulSum(&op, &half, kFloat, 1, comm), "reduction");
  check(ncclAllReduce(data, data, kCount, kFloat, op, comm, nullptr), "all-reduce");
  check(ncclRedOpDestroy(op, comm), "destroy");
  check(ncclGroupEnd(), "end");
  expect("scaled in a group", data, combined(ranks, kCount, plus, 0.5f));
}

// Calls of one graph on two streams that nothing but the communicator puts in order, and others around its replays.
void in_graphs(const Ranks& ranks) {
  NcclComm comm = world_communicator(ranks);
  // Of streams that do not wait for each other the fake device takes the youngest first: another one on each rank.
  void* first = new_stream();
  void *left = new_stream(), *right = new_stream(), *last = new_stream();
  void* other = ranks.rank == 0 ? first : last;
  float *in = device_floats(values_of(ranks.rank)), *more = device_floats(values_of(ranks.rank + 7));
  std::vector<float> more_sum = values_of(7);
  for (size_t i = 0; i < kCount; ++i) more_sum[i] += values_of(8)[i];
  float *a = device_floats(std::vector<float>(kCount)), *b = device_floats(std::vector<float>(kCount)),
        *before = device_floats(std::vector<float>(kCount)), *behind = device_floats(std::vector<float>(kCount));
  void* graph = captured(left, [&] {
    order(left, right);
    check(ncclAllReduce(in, a, kCount, kFloat, kSum, comm, right), "all-reduce");
    check(ncclAllReduce(in, b, kCount, kFloat, kSum, comm, left), "all-reduce");  // joins what is on the other stream
  });
  if (!graph) return;
  defer_device_work();
  for (int i = 0; i < 3; ++i) {
    check(ncclAllReduce(more, before, kCount, kFloat, kSum, comm, other), "all-reduce");
    launch_graph(graph, left);
    if (getenv("BEHIND")) check(ncclAllReduce(more, behind, kCount, kFloat, kSum, comm, other), "all-reduce");
    synchronize();
  }
  expect("first of a graph", a, combined(ranks, kCount, plus));
  expect("second of a graph", b, combined(ranks, kCount, plus));
  expect("before a graph", before, more_sum);
  if (getenv("BEHIND")) expect("behind a graph", behind, more_sum);
}

const std::map<std::string, std::function<void(const Ranks&)>>& scenarios() {
  static const std::map<std::string, std::function<void(const Ranks&)>> all = {
      {"all", all_calls},         {"in_place", in_place},       {"group", group},
      {"failing", failing},       {"reported", reported},       {"train", train},
      {"sub_groups", sub_groups}, {"threads", threads},         {"init_all", init_all},
      {"two_each", two_each},     {"nonblocking", nonblocking}, {"shrink", shrink},
      {"premul", premul},         {"made_again", made_again},   {"from_scopes", from_scopes},
      {"reductions", reductions}, {"members", members},         {"asked", asked},
      {"scaled_in_group", scaled_in_group}, {"in_graphs", in_graphs}};
  return all;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int nccl_program_main(int argc, char** argv) {
  if (argc < 6) return 98;
  const Ranks ranks = {atoi(argv[3]), atoi(argv[4]), argv[5]};
  if (strcmp(argv[1], "none") != 0) load_cuda(argv[1]);
  const auto scenario = scenarios().find(argv[2]);
  if (scenario != scenarios().end()) scenario->second(ranks);
  else if (!swap_scenario(argv[2], ranks) && !member_scenario(argv[2], ranks))
    return 97;
  if (getenv("SHOW_CALLS")) printf("calls %d\n", fake_nccl_calls());
  return 0;
}
