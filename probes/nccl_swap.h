// NCCL's reductions (AllReduce, ReduceScatter, Reduce) done by the deterministic kernels instead, where
// FORKPOINT_DETERMINISTIC names "collectives". The rest of NCCL is as it was.
//
// Whether a communicator's reductions are swapped is decided once, by all its members together: each says what it can,
// through NCCL itself, and only if every one can all of them do. They decide at its first reduction, where all of them
// come: one that never reduces costs nothing. That reduction waits for the members (and so may NCCL's, which connects
// them then), or on a communicator that does not block is in progress (ncclCommGetAsyncError) until they have decided
// and it is launched. How a communicator was made need not have been seen: members know each other by what they answer.
// Nobody waits for ever where reductions on several communicators come in one order on all ranks, as NCCL asks; the
// first ones of several in one group may stand in any order, if they stand in one group on all ranks.
//
// Where not all devices reach each other's memory (which is tried), the hosts differ, NCCL_P2P_* forbids it or a device
// has too few blocks left for kernels that wait (kernels/deterministic_collective.h), inputs and sums travel by NCCL's
// send and receive, added by the same rule. Otherwise all use NCCL; one line on stderr says why, and the run declares
// it. A member that can neither tell the others nor hear them returns an error to the program for each reduction: it
// must not go its own way. Which single calls are swapped follows from what NCCL has equal on all members (type, op,
// count), never from where a buffer lies. A group that mixes swapped calls with others waits at its end until NCCL has
// launched the others, on communicators that do not block too.
// REQUIRES: all members of a communicator run under the probe with the same FORKPOINT_DETERMINISTIC, as the recorder
// starts them.
//
// Costs a communicator 18 to 40 MB of device memory (kernels/deterministic_collective.h), which the next one takes over
// when it is destroyed. What one leaves that was aborted with kernels under way, or that has calls in graphs, is used
// by nobody: others may still write to it. Nor are the blocks that its graphs' kernels take up on the device, unless it
// was aborted, so that they end as they begin. Any thread; no lock is held across a call to NCCL or CUDA.
#pragma once

#include "probes/nccl_calls.h"

namespace forkpoint {

struct Settings;

// What FORKPOINT_DETERMINISTIC names: "collectives": in rank order, rounded at each addition; "collectives-wide": 16-
// and 8-bit floats are added in fp32; "collectives-tree": as a balanced tree over the ranks. For tests,
// FORKPOINT_TEST_COLLECTIVES=messages: always by send and receive; =say (or both, by a comma): one line on stderr of
// each communicator that is swapped. Set once, when the probe is loaded.
void set_nccl_swap(const Settings& settings);
bool nccl_swap_is_on();

// comms: where NCCL has written them, or will when the thread's group ends, or when the parent is ready. family: the
// same for all members of one communicator, in all processes, and for no other; 0: not known.
// config: what the program gave, or nullptr. parent: of one that is made from another.
struct NcclSwapMaking {
  NcclComm* comms;
  int count;
  uint64_t family;
  const void* config = nullptr;
  NcclComm parent = nullptr;
};
// Of a communicator that is made from a parent, in a call that all members of the parent make; what: that tells apart
// what one call makes. For each such call, whether or not this member gets one.
uint64_t nccl_swap_child(NcclComm parent, uint64_t what);
// After a call that makes communicators.
void nccl_swap_made(const NcclLibrary& library, const NcclSwapMaking& making, NcclResult result);
// After ncclCommGetAsyncError, with what it said; which may be changed.
void nccl_swap_asked(NcclComm comm, NcclResult* state);

// Before a reduction, outside of groups: where its communicator blocks and the members have not decided yet, they do.
// An error: it fails with that; the communicator may be gone.
NcclResult nccl_swap_prepare(const NcclLibrary& library, const NcclCall& call);
// A reduction. true: it was (or, in a group, will be) done by the kernels, or failed; *result is what the caller gets.
// false: it is NCCL's. Inside the caller's group nothing starts before the group ends.
bool nccl_swap_call(const NcclLibrary& library, const NcclCall& call, NcclResult* result);
// Is the communicator's members' decision that the kernels do it? For the record of a call. -1: that will be known when
// the group ends or the members have decided, or the call will fail.
int nccl_swap_does(const NcclCall& call);
// Behind the real call that ended the outermost group, with its result. launched: it enqueued what was in it.
NcclResult nccl_swap_end_group(NcclResult result, bool launched);

// Before NCCL destroys it. What waits for other members ends; aborts: kernels do too.
void nccl_swap_forget(NcclComm comm, bool aborts);
void forget_nccl_swap_in_child();

}  // namespace forkpoint
