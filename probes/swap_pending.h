// Communicators whose calls do not wait: a reduction is put off, and the program is told that it is in progress, until
// it has asked so often, as it must, that the members have agreed and the reductions are launched, by whichever thread
// asks.
#pragma once

#include "probes/swap_calls.h"

namespace forkpoint {

// REQUIRES: known.puts_off(), or it is the communicator's turn in an order that is kept so.
NcclResult put_off_swap(SwapEntry& known, const SwapCall& call);
// Each time that the program asks: of all communicators of the process, as one thread may hold members that wait for
// each other, and another one may ask for it. Waits for nobody. What is launched now, NCCL may be busy with.
void advance_swaps();

}  // namespace forkpoint
