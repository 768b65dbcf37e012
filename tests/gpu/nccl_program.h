// What nccl_program's collectives are made of: the ranks of this process, a call and the values that it must give. The
// program knows nothing of forkpoint; nccl_cases.py records it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace nccl_program {

[[noreturn]] inline void fail(const char* call, const char* error) {
  fprintf(stderr, "nccl_program: %s: %s\n", call, error);
  exit(1);
}
inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail(call, cudaGetErrorString(error));
}
// A non-blocking communicator may say that it is at it.
inline void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess && result != ncclInProgress) fail(call, ncclGetErrorString(result));
}
#define CHECK(call) ::nccl_program::check((call), #call)

// ---- The ranks

enum Which { kWorld, kConfigured, kScalable, kReversed, kAlone, kLate, kCommunicators };
inline constexpr const char* kNames[] = {"world", "configured", "scalable", "reversed", "alone", "late"};

struct Communicator {
  ncclComm_t handle = nullptr;
  int place = 0, size = 0;
};

// Waits until a non-blocking communicator has done what it was asked for. At once for a blocking one.
inline void settle(ncclComm_t handle) {
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) CHECK(ncclCommGetAsyncError(handle, &state));
  if (state != ncclSuccess) fail("an NCCL call on a non-blocking communicator", ncclGetErrorString(state));
}

inline constexpr int kSlots = 4;            // calls in one group, at most
inline constexpr size_t kCount = 3001;      // elements of a share
inline constexpr size_t kSlotBytes = 2 * kCount * sizeof(double);

struct Rank {
  int number = 0, size = 2, device = 0;
  cudaStream_t stream = nullptr;
  char *in[kSlots] = {}, *out[kSlots] = {};
  float* factor = nullptr;  // of a reduction, on the device
  Communicator comms[kCommunicators];
  std::vector<std::string> lines;  // what it has to say
};
inline void use(const Rank& rank) { CHECK(cudaSetDevice(rank.device)); }

// What one thread does: for one rank, or for all of them in groups.
struct Job {
  std::vector<Rank*> ranks;
  int step = 0;
  bool looks = true;     // each result is copied to the host, which waits for it
  bool compares = true;  // and must be right
  int alter_rank = -1;
  bool alter_input = false, alter_output = false;  // in this step, on that rank
  uint64_t calls = 0;
};

// ---- A call

enum class Kind { all_reduce, reduce_scatter, reduce, broadcast, all_gather, all_to_all, gather, scatter, ring };
enum class Reduction { sum, max, min, mean, half, quarter };  // half, quarter: made by ncclRedOpCreatePreMulSum

struct Call {
  Kind kind = Kind::all_reduce;
  Which which = kWorld;
  ncclDataType_t type = ncclFloat32;
  Reduction reduction = Reduction::sum;
  int root = 0;
  bool in_place = false;
  bool fed = false;  // its input is what the call before gave
  uint64_t seed = 0;
};

inline bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::reduce;
}
inline bool has_root(Kind kind) {
  return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::gather || kind == Kind::scatter;
}
inline bool gives(const Call& call, int place) {
  return place == call.root || (call.kind != Kind::reduce && call.kind != Kind::gather);
}
inline bool takes(const Call& call, int place) {
  return place == call.root || (call.kind != Kind::broadcast && call.kind != Kind::scatter);
}
inline bool takes_shares(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_to_all || kind == Kind::scatter;
}
inline bool gives_shares(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::all_to_all || kind == Kind::gather;
}

inline size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclUint8: return 1;
    case ncclBfloat16: return 2;
    case ncclFloat64: return 8;
    default: return 4;
  }
}
inline const char* name_of(ncclDataType_t type) {
  switch (type) {
    case ncclUint8: return "u8";
    case ncclBfloat16: return "bf16";
    case ncclFloat64: return "f64";
    case ncclInt32: return "i32";
    default: return "f32";
  }
}
inline double element(const std::vector<char>& bytes, ncclDataType_t type, size_t i) {
  switch (type) {
    case ncclUint8: return reinterpret_cast<const uint8_t*>(bytes.data())[i];
    case ncclBfloat16: return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(bytes.data())[i]);
    case ncclFloat64: return reinterpret_cast<const double*>(bytes.data())[i];
    case ncclInt32: return reinterpret_cast<const int32_t*>(bytes.data())[i];
    default: return reinterpret_cast<const float*>(bytes.data())[i];
  }
}

// ---- Values: small whole numbers, so that every order of a sum gives the same in every type.

#ifdef __CUDACC__
__host__ __device__
#endif
inline int value_at(uint64_t seed, int place, size_t i) {
  return static_cast<int>((i * 7 + seed * 13 + static_cast<uint64_t>(place) * 29) % 61);
}

// Element i of what the rank at `place` puts in.
inline double put_in(const Call& call, int place, size_t i) {
  const bool gathers = call.kind == Kind::all_gather || call.kind == Kind::gather;
  const bool behind = call.in_place && gathers && gives(call, place);
  return value_at(call.seed, place, (behind ? static_cast<size_t>(place) * kCount : 0) + i);
}

inline double reduced(const Call& call, int size, size_t i) {
  double sum = 0, most = 0, least = 1000;
  for (int place = 0; place < size; ++place) {
    const double value = put_in(call, place, i);
    sum += value, most = value > most ? value : most, least = value < least ? value : least;
  }
  switch (call.reduction) {
    case Reduction::max: return most;
    case Reduction::min: return least;
    case Reduction::mean: return sum / size;
    case Reduction::half: return sum / 2;
    case Reduction::quarter: return sum / 4;
    default: return sum;
  }
}

// Element i of what the rank at `place` must get.
inline double expected(const Call& call, int place, int size, size_t i) {
  const size_t own = static_cast<size_t>(place) * kCount;
  const int giver = static_cast<int>(i / kCount);
  switch (call.kind) {
    case Kind::reduce_scatter: return reduced(call, size, own + i);
    case Kind::broadcast: return put_in(call, call.root, i);
    case Kind::scatter: return put_in(call, call.root, own + i);
    case Kind::all_gather:
    case Kind::gather: return put_in(call, giver, i % kCount);
    case Kind::all_to_all: return put_in(call, giver, own + i % kCount);
    case Kind::ring: return put_in(call, (place + size - 1) % size, i);
    default: return reduced(call, size, i);
  }
}

void run_step(Job job);
bool any_wrong();  // a result, so far

}  // namespace nccl_program
