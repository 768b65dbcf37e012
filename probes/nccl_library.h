// The real NCCL behind our symbols, found in the process and never loaded. A process may hold several copies (a
// framework brings its own): a caller gets the one that it would have reached without us.
#pragma once

#include "probes/nccl_types.h"

namespace forkpoint {

// The functions of one copy, or of whoever else stands between it and us. nullptr where it has none.
struct NcclLibrary {
#define FORKPOINT_NCCL_MEMBER(name, parameters) NcclResult(*name) parameters = nullptr;
  FORKPOINT_NCCL_FUNCTIONS(FORKPOINT_NCCL_MEMBER)
  FORKPOINT_NCCL_QUERIES(FORKPOINT_NCCL_MEMBER)
#undef FORKPOINT_NCCL_MEMBER
};

// caller: an address in the code that made the call. Any thread; after the first call from a place a look into a table.
// nullptr: no NCCL is loaded. The result lives as long as the process.
const NcclLibrary* nccl_of_caller(const void* caller);

// Waits until a call of ours is enqueued, on a communicator that may be non-blocking; result: what the call returned.
// false: it failed.
bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result);

// Says once that a call of `function` cannot be served, and returns what the caller is to get.
NcclResult nccl_not_there(const char* function);

}  // namespace forkpoint
