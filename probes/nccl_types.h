// NCCL's binary interface as far as the probe needs it, so that it builds without nccl.h and meets any version at run
// time. Checked against nccl.h in tests/probe/probe_nccl_types_test.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/dtype.h"

namespace forkpoint {

using NcclComm = void*;
using NcclResult = int;
inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclCudaError = 1;
inline constexpr NcclResult kNcclSystemError = 2;
inline constexpr NcclResult kNcclInternalError = 3;
inline constexpr NcclResult kNcclInProgress = 7;

struct NcclUniqueId {  // by value, as there: its size decides how it is passed
  char bytes[128];
};

inline constexpr int kNcclNoColor = -1;
inline constexpr int kNcclBuiltInReductions = 5;  // sum, product, maximum, minimum, average
inline constexpr int kNcclScalarDevice = 0;       // where a scalar lies; 1: in the host's memory, read at once

inline constexpr DType kNcclTypes[] = {DType::i8,  DType::u8,  DType::i32, DType::u32,  DType::i64,    DType::u64,
                                       DType::f16, DType::f32, DType::f64, DType::bf16, DType::f8e4m3, DType::f8e5m2};
inline constexpr int kNcclTypeCount = static_cast<int>(sizeof(kNcclTypes) / sizeof(kNcclTypes[0]));
inline constexpr int kNcclBytes = 1;  // ncclUint8
// nullptr: a type that this version of forkpoint does not know.
constexpr const DType* nccl_dtype(int type) {
  return type >= 0 && type < kNcclTypeCount ? &kNcclTypes[type] : nullptr;
}

// name, parameters. Each returns an NcclResult. Streams are void*, data types and reductions int.
#define FORKPOINT_NCCL_FUNCTIONS(X)                                                                                   \
  X(AllReduce, (const void* in, void* out, size_t count, int type, int op, NcclComm comm, void* stream))              \
  X(ReduceScatter, (const void* in, void* out, size_t count, int type, int op, NcclComm comm, void* stream))          \
  X(Reduce, (const void* in, void* out, size_t count, int type, int op, int root, NcclComm comm, void* stream))       \
  X(Broadcast, (const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream))            \
  X(Bcast, (void* data, size_t count, int type, int root, NcclComm comm, void* stream))                               \
  X(AllGather, (const void* in, void* out, size_t count, int type, NcclComm comm, void* stream))                      \
  X(AlltoAll, (const void* in, void* out, size_t count, int type, NcclComm comm, void* stream))                       \
  X(Gather, (const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream))               \
  X(Scatter, (const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream))              \
  X(Send, (const void* in, size_t count, int type, int peer, NcclComm comm, void* stream))                            \
  X(Recv, (void* out, size_t count, int type, int peer, NcclComm comm, void* stream))                                 \
  X(GroupStart, ())                                                                                                   \
  X(GroupEnd, ())                                                                                                     \
  X(GroupSimulateEnd, (void* info))                                                                                   \
  X(CommInitRank, (NcclComm * comm, int size, NcclUniqueId id, int rank))                                             \
  X(CommInitRankConfig, (NcclComm * comm, int size, NcclUniqueId id, int rank, void* config))                         \
  X(CommInitAll, (NcclComm * comms, int size, const int* devices))                                                    \
  X(CommInitRankScalable, (NcclComm * comm, int size, int rank, int ids, NcclUniqueId* id, void* config))             \
  X(CommSplit, (NcclComm comm, int color, int key, NcclComm* made, void* config))                                     \
  X(CommShrink, (NcclComm comm, int* excluded, int count, NcclComm* made, void* config, int flags))                   \
  X(CommFinalize, (NcclComm comm))                                                                                    \
  X(CommDestroy, (NcclComm comm))                                                                                     \
  X(CommAbort, (NcclComm comm))                                                                                       \
  X(RedOpCreatePreMulSum, (int* op, void* scalar, int type, int residence, NcclComm comm))                            \
  X(RedOpDestroy, (int op, NcclComm comm))
// Called, not interposed.
#define FORKPOINT_NCCL_QUERIES(X)                          \
  X(CommGetAsyncError, (NcclComm comm, NcclResult * state)) \
  X(CommCount, (NcclComm comm, int* size))                  \
  X(CommUserRank, (NcclComm comm, int* rank))               \
  X(CommCuDevice, (NcclComm comm, int* device))

}  // namespace forkpoint
