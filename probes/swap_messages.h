// A reduction by NCCL's send and receive, where devices do not reach each other's memory: the inputs go to the owner of
// each piece, who adds them up, and the sums come back; the sums of a round travel with the inputs of the next. The
// staging memory holds what a round receives.
#pragma once

#include <span>

#include "probes/nccl_library.h"
#include "probes/swap_means.h"

namespace forkpoint {

// One member's part of a call.
struct SwapMessages {
  const NcclLibrary& library;
  const CudaDriver& driver;
  NcclComm comm = nullptr;
  int place = 0;
  uint32_t ranks = 0;
  CUcontext context = nullptr;
  const SwapKernels* kernels = nullptr;
  char* staging = nullptr;
  CUstream stream = nullptr;
  collective::CollectiveSpec spec = {};
  collective::CollectiveParams params = {};  // as planned; how it is cut is decided here
};

// parts: of the members of one communicator that this thread holds. Their messages leave together: those to each other
// would wait else. Waits until NCCL has enqueued them. Where the members were never connected (connect_by_messages, or
// a call before), so may the others' calls be waited for.
NcclResult add_by_messages(std::span<SwapMessages> parts);

// A message of 16 bytes to each member, and one from each. Of these only what NCCL needs to connect: returns before it
// has, where the communicator does not block. to: 16 bytes; from: that for each member, `stride` apart.
NcclResult connect_by_messages(const SwapMessages& part, const char* to, char* from, uint64_t stride);

}  // namespace forkpoint
