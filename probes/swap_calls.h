// Reductions as the kernels take them, and as NCCL does.
#pragma once

#include "probes/swap_entries.h"

namespace forkpoint {

// What follows from facts that all members share. false: NCCL does it on all of them.
bool swap_takes(const NcclCall& call);
// false: it uses a reduction of the program's that is not known here.
bool make_swap_spec(const NcclCall& call, collective::CollectiveSpec* spec);

// A call, and its communicator. nullptr: it is not known.
struct SwapCalled {
  SwapCall call;
  SwapHeld known;
};
// Of communicators that swap. The k-th calls of all members of a communicator that are here belong together.
NcclResult launch_swaps(const std::vector<SwapCalled>& all);
// By NCCL, together: one thread may hold several members.
NcclResult call_unswapped(const std::vector<SwapCall>& calls);

inline bool is_good(NcclResult result) { return result == kNcclSuccess || result == kNcclInProgress; }

}  // namespace forkpoint
