#include "probes/swap_pending.h"

#include <algorithm>

namespace forkpoint {
namespace {

// What `one` owes, for this thread alone to launch. Another thread's, which is at it, comes first.
std::vector<SwapCall> take_pending(SwapEntry& one) {
  std::vector<SwapCall> calls;
  const SwapLock lock;
  if (one.launching || one.pending.empty()) return calls;
  one.launching = true;
  calls.swap(one.pending);
  return calls;
}

// The program may hear of it, and go on, only now.
void end_pending(SwapEntry& one, NcclResult result) {
  if (one.broken() != kNcclSuccess) result = one.broken();
  if (!is_good(result)) one.late.store(result);
  const SwapLock lock;
  one.launching = false;
  if (one.pending.empty()) one.owes.store(false);
}

// members: those of one communicator that are here, all decided.
void launch_pending(const std::vector<SwapHeld>& members) {
  std::vector<SwapCalled> ours;
  std::vector<SwapCall> theirs;
  std::vector<SwapHeld> taken;
  for (const SwapHeld& one : members) {
    const std::vector<SwapCall> calls = take_pending(*one);
    if (!calls.empty()) taken.push_back(one);
    for (const SwapCall& call : calls) {
      if (one->broken() != kNcclSuccess) continue;
      if (one->swaps())
        ours.push_back({call, one});
      else
        theirs.push_back(call);
    }
  }
  const NcclResult real = call_unswapped(theirs), own = launch_swaps(ours);
  for (const SwapHeld& one : taken) end_pending(*one, is_good(real) ? own : real);
}

// One may ask when all that are here, as far as they are known, are prepared. Those that NCCL has not begun to make, or
// could not, are not waited for.
bool may_ask(const SwapHeld& one) {
  const std::vector<SwapHeld> missing = swaps_that([&](const SwapEntry& other) {
    return other.is_kin_of(*one) && !other.is_prepared() && !other.is_decided() && other.handle.load();
  });
  return std::none_of(missing.begin(), missing.end(),
                      [](const SwapHeld& other) { return is_good(other->state_of_making()); });
}

}  // namespace

NcclResult put_off_swap(SwapEntry& known, const SwapCall& call) {
  const SwapLock lock;
  known.pending.push_back(call);
  known.owes.store(true);
  return kNcclInProgress;
}

void advance_swaps() {
  std::vector<SwapHeld> waiting = swaps_that([](const SwapEntry& one) { return one.owes && !one.pending.empty(); });
  // On all ranks in one order, as far as they are ready there.
  std::stable_sort(waiting.begin(), waiting.end(), [](const auto& a, const auto& b) { return a->family < b->family; });
  prepare_swaps_with_kin(waiting);
  for (const SwapHeld& one : waiting) {
    if (one->advance(may_ask(one))) say_swap_decision(*one);
  }
  for (const SwapHeld& one : waiting) {
    std::vector<SwapHeld> members;
    for (const SwapHeld& other : waiting) {
      if (other->is_kin_of(*one)) members.push_back(other);
    }
    if (std::all_of(members.begin(), members.end(), [](const SwapHeld& each) { return each->is_decided(); }))
      launch_pending(members);
    else
      SwapCommunicator::connect({members.begin(), members.end()});
  }
}

}  // namespace forkpoint
