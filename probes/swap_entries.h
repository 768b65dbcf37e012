// The communicators of this process whose reductions may be swapped: those that were seen made, and those found later.
// Any thread; no lock is held across a call to NCCL or CUDA.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "probes/nccl_calls.h"
#include "probes/swap_communicator.h"

namespace forkpoint {

// How all communicators of this process add. Set once, when the probe is loaded.
void set_swap_mode(const SwapMode& mode);
const SwapMode& swap_mode();

// A reduction, as things were when the program made it.
struct SwapCall {
  const NcclLibrary* library;
  NcclCall call;
  collective::CollectiveSpec spec;
};

struct SwapEntry : SwapCommunicator {
  using SwapCommunicator::SwapCommunicator;
  // Of one that NCCL makes in the background: where its handle will be, until that is known. Under the lock, as is what
  // follows but for the atomics.
  NcclComm* handle_at = nullptr;
  // Reductions whose calls have returned, and that wait until the members have decided (swap_pending.h).
  std::vector<SwapCall> pending;
  bool launching = false;                      // a thread has taken some out, and is not through with them
  std::atomic<bool> owes{false};               // there are such reductions
  std::atomic<NcclResult> late{kNcclSuccess};  // what came of them, if that is an error
  std::atomic<uint32_t> children{0};           // splits and shrinks so far

  // Is a reduction on it to be put off until those before it are launched, or the members have decided?
  bool puts_off() const { return !waits && (!is_decided() || owes); }
};
// It may be destroyed by another thread meanwhile: the last who holds it frees it.
using SwapHeld = std::shared_ptr<SwapEntry>;

// Not held across anything that waits.
class SwapLock {
 public:
  SwapLock();
  ~SwapLock();
  SwapLock(const SwapLock&) = delete;
  SwapLock& operator=(const SwapLock&) = delete;
};

struct SwapMade {
  const NcclLibrary* library;
  NcclComm* comm;  // where NCCL has written it, or will
  uint64_t family;
  bool waits;
};
// They are there, or will be: a call that makes them has succeeded, or is in progress. Before anybody uses them.
void note_swaps_made(const std::vector<SwapMade>& made);

SwapHeld find_swap(NcclComm comm);  // nullptr: not known, or not made yet
// What is found first where it is used is known from then on. nullptr: NCCL has not made it, or *result is an error.
SwapHeld find_or_add_swap(const NcclLibrary& library, NcclComm comm, NcclResult* result);
// Those for which `wanted` says so, which is asked under the lock.
std::vector<SwapHeld> swaps_that(const std::function<bool(const SwapEntry&)>& wanted);
bool any_swap_in_background();  // was there ever one that NCCL made so, or whose calls do not wait?
SwapHeld take_out_swap(NcclComm comm);
void forget_swap_entries_in_child();

// Prepares all members in this process of the communicators that these are, as far as they are known.
void prepare_swaps_with_kin(const std::vector<SwapHeld>& all);
// Those whose calls wait: until the members have decided.
void decide_swaps(const std::vector<SwapHeld>& all);
// Once the members have decided: declared in the run, and on stderr once, for all communicators that it is true of.
void say_swap_decision(SwapEntry& one);

}  // namespace forkpoint
