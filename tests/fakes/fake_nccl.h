// A libnccl.so.2 on host memory: ranks are processes (joined through a shared file) or threads, or several in one
// thread within a group. Work is enqueued on the streams of the fake libcuda when that is loaded, as a kernel called
// "ncclDevKernel_<Call>"; else it is done at once. At most 8 ranks and 64 KiB a rank and call. Sends and receives
// between two ranks of one process must stand in one group.
//
// Chosen by environment variables, for programs that nobody can edit:
//   FAKE_NCCL_ALTER=R:N         the output of the N-th call (from 0) on a communicator differs in one bit, in the
//   process whose
//                               RANK is R; without that variable: at place R
//   FAKE_NCCL_DELAY_MS=N        how long a non-blocking communicator takes (default 30); -1: for ever
//   FAKE_NCCL_FAIL=CALL         "AllReduce", "GroupEnd", ...: returns ncclInternalError and does nothing
//   FAKE_NCCL_ERROR=N           what ncclCommGetAsyncError says of every communicator from now on
//   NCCL_COMM_BLOCKING=0|1      as for the real one
//   FAKE_NCCL_OLD=1             a version without ncclAlltoAll: it returns ncclInvalidUsage
#pragma once

#include "probes/nccl_types.h"

using forkpoint::NcclComm;
using forkpoint::NcclResult;
using forkpoint::NcclUniqueId;

extern "C" {
#define FORKPOINT_FAKE_NCCL(name, parameters) NcclResult nccl##name parameters;
FORKPOINT_NCCL_FUNCTIONS(FORKPOINT_FAKE_NCCL)
FORKPOINT_NCCL_QUERIES(FORKPOINT_FAKE_NCCL)
#undef FORKPOINT_FAKE_NCCL
NcclResult ncclGetUniqueId(NcclUniqueId* id);

// How many calls this copy of the library has served.
int fake_nccl_calls();
}

namespace forkpoint {

// As ncclConfig_t begins in every version since 2.18.
struct FakeNcclConfig {
  size_t size = sizeof(FakeNcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 22809;
  int blocking = 1;
};

}  // namespace forkpoint
