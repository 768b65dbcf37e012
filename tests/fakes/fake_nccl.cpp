// The calls of the fake NCCL. As there, each public symbol is weak at the address of a strong pncclX, and ncclBcast
// calls ncclBroadcast through its symbol.
#include "tests/fakes/fake_nccl.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "lib/dtype.h"
#include "tests/fakes/fake_nccl_world.h"

using namespace forkpoint;
using namespace forkpoint::fake_nccl;

namespace {

constexpr NcclResult kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5;
std::atomic<int> served{0};

thread_local int group_depth = 0;
thread_local std::vector<std::pair<Comm*, Issued>> group_calls;
thread_local std::vector<Comm*> group_comms;

const char* setting(const char* name) {
  const char* text = getenv(name);
  return text ? text : "";
}
bool fails(const char* call) { return strcmp(setting("FAKE_NCCL_FAIL"), call) == 0; }

int delay_ms() { return *setting("FAKE_NCCL_DELAY_MS") ? atoi(setting("FAKE_NCCL_DELAY_MS")) : 30; }

// On a thread of NCCL's own, some time later; or never.
template <typename Body>
NcclResult later(Comm* comm, Body body) {
  ++comm->in_progress;
  std::thread([comm, body = std::move(body)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::max(delay_ms(), 0)));
    if (delay_ms() < 0) return;
    body();
    --comm->in_progress;
  }).detach();
  return kNcclInProgress;
}

NcclResult submit(Comm* comm, std::vector<Issued> calls) {
  if (comm && !comm->blocking) {
    return later(comm, [calls = std::move(calls)]() mutable { launch(std::move(calls)); });
  }
  launch(std::move(calls));
  return kNcclSuccess;
}

// Flips a bit of what a call has put out, where the tests want it.
void maybe_alter(const Comm& comm, uint64_t number, void* output, size_t bytes) {
  int rank = -1, wanted = -1;
  if (sscanf(setting("FAKE_NCCL_ALTER"), "%d:%d", &rank, &wanted) != 2) return;
  const int own = *setting("RANK") ? atoi(setting("RANK")) : comm.place;
  if (rank == own && static_cast<uint64_t>(wanted) == number && bytes > 0) static_cast<char*>(output)[0] ^= 4;
}

struct Request {
  const char* name;
  const void* input;
  size_t input_count;
  void* output;
  size_t output_count;
  int type;
};

NcclResult issue(void* handle, const Request& request,
                 std::function<void(const std::vector<const char*>&, char* output)> compute, void* stream) {
  ++served;
  auto* comm = static_cast<Comm*>(handle);
  const DType* dtype = nccl_dtype(request.type);
  if (!comm || !dtype) return kInvalidArgument;
  if (fails(request.name)) return kInternalError;
  const auto element = static_cast<size_t>(size_bytes(*dtype));
  const size_t output_bytes = request.output_count * element;
  if (request.input_count * element > kMostBytes) return kInvalidArgument;
  Issued issued;
  issued.family = comm->family;
  issued.call.name = request.name;
  issued.call.place = comm->place;
  issued.call.stream = stream;
  issued.call.input = request.input;
  issued.call.input_bytes = request.input_count * element;
  issued.call.output = request.output;
  issued.call.finish = [=, number = comm->calls++](const std::vector<const char*>& given) {
    if (output_bytes == 0) return;
    compute(given, static_cast<char*>(request.output));
    maybe_alter(*comm, number, request.output, output_bytes);
  };
  if (group_depth > 0) {
    group_calls.push_back({comm, std::move(issued)});
    return kNcclSuccess;
  }
  return submit(comm, {std::move(issued)});
}

template <typename Number>
void reduce_as(const std::vector<const char*>& given, size_t first, size_t count, int op, double factor, char* output) {
  for (size_t i = 0; i < count; ++i) {
    Number sum = 0;
    for (size_t rank = 0; rank < given.size(); ++rank) {
      Number value;
      memcpy(&value, given[rank] + (first + i) * sizeof(Number), sizeof(Number));
      if (op >= kNcclBuiltInReductions) value = static_cast<Number>(value * factor);
      if (rank == 0) sum = value;
      else if (op == 1) sum *= value;
      else if (op == 2) sum = std::max(sum, value);
      else if (op == 3) sum = std::min(sum, value);
      else sum += value;
    }
    if (op == 4) sum /= static_cast<Number>(given.size());
    memcpy(output + i * sizeof(Number), &sum, sizeof(Number));
  }
}

double factor_of(const Comm& comm, int op) {
  const size_t index = static_cast<size_t>(op - kNcclBuiltInReductions);
  if (op < kNcclBuiltInReductions || index >= comm.operators.size()) return 1;
  const Comm::Operator& made = comm.operators[index];
  if (!made.on_device) return made.value;
  float value;
  memcpy(&value, made.address, sizeof(value));
  return value;
}

void reduce(const Comm& comm, const std::vector<const char*>& given, size_t first, size_t count, int type, int op,
            char* output) {
  const double factor = factor_of(comm, op);
  switch (*nccl_dtype(type)) {
    case DType::f64: return reduce_as<double>(given, first, count, op, factor, output);
    case DType::i32: return reduce_as<int32_t>(given, first, count, op, factor, output);
    case DType::u8: return reduce_as<uint8_t>(given, first, count, op, factor, output);
    default: return reduce_as<float>(given, first, count, op, factor, output);
  }
}

size_t bytes(size_t count, int type) { return count * static_cast<size_t>(size_bytes(*nccl_dtype(type))); }

NcclResult message(void* handle, const void* in, void* out, size_t count, int type, int peer, void* stream) {
  ++served;
  auto* comm = static_cast<Comm*>(handle);
  if (!comm || !nccl_dtype(type) || peer < 0 || peer >= comm->family->size || bytes(count, type) > kMostMessageBytes) {
    return kInvalidArgument;
  }
  Issued issued;
  issued.family = comm->family;
  issued.call.place = comm->place;
  issued.call.stream = stream;
  issued.call.input = in;
  issued.call.output = out;
  (in ? issued.call.send_to : issued.call.receive_from) = peer;
  issued.call.message_bytes = bytes(count, type);
  issued.call.finish = [=, number = comm->calls++](const auto&) {
    maybe_alter(*comm, number, out, bytes(count, type));
  };
  if (group_depth > 0) {
    group_calls.push_back({comm, std::move(issued)});
    return kNcclSuccess;
  }
  return submit(comm, {std::move(issued)});
}

NcclResult make(NcclComm* made, const std::string& name, int size, int place, const FakeNcclConfig* config) {
  ++served;
  if (size < 1 || size > kMostRanks || place < 0 || place >= size) return kInvalidArgument;
  if (fails("CommInitRank")) return kInternalError;
  auto* comm = new Comm;
  comm->place = place;
  comm->blocking = !config || config->blocking != 0;
  if (*setting("NCCL_COMM_BLOCKING")) comm->blocking = atoi(setting("NCCL_COMM_BLOCKING")) != 0;
  comm->family = attach(name, size, place);
  if (!comm->family) return kNcclSystemError;
  *made = comm;
  if (group_depth > 0) {
    group_comms.push_back(comm);
    return kNcclSuccess;
  }
  if (!comm->blocking) return later(comm, [family = comm->family] { wait_for_all(*family); });
  return wait_for_all(*comm->family) ? kNcclSuccess : kInternalError;
}

std::string name_in(const NcclUniqueId& id) { return {id.bytes, strnlen(id.bytes, sizeof(id.bytes))}; }

// The ranks that chose a colour, in the order of their keys.
std::vector<int> members_of_split(Comm& parent, int number, int color) {
  std::vector<int> members;
  Shared& shared = *parent.family->shared;
  for (int i = 0; i < parent.family->size; ++i) {
    while (shared.split[number][i].made == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (shared.split[number][i].color == color) members.push_back(i);
  }
  std::stable_sort(members.begin(), members.end(), [&](int left, int right) {
    return shared.split[number][left].key < shared.split[number][right].key;
  });
  return members;
}

NcclResult end_group(bool launches) {
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0) return kNcclSuccess;
  std::vector<std::pair<Comm*, Issued>> calls = std::move(group_calls);
  std::vector<Comm*> comms = std::move(group_comms);
  group_calls.clear();
  group_comms.clear();
  if (launches && fails("GroupEnd")) return kInternalError;
  for (Comm* comm : comms) {
    if (!wait_for_all(*comm->family)) return kInternalError;
  }
  if (!launches || calls.empty()) return kNcclSuccess;
  Comm* slow = nullptr;
  std::vector<Issued> issued;
  for (auto& [comm, call] : calls) {
    if (!comm->blocking) slow = comm;
    issued.push_back(std::move(call));
  }
  return submit(slow, std::move(issued));
}

}  // namespace

// Stated once: the strong name, and the public one at its address.
#define FAKE_NCCL(name, parameters, ...)                                                          \
  extern "C" __attribute__((visibility("default"))) NcclResult pnccl##name parameters __VA_ARGS__ \
  extern "C" __attribute__((visibility("default"), weak, alias("pnccl" #name))) NcclResult nccl##name parameters;

extern "C" __attribute__((visibility("default"))) int fake_nccl_calls() { return served; }

FAKE_NCCL(GetUniqueId, (NcclUniqueId* id), {
  *id = {};
  const std::string name = new_name();
  memcpy(id->bytes, name.data(), name.size());
  return kNcclSuccess;
})
// Without a configuration it says that it has succeeded, also where the environment makes it go on in the background.
FAKE_NCCL(CommInitRank, (NcclComm * comm, int size, NcclUniqueId id, int rank), {
  const NcclResult result = make(comm, name_in(id), size, rank, nullptr);
  return result == kNcclInProgress ? kNcclSuccess : result;
})
FAKE_NCCL(CommInitRankConfig, (NcclComm* comm, int size, NcclUniqueId id, int rank, void* config), {
  return make(comm, name_in(id), size, rank, static_cast<FakeNcclConfig*>(config));
})
FAKE_NCCL(CommInitRankScalable, (NcclComm* comm, int size, int rank, int, NcclUniqueId* id, void* config), {
  return make(comm, name_in(id[0]), size, rank, static_cast<FakeNcclConfig*>(config));
})
FAKE_NCCL(CommInitAll, (NcclComm* comms, int size, const int*), {
  ++served;
  const std::string name = new_name();
  for (int i = 0; i < size; ++i) {
    auto* comm = new Comm;
    comm->place = i;
    comm->family = attach(name, size, i);
    comms[i] = comm;
  }
  return wait_for_all(*static_cast<Comm*>(comms[0])->family) ? kNcclSuccess : kInternalError;
})
FAKE_NCCL(CommSplit, (NcclComm handle, int color, int key, NcclComm* made, void* config), {
  auto* parent = static_cast<Comm*>(handle);
  const int number = parent->splits++;
  Shared::Choice& own = parent->family->shared->split[number][parent->place];
  own.color = color;
  own.key = key;
  own.made = 1;
  *made = nullptr;
  if (color < 0) return kNcclSuccess;
  const std::vector<int> members = members_of_split(*parent, number, color);
  const auto place = std::find(members.begin(), members.end(), parent->place) - members.begin();
  const std::string name = parent->family->name + "-s" + std::to_string(number) + "-c" + std::to_string(color);
  const auto* asked = static_cast<FakeNcclConfig*>(config);
  FakeNcclConfig inherited;
  inherited.blocking = asked ? asked->blocking : parent->blocking;
  const auto size = static_cast<int>(members.size());
  if (parent->blocking) return make(made, name, size, static_cast<int>(place), &inherited);
  // The new handle is there once the parent is ready; and yet the call says that it has succeeded.
  later(parent, [=] {
    NcclComm child = nullptr;
    make(&child, name, size, static_cast<int>(place), nullptr);
    static_cast<Comm*>(child)->blocking = inherited.blocking;
    __atomic_store_n(made, child, __ATOMIC_RELEASE);
  });
  return kNcclSuccess;
})
FAKE_NCCL(CommShrink, (NcclComm handle, int* excluded, int count, NcclComm* made, void* config, int), {
  auto* parent = static_cast<Comm*>(handle);
  int place = parent->place;
  for (int i = 0; i < count; ++i) place -= excluded[i] < parent->place ? 1 : 0;
  const std::string name = parent->family->name + "-k" + std::to_string(parent->splits++);
  return make(made, name, parent->family->size - count, place, static_cast<FakeNcclConfig*>(config));
})
FAKE_NCCL(CommFinalize, (NcclComm), { return kNcclSuccess; })
// Its address may come round again. REQUIRES here: its work is done.
FAKE_NCCL(CommDestroy, (NcclComm comm), { return ++served, delete static_cast<Comm*>(comm), kNcclSuccess; })
FAKE_NCCL(CommAbort, (NcclComm comm), {
  return ++served, static_cast<Comm*>(comm)->family->aborted = true, kNcclSuccess;
})
FAKE_NCCL(CommCount, (NcclComm comm, int* size), {
  return *size = static_cast<Comm*>(comm)->family->size, kNcclSuccess;
})
FAKE_NCCL(CommUserRank, (NcclComm comm, int* rank), { return *rank = static_cast<Comm*>(comm)->place, kNcclSuccess; })
FAKE_NCCL(CommCuDevice, (NcclComm, int* device), { return *device = 0, kNcclSuccess; })
FAKE_NCCL(CommGetAsyncError, (NcclComm comm, NcclResult* state), {
  *state = static_cast<Comm*>(comm)->in_progress > 0 ? kNcclInProgress : kNcclSuccess;
  if (*setting("FAKE_NCCL_ERROR")) *state = atoi(setting("FAKE_NCCL_ERROR"));
  return kNcclSuccess;
})
FAKE_NCCL(RedOpCreatePreMulSum, (int* op, void* scalar, int type, int residence, NcclComm handle), {
  auto* comm = static_cast<Comm*>(handle);
  Comm::Operator made{true, type, residence == kNcclScalarDevice, 0, scalar};
  if (!made.on_device && *nccl_dtype(type) == DType::f64) memcpy(&made.value, scalar, sizeof(made.value));
  else if (!made.on_device) made.value = *static_cast<float*>(scalar);
  const auto is_free = [](const Comm::Operator& one) { return !one.used; };
  const auto free = std::find_if(comm->operators.begin(), comm->operators.end(), is_free);
  const auto index = free - comm->operators.begin();
  if (free == comm->operators.end()) comm->operators.push_back(made);
  else *free = made;
  return *op = kNcclBuiltInReductions + static_cast<int>(index), kNcclSuccess;
})
// A call that was given the operator keeps its factor: it is looked up when the call is done, so only the slot is freed.
FAKE_NCCL(RedOpDestroy, (int op, NcclComm comm), {
  static_cast<Comm*>(comm)->operators.at(static_cast<size_t>(op - kNcclBuiltInReductions)).used = false;
  return kNcclSuccess;
})

FAKE_NCCL(AllReduce, (const void* in, void* out, size_t count, int type, int op, NcclComm comm, void* stream), {
  return issue(comm, {"AllReduce", in, count, out, count, type}, [=](const auto& given, char* output) {
    reduce(*static_cast<Comm*>(comm), given, 0, count, type, op, output);
  }, stream);
})
FAKE_NCCL(ReduceScatter, (const void* in, void* out, size_t count, int type, int op, NcclComm comm, void* stream), {
  const auto* self = static_cast<Comm*>(comm);
  return issue(comm, {"ReduceScatter", in, count * static_cast<size_t>(self->family->size), out, count, type},
               [=](const auto& given, char* output) {
    reduce(*self, given, count * static_cast<size_t>(self->place), count, type, op, output);
  }, stream);
})
FAKE_NCCL(Reduce, (const void* in, void* out, size_t count, int type, int op, int root, NcclComm comm, void* stream), {
  const auto* self = static_cast<Comm*>(comm);
  const size_t out_count = self->place == root ? count : 0;
  return issue(comm, {"Reduce", in, count, out, out_count, type}, [=](const auto& given, char* output) {
    reduce(*self, given, 0, count, type, op, output);
  }, stream);
})
FAKE_NCCL(Broadcast, (const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream), {
  const auto* self = static_cast<Comm*>(comm);
  const size_t in_count = self->place == root ? count : 0;
  return issue(comm, {"Broadcast", in, in_count, out, count, type}, [=](const auto& given, char* output) {
    memcpy(output, given[static_cast<size_t>(root)], bytes(count, type));
  }, stream);
})
FAKE_NCCL(Bcast, (void* data, size_t count, int type, int root, NcclComm comm, void* stream), {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
})
FAKE_NCCL(AllGather, (const void* in, void* out, size_t count, int type, NcclComm comm, void* stream), {
  const size_t size = static_cast<size_t>(static_cast<Comm*>(comm)->family->size);
  return issue(comm, {"AllGather", in, count, out, count * size, type}, [=](const auto& given, char* output) {
    for (size_t i = 0; i < size; ++i) memcpy(output + i * bytes(count, type), given[i], bytes(count, type));
  }, stream);
})
FAKE_NCCL(AlltoAll, (const void* in, void* out, size_t count, int type, NcclComm comm, void* stream), {
  if (*setting("FAKE_NCCL_OLD")) return kInvalidUsage;
  const auto* self = static_cast<Comm*>(comm);
  const size_t size = static_cast<size_t>(self->family->size);
  return issue(comm, {"AlltoAll", in, count * size, out, count * size, type}, [=](const auto& given, char* output) {
    const size_t share = bytes(count, type);
    const size_t own = static_cast<size_t>(self->place) * share;
    for (size_t i = 0; i < size; ++i) memcpy(output + i * share, given[i] + own, share);
  }, stream);
})
FAKE_NCCL(Gather, (const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream), {
  const auto* self = static_cast<Comm*>(comm);
  const size_t size = static_cast<size_t>(self->family->size);
  const size_t out_count = self->place == root ? count * size : 0;
  return issue(comm, {"Gather", in, count, out, out_count, type}, [=](const auto& given, char* output) {
    for (size_t i = 0; i < size; ++i) memcpy(output + i * bytes(count, type), given[i], bytes(count, type));
  }, stream);
})
FAKE_NCCL(Scatter, (const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream), {
  const auto* self = static_cast<Comm*>(comm);
  const size_t size = static_cast<size_t>(self->family->size);
  const size_t in_count = self->place == root ? count * size : 0;
  return issue(comm, {"Scatter", in, in_count, out, count, type}, [=](const auto& given, char* output) {
    const size_t share = bytes(count, type);
    memcpy(output, given[static_cast<size_t>(root)] + static_cast<size_t>(self->place) * share, share);
  }, stream);
})
FAKE_NCCL(Send, (const void* in, size_t count, int type, int peer, NcclComm comm, void* stream), {
  return message(comm, in, nullptr, count, type, peer, stream);
})
FAKE_NCCL(Recv, (void* out, size_t count, int type, int peer, NcclComm comm, void* stream), {
  return message(comm, nullptr, out, count, type, peer, stream);
})
FAKE_NCCL(GroupStart, (), { return ++group_depth, kNcclSuccess; })
FAKE_NCCL(GroupEnd, (), { return end_group(true); })
FAKE_NCCL(GroupSimulateEnd, (void*), { return end_group(false); })
