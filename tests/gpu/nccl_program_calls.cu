// nccl_program's calls: a step makes each collective on its own and in groups, then two of which one feeds the other.
#include "nccl_program.h"

#include <atomic>

using namespace nccl_program;

template <typename T>
__global__ void fill(T* data, size_t count, uint64_t seed, int place) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) data[i] = static_cast<T>(static_cast<float>(value_at(seed, place, i)));
}
__global__ void alter_input(uint32_t* data, uint32_t bits) { data[17] ^= bits; }
__global__ void alter_output(uint32_t* data, uint32_t bits) { data[17] ^= bits; }
__global__ void halve(float* to, const float* from, size_t count) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i] / 2;
}

namespace {

constexpr int kThreads = 256;
unsigned blocks_for(size_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

std::atomic<bool> failed{false};

// ---- Calls

template <typename T>
void fill_as(const Rank& rank, char* data, size_t count, uint64_t seed, int place) {
  fill<T><<<blocks_for(count), kThreads, 0, rank.stream>>>(reinterpret_cast<T*>(data), count, seed, place);
  CHECK(cudaGetLastError());
}

void prepare(const Rank& rank, const Call& call, int slot) {
  const Communicator& comm = rank.comms[call.which];
  const size_t count = static_cast<size_t>(comm.size) * kCount;
  use(rank);
  CHECK(cudaMemsetAsync(rank.out[slot], 0xee, count * size_of(call.type), rank.stream));
  if (call.fed) return;
  switch (call.type) {
    case ncclUint8: return fill_as<uint8_t>(rank, rank.in[slot], count, call.seed, comm.place);
    case ncclBfloat16: return fill_as<__nv_bfloat16>(rank, rank.in[slot], count, call.seed, comm.place);
    case ncclFloat64: return fill_as<double>(rank, rank.in[slot], count, call.seed, comm.place);
    case ncclInt32: return fill_as<int32_t>(rank, rank.in[slot], count, call.seed, comm.place);
    default: return fill_as<float>(rank, rank.in[slot], count, call.seed, comm.place);
  }
}

struct Ends {
  char *in, *out;
};

// In place, one side is the own share of the other.
Ends ends_of(const Rank& rank, const Call& call, int slot) {
  char* base = rank.in[slot];
  if (!call.in_place) return {base, rank.out[slot]};
  const int place = rank.comms[call.which].place;
  char* share = base + static_cast<size_t>(place) * kCount * size_of(call.type);
  if (call.kind == Kind::reduce_scatter || (call.kind == Kind::scatter && place == call.root)) return {base, share};
  if (call.kind == Kind::all_gather || (call.kind == Kind::gather && place == call.root)) return {share, base};
  return {base, base};
}

ncclRedOp_t operator_for(const Rank& rank, const Call& call) {
  constexpr ncclRedOp_t kBuiltIn[] = {ncclSum, ncclMax, ncclMin, ncclAvg};
  if (call.reduction < Reduction::half) return kBuiltIn[static_cast<int>(call.reduction)];
  ncclRedOp_t made;
  float half = 0.5f;
  const bool on_host = call.reduction == Reduction::half;
  CHECK(ncclRedOpCreatePreMulSum(&made, on_host ? &half : rank.factor, call.type,
                                 on_host ? ncclScalarHostImmediate : ncclScalarDevice, rank.comms[call.which].handle));
  return made;
}

void issue(const Rank& rank, const Call& call, int slot, ncclRedOp_t op) {
  const Communicator& comm = rank.comms[call.which];
  const auto [in, out] = ends_of(rank, call, slot);
  char* taken = gives(call, comm.place) ? out : nullptr;
  const int next = (comm.place + 1) % comm.size, before = (comm.place + comm.size - 1) % comm.size;
  ncclComm_t nccl = comm.handle;
  switch (call.kind) {
    case Kind::all_reduce: CHECK(ncclAllReduce(in, out, kCount, call.type, op, nccl, rank.stream)); break;
    case Kind::reduce_scatter: CHECK(ncclReduceScatter(in, out, kCount, call.type, op, nccl, rank.stream)); break;
    case Kind::reduce: CHECK(ncclReduce(in, taken, kCount, call.type, op, call.root, nccl, rank.stream)); break;
    case Kind::broadcast: CHECK(ncclBroadcast(in, out, kCount, call.type, call.root, nccl, rank.stream)); break;
    case Kind::all_gather: CHECK(ncclAllGather(in, out, kCount, call.type, nccl, rank.stream)); break;
    case Kind::all_to_all: CHECK(ncclAlltoAll(in, out, kCount, call.type, nccl, rank.stream)); break;
    case Kind::gather: CHECK(ncclGather(in, taken, kCount, call.type, call.root, nccl, rank.stream)); break;
    case Kind::scatter: CHECK(ncclScatter(in, out, kCount, call.type, call.root, nccl, rank.stream)); break;
    case Kind::ring:
      CHECK(ncclSend(in, kCount, call.type, next, nccl, rank.stream));
      CHECK(ncclRecv(out, kCount, call.type, before, nccl, rank.stream));
  }
}

// A group where there must be one; the calls one by one otherwise.
void issue_all(const Job& job, const std::vector<Call>& calls, int first_slot = 0) {
  const bool grouped = job.ranks.size() > 1 || calls.size() > 1 || calls[0].kind == Kind::ring;
  std::vector<std::pair<ncclComm_t, ncclRedOp_t>> made;
  if (grouped) CHECK(ncclGroupStart());
  for (const Rank* rank : job.ranks) {
    use(*rank);
    for (size_t i = 0; i < calls.size(); ++i) {
      const ncclRedOp_t op = operator_for(*rank, calls[i]);
      if (calls[i].reduction >= Reduction::half) made.emplace_back(rank->comms[calls[i].which].handle, op);
      issue(*rank, calls[i], first_slot + static_cast<int>(i), op);
    }
  }
  if (grouped) CHECK(ncclGroupEnd());
  for (const Rank* rank : job.ranks) {
    for (const Call& call : calls) settle(rank->comms[call.which].handle);
  }
  for (const auto& [handle, op] : made) CHECK(ncclRedOpDestroy(op, handle));
}

std::string shape(bool any, bool shares, int size) {
  if (!any) return "-";
  return (shares ? std::to_string(size) + "x" : std::string()) + std::to_string(kCount);
}

void tell(Rank& rank, int step, const Call& call) {
  static constexpr const char* kOps[] = {"all_reduce", "reduce_scatter", "reduce",  "broadcast", "all_gather",
                                         "all_to_all", "gather",         "scatter", "ring"};
  constexpr int kNumbers[] = {0, 2, 3, 4, 5, 5};  // as ncclRedOp_t counts; 5: made by the program
  const Communicator& comm = rank.comms[call.which];
  const std::string root = has_root(call.kind) ? std::to_string(call.root) : "-";
  const std::string op = reduces(call.kind) ? std::to_string(kNumbers[static_cast<int>(call.reduction)]) : "-";
  char line[200];
  snprintf(line, sizeof(line), "call %d %d %s %s %s %s %s %s %s", step, rank.number, kNames[call.which],
           kOps[static_cast<int>(call.kind)], name_of(call.type),
           shape(takes(call, comm.place), takes_shares(call.kind), comm.size).c_str(),
           shape(gives(call, comm.place), gives_shares(call.kind), comm.size).c_str(), root.c_str(), op.c_str());
  rank.lines.push_back(line);
}

void verify(const Rank& rank, const Job& job, const Call& call, int slot) {
  const Communicator& comm = rank.comms[call.which];
  if (!gives(call, comm.place)) return;
  const size_t count = (gives_shares(call.kind) ? static_cast<size_t>(comm.size) : 1) * kCount;
  std::vector<char> host(count * size_of(call.type));
  use(rank);
  CHECK(cudaMemcpyAsync(host.data(), ends_of(rank, call, slot).out, host.size(), cudaMemcpyDeviceToHost, rank.stream));
  CHECK(cudaStreamSynchronize(rank.stream));
  for (size_t i = 0; i < count && job.compares && !call.fed; ++i) {
    const double found = element(host, call.type, i), right = expected(call, comm.place, comm.size, i);
    if (found == right) continue;
    fprintf(stderr, "nccl_program: step %d, rank %d: element %zu of %s is %g, expected %g\n", job.step, rank.number, i,
            rank.lines.back().c_str(), found, right);
    failed = true;
    return;
  }
}

void run(Job& job, std::vector<Call> calls) {
  for (Call& call : calls) call.seed = ++job.calls + static_cast<uint64_t>(job.step) * 1000;
  for (const Rank* rank : job.ranks) {
    for (size_t i = 0; i < calls.size(); ++i) prepare(*rank, calls[i], static_cast<int>(i));
  }
  issue_all(job, calls);
  for (Rank* rank : job.ranks) {
    for (size_t i = 0; i < calls.size(); ++i) {
      tell(*rank, job.step, calls[i]);
      if (job.looks) verify(*rank, job, calls[i], static_cast<int>(i));
    }
  }
}

void collectives(Job& job) {
  for (const Reduction reduction : {Reduction::sum, Reduction::mean, Reduction::min, Reduction::max, Reduction::half,
                                    Reduction::quarter}) {
    run(job, {{.kind = Kind::all_reduce, .reduction = reduction}});
  }
  run(job, {{.kind = Kind::all_reduce, .type = ncclInt32, .reduction = Reduction::max}});
  run(job, {{.kind = Kind::all_reduce, .type = ncclFloat64}});
  run(job, {{.kind = Kind::reduce_scatter, .reduction = Reduction::half}});
  for (const bool in_place : {false, true}) {
    run(job, {{.kind = Kind::all_reduce, .type = ncclUint8, .in_place = in_place}});
    run(job, {{.kind = Kind::reduce_scatter, .reduction = Reduction::mean, .in_place = in_place}});
    run(job, {{.kind = Kind::reduce, .type = ncclFloat64, .root = 1, .in_place = in_place}});
    run(job, {{.kind = Kind::broadcast, .type = ncclBfloat16, .root = 1, .in_place = in_place}});
    run(job, {{.kind = Kind::all_gather, .type = ncclBfloat16, .in_place = in_place}});
    run(job, {{.kind = Kind::gather, .type = ncclInt32, .root = 1, .in_place = in_place}});
    run(job, {{.kind = Kind::scatter, .root = 1, .in_place = in_place}});
  }
  run(job, {{.kind = Kind::all_to_all}});
  run(job, {{.kind = Kind::ring, .type = ncclInt32}});
  run(job, {{.kind = Kind::all_reduce}, {.kind = Kind::ring}, {.kind = Kind::all_gather, .type = ncclInt32},
            {.kind = Kind::all_reduce, .reduction = Reduction::max, .in_place = true}});
  for (const Which which : {kConfigured, kScalable, kReversed, kAlone, kLate}) {
    run(job, {{.kind = Kind::all_reduce, .which = which}});
    run(job, {{.kind = Kind::broadcast, .which = which, .type = ncclUint8},
              {.kind = Kind::all_gather, .which = which}});
  }
}

void finish(const Job& job, const Call& call, int slot) {
  for (Rank* rank : job.ranks) {
    tell(*rank, job.step, call);
    if (job.looks) verify(*rank, job, call, slot);
  }
}

// An all-reduce whose input and output may be altered, and one of what it gave.
void chain(Job& job) {
  const uint64_t seed = ++job.calls + static_cast<uint64_t>(job.step) * 1000;
  const bool altered = job.alter_input || job.alter_output;
  const Call first = {.kind = Kind::all_reduce, .seed = seed}, second = {.kind = Kind::all_reduce, .fed = true};
  for (const Rank* rank : job.ranks) {
    prepare(*rank, first, 0);
    const bool flips = job.alter_input && rank->number == job.alter_rank;
    alter_input<<<1, 1, 0, rank->stream>>>(reinterpret_cast<uint32_t*>(rank->in[0]), flips ? 1u << 20 : 0);
  }
  issue_all(job, {first}, 0);
  for (const Rank* rank : job.ranks) {
    use(*rank);
    const bool flips = job.alter_output && rank->number == job.alter_rank;
    alter_output<<<1, 1, 0, rank->stream>>>(reinterpret_cast<uint32_t*>(rank->out[0]), flips ? 1u << 20 : 0);
    halve<<<blocks_for(kCount), kThreads, 0, rank->stream>>>(reinterpret_cast<float*>(rank->in[1]),
                                                             reinterpret_cast<float*>(rank->out[0]), kCount);
    prepare(*rank, second, 1);
  }
  issue_all(job, {second}, 1);
  Call looked_at = first;
  looked_at.fed = altered;  // its values are not what they would be
  finish(job, looked_at, 0);
  finish(job, second, 1);
}

}  // namespace

namespace nccl_program {

void run_step(Job job) {
  collectives(job);
  chain(job);
  for (const Rank* rank : job.ranks) {
    use(*rank);
    CHECK(cudaStreamSynchronize(rank->stream));
  }
}

bool any_wrong() { return failed; }

}  // namespace nccl_program
