#include "probes/swap_entries.h"

#include <sched.h>

#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constinit SwapMode mode;
constinit std::atomic_flag locked = ATOMIC_FLAG_INIT;
constinit std::vector<SwapHeld>* entries = nullptr;  // under the lock; never freed
constinit std::atomic<bool> any_in_background{false};
constinit std::atomic<uint32_t> nobody_wakes{0};
constexpr int64_t kPauseNs = 50'000;

const CudaDriver* driver_of_process() {
  const Guard guard;
  return guard.entered() ? find_cuda_driver(guard.token()) : nullptr;
}

// handle_at: where its handle will be, if it has none yet. nullptr: there is no driver.
SwapHeld add(const NcclLibrary& library, const SwapMember::Origin& origin, NcclComm* handle_at) {
  const CudaDriver* driver = driver_of_process();
  if (!driver) return nullptr;
  const auto one = std::make_shared<SwapEntry>(library, *driver, mode, origin);
  one->handle_at = handle_at;
  const SwapLock lock;
  if (!entries) entries = new std::vector<SwapHeld>;
  entries->push_back(one);
  return one;
}

// What was destroyed where we did not see it has left its address, or its variable, to this one.
void forget_stale(NcclComm* at, NcclComm comm) {
  if (const SwapHeld stale = take_out_swap(comm)) stale->end(false);
  const SwapLock lock;
  for (size_t i = 0; entries && i < entries->size(); ++i) {
    if ((*entries)[i]->handle_at == at) (*entries)[i]->handle_at = nullptr;
  }
}

}  // namespace

void set_swap_mode(const SwapMode& set) { mode = set; }
const SwapMode& swap_mode() { return mode; }

SwapLock::SwapLock() {
  while (locked.test_and_set(std::memory_order_acquire)) sched_yield();
}
SwapLock::~SwapLock() { locked.clear(std::memory_order_release); }

// A child of one whose calls do not wait is made in the background, whatever the call that makes it has returned: then
// nobody has its handle yet.
void note_swaps_made(const std::vector<SwapMade>& made) {
  for (const SwapMade& one : made) {
    const NcclComm comm = __atomic_load_n(one.comm, __ATOMIC_ACQUIRE);  // a thread of NCCL's may be filling it in
    if (!comm || !one.waits) any_in_background.store(true);
    forget_stale(one.comm, comm);
    add(*one.library, {comm, one.family, one.waits}, comm ? nullptr : one.comm);
  }
}

SwapHeld find_swap(NcclComm comm) {
  const SwapLock lock;
  for (size_t i = 0; comm && entries && i < entries->size(); ++i) {
    if ((*entries)[i]->handle.load(std::memory_order_relaxed) == comm) return (*entries)[i];
  }
  for (size_t i = 0; comm && any_in_background && entries && i < entries->size(); ++i) {
    SwapEntry& one = *(*entries)[i];
    NcclComm handle = nullptr;
    if (!one.handle_at || !read_handle(one.handle_at, &handle) || handle != comm) continue;
    one.handle.store(comm), one.handle_at = nullptr;
    return (*entries)[i];
  }
  return nullptr;
}

SwapHeld find_or_add_swap(const NcclLibrary& library, NcclComm comm, NcclResult* result) {
  if (SwapHeld known = find_swap(comm)) return known;
  if (!has_settled(library, comm, kNcclInProgress)) return nullptr;  // NCCL says so to the call
  SwapHeld added = add(library, {.comm = comm}, nullptr);
  if (added) return added;
  static constinit std::atomic<bool> said{false};
  if (!said.exchange(true))
    say("a reduction fails: its communicator's members cannot be asked, as no CUDA driver was found");
  return *result = kNcclSystemError, nullptr;
}

std::vector<SwapHeld> swaps_that(const std::function<bool(const SwapEntry&)>& wanted) {
  std::vector<SwapHeld> found;
  const SwapLock lock;
  for (size_t i = 0; entries && i < entries->size(); ++i) {
    if (wanted(*(*entries)[i])) found.push_back((*entries)[i]);
  }
  return found;
}

bool any_swap_in_background() { return any_in_background.load(); }

SwapHeld take_out_swap(NcclComm comm) {
  SwapHeld found;
  const SwapLock lock;
  for (size_t i = 0; comm && entries && !found && i < entries->size(); ++i) {
    if ((*entries)[i]->handle.load(std::memory_order_relaxed) != comm) continue;
    found = std::move((*entries)[i]);
    entries->erase(entries->begin() + static_cast<std::ptrdiff_t>(i));
  }
  return found;
}

void forget_swap_entries_in_child() {
  locked.clear();
  entries = nullptr;
  any_in_background.store(false);
}

void prepare_swaps_with_kin(const std::vector<SwapHeld>& all) {
  for (const SwapHeld& one : all) {
    for (const SwapHeld& kin : swaps_that([&](const SwapEntry& other) { return other.is_kin_of(*one); })) {
      if (!kin->is_prepared() && kin->state_of_making() == kNcclSuccess) kin->prepare();
    }
  }
}

void decide_swaps(const std::vector<SwapHeld>& all) {
  prepare_swaps_with_kin(all);
  SwapCommunicator::decide({all.begin(), all.end()});
  for (const SwapHeld& one : all) {
    while (!one->is_decided()) futex_wait(nobody_wakes, 0, kPauseNs);  // by another thread
    say_swap_decision(*one);
  }
}

void say_swap_decision(SwapEntry& one) {
  if (!one.tell_once()) return;
  if (mode.says && one.swaps())
    say("a communicator of %d ranks adds by %s", one.size(), one.by_messages() ? "messages" : "kernels");
  if (one.swaps() || (one.size() < 2 && one.broken() == kNcclSuccess)) return;
  static constinit std::atomic<bool> said{false};
  const bool fails = one.broken() != kNcclSuccess;
  if (fails)
    say("a reduction fails: its communicator's members could not agree on deterministic collectives: %s",
        one.refusal());
  else if (!said.exchange(true))
    say("reductions of a communicator of %d ranks are left to NCCL, whose order of additions is its own: %s",
        one.size(), one.refusal());
  const Guard guard;
  if (!guard.entered() || !recorder.is_awake()) return;
  char detail[160];
  snprintf(detail, sizeof(detail), "of %d ranks: %s", one.size(), one.refusal());
  recorder.note_limit(fails ? "reductions that failed" : "reductions in NCCL's own order", detail);
}

}  // namespace forkpoint
