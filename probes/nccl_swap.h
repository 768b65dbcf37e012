// NCCL's reductions (AllReduce, ReduceScatter, Reduce) done by the deterministic kernels instead, where
// FORKPOINT_DETERMINISTIC names "collectives". The rest of NCCL is as it was.
//
// Whether a communicator's reductions are swapped is decided once, by all its members together, when it is made: each
// says what it can, through NCCL itself, and only if every one can all of them do. One that NCCL makes in the
// background is not ready (ncclCommGetAsyncError) before they have; where the program does not ask, its first reduction
// waits for the members. Where not all devices reach each other's memory, the hosts differ or NCCL_P2P_* forbids it,
// inputs and sums travel by NCCL's send and receive, added by the same rule, unless one process holds several of the
// members. Otherwise all use NCCL; one line on stderr says why, and the run declares it. Which single calls are swapped
// follows from what NCCL has equal on all members (type, op, count), never from where a buffer lies. A group that mixes
// swapped calls with others waits at its end until NCCL has launched the others, on communicators that do not block
// too. REQUIRES: all members of a communicator run under the probe with the same FORKPOINT_DETERMINISTIC, as the
// recorder starts them.
//
// Costs a communicator 18 to 40 MB of device memory (kernels/deterministic_collective.h), which the next one takes over
// when it is destroyed. Any thread; no lock is held across a call to NCCL or CUDA.
#pragma once

#include "probes/nccl_calls.h"

namespace forkpoint {

struct Settings;

// What FORKPOINT_DETERMINISTIC names: "collectives": in rank order, rounded at each addition; "collectives-wide": 16-
// and 8-bit floats are added in fp32; "collectives-tree": as a balanced tree over the ranks. For tests,
// FORKPOINT_TEST_COLLECTIVES=messages: always by send and receive. Set once, when the probe is loaded.
void set_nccl_swap(const Settings& settings);
bool nccl_swap_is_on();

// comms: where NCCL has written them, or will when the thread's group ends, or when the parent is ready. family: the
// same for members of one communicator; 0: not known.
struct NcclSwapMaking {
  NcclComm* comms;
  int count;
  NcclComm parent;
  uint64_t family;
};
// After a call that makes communicators.
void nccl_swap_made(const NcclLibrary& library, const NcclSwapMaking& making, NcclResult result);
// After ncclCommGetAsyncError, with what it said.
void nccl_swap_asked(NcclComm comm, NcclResult* state);

// Before a reduction, outside of groups: where its communicator's members have not decided yet, they do now.
void nccl_swap_prepare(const NcclLibrary& library, const NcclCall& call);
// A reduction. true: it was (or, in a group, will be) done by the kernels, or failed; *result is what the caller gets.
// false: it is NCCL's. Inside the caller's group nothing starts before the group ends.
bool nccl_swap_call(const NcclLibrary& library, const NcclCall& call, NcclResult* result);
// Is the communicator's members' decision that the kernels do it? For the record of a call. -1: that will be known when
// the group ends.
int nccl_swap_does(const NcclCall& call);
// Behind the real call that ended the outermost group, with its result. launched: it enqueued what was in it.
NcclResult nccl_swap_end_group(NcclResult result, bool launched);

// Before NCCL destroys it. aborts: kernels that wait for a peer are told to end.
void nccl_swap_forget(NcclComm comm, bool aborts);
void forget_nccl_swap_in_child();

}  // namespace forkpoint
