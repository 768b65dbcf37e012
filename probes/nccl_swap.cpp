#include "probes/nccl_swap.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "lib/digest_mix.h"
#include "probes/os.h"
#include "probes/per_thread.h"
#include "probes/settings.h"
#include "probes/swap_pending.h"

namespace forkpoint {
namespace {

using collective::CollectiveSpec;

constinit std::atomic<bool> is_on{false};

// What a thread does when its group ends.
struct SwapGroup {
  std::vector<SwapCall> calls;
  std::vector<SwapMade> made;
  std::vector<std::pair<const NcclLibrary*, NcclComm>> others;  // whose calls in the group are NCCL's
};

// As ncclConfig_t begins since 2.14, where communicators that do not block came.
struct ConfigHead {
  size_t size;
  unsigned magic, version;
  int blocking;
};

// Do calls on it wait? By the rules of NCCL: the environment, else what the program asked for, else as the parent.
bool calls_wait(const NcclSwapMaking& making) {
  constexpr unsigned kMagic = 0xcafebeef, kSinceVersion = 21400;
  const char* environment = getenv("NCCL_COMM_BLOCKING");
  if (environment && (strcmp(environment, "0") == 0 || strcmp(environment, "1") == 0)) return environment[0] == '1';
  if (making.config) {
    ConfigHead config = {};
    memcpy(&config.size, making.config, sizeof(config.size));
    if (config.size >= sizeof(config)) memcpy(&config, making.config, sizeof(config));
    return config.magic != kMagic || config.version < kSinceVersion || config.blocking != 0;
  }
  const SwapHeld parent = find_swap(making.parent);
  return !parent || parent->waits;
}

}  // namespace

void set_nccl_swap(const Settings& settings) {
  const char* test = getenv("FORKPOINT_TEST_COLLECTIVES");
  const SwapMode mode = {settings.has_knob("collectives-wide"), settings.has_knob("collectives-tree"),
                         test && strstr(test, "messages"), test && strstr(test, "say")};
  set_swap_mode(mode);
  is_on.store(settings.has_knob("collectives") || mode.wide || mode.tree);
}
bool nccl_swap_is_on() { return is_on.load(std::memory_order_relaxed); }

void nccl_swap_made(const NcclLibrary& library, const NcclSwapMaking& making, NcclResult result) {
  if (!is_good(result) || !making.comms) return;
  const bool waits = calls_wait(making) && (result != kNcclInProgress || making.parent);
  std::vector<SwapMade> made;
  for (int i = 0; i < making.count; ++i) made.push_back({&library, making.comms + i, making.family, waits});
  if (inside_nccl_group()) {
    if (SwapGroup* group = PerThread<SwapGroup>::get()) group->made.insert(group->made.end(), made.begin(), made.end());
    return;
  }
  note_swaps_made(made);
}

void nccl_swap_asked(NcclComm comm, NcclResult* state) {
  if (!any_swap_in_background() || !state || !is_good(*state) || inside_nccl_group()) return;
  const SwapHeld known = find_swap(comm);
  if (!known) return;
  if (known->owes) {
    // Also when it is busy: with what it asks the others, perhaps, one of which waits for this thread to let it ask.
    advance_swaps();
    *state = kNcclInProgress;  // what is launched now, NCCL may be busy with, or another thread is at it
  }
  if (const NcclResult late = known->late.load()) *state = late;
}

uint64_t nccl_swap_child(NcclComm parent, uint64_t what) {
  const SwapHeld known = find_swap(parent);
  if (!known) return 0;
  const uint64_t number = known->children.fetch_add(1) + 1;
  return known->family == 0 ? 0 : mix64(known->family ^ mix64(what + (number << 32))) | 1;
}

NcclResult nccl_swap_prepare(const NcclLibrary& library, const NcclCall& call) {
  if (!swap_takes(call) || inside_nccl_group()) return kNcclSuccess;
  NcclResult result = kNcclSuccess;
  const SwapHeld known = find_or_add_swap(library, call.comm, &result);
  if (known && known->waits && !known->is_decided()) decide_swaps({known});
  return known && known->is_decided() ? known->broken() : result;
}

namespace {

// true: the group's end sees to it.
bool put_off(const NcclLibrary& library, const NcclCall& call, const CollectiveSpec* spec, NcclResult* result) {
  SwapGroup* group = PerThread<SwapGroup>::get();
  if (group && !spec) return group->others.push_back({&library, call.comm}), false;
  if (!group) return spec ? (*result = kNcclInternalError, true) : false;
  group->calls.push_back({&library, call, *spec});
  return *result = kNcclSuccess, true;
}

}  // namespace

bool nccl_swap_call(const NcclLibrary& library, const NcclCall& call, NcclResult* result) {
  const bool grouped = inside_nccl_group();
  const bool may_be_ours = swap_takes(call);
  const SwapHeld known = may_be_ours ? find_swap(call.comm) : nullptr;
  const bool decided = known && known->is_decided();
  if (decided && known->broken() != kNcclSuccess) return *result = known->broken(), true;
  const bool puts_off = known && known->puts_off();
  const bool is_theirs = !may_be_ours || (!puts_off && ((decided && !known->swaps()) || (!decided && !grouped)));
  if (is_theirs) return grouped && put_off(library, call, nullptr, result);
  CollectiveSpec spec;
  if (!make_swap_spec(call, &spec)) {
    // NCCL alone would wait for the others for ever.
    say("a reduction that the program made is not known here: the call fails");
    return *result = kNcclInternalError, true;
  }
  if (grouped) return put_off(library, call, &spec, result);
  const SwapCall ours = {&library, call, spec};
  *result = puts_off ? put_off_swap(*known, ours) : launch_swaps({{ours, known}});
  return true;
}

int nccl_swap_does(const NcclCall& call) {
  if (!swap_takes(call)) return 0;
  const SwapHeld known = find_swap(call.comm);
  if (known && known->is_decided()) return known->broken() != kNcclSuccess ? -1 : known->swaps() ? 1 : 0;
  return inside_nccl_group() || (known && !known->waits) ? -1 : 0;
}

namespace {

// What NCCL has been given in a group is in the streams before ours is, as on every other member: one of them that had
// it the other way round would wait for this one, and this one for it.
bool wait_for_others(const SwapGroup& group) {
  NcclComm last = nullptr;
  for (const auto& [library, comm] : group.others) {
    if (comm != last && !has_settled(*library, comm, kNcclInProgress)) return false;
    last = comm;
  }
  return true;
}

uint64_t order_of(const SwapCalled& one) {
  return !one.known ? 0 : one.known->kin() ? one.known->kin() : one.known->family;
}

std::vector<SwapCalled> decide_called(const SwapGroup& group, NcclResult* result) {
  std::vector<SwapCalled> all;
  std::vector<SwapHeld> fresh;
  for (const SwapCall& one : group.calls) {
    const SwapHeld known = find_or_add_swap(*one.library, one.call.comm, result);
    all.push_back({one, known});
    const bool asks = known && known->waits && !known->is_decided();
    if (asks && std::find(fresh.begin(), fresh.end(), known) == fresh.end()) fresh.push_back(known);
  }
  if (!fresh.empty()) decide_swaps(fresh);
  // Where a device begins one kernel at a time (CUDA_DEVICE_MAX_CONNECTIONS=1), they had better come in one order.
  std::stable_sort(all.begin(), all.end(),
                   [](const SwapCalled& a, const SwapCalled& b) { return order_of(a) < order_of(b); });
  return all;
}

// Calls of a group, by who does them.
struct Sorted {
  std::vector<SwapCalled> ours, late;
  std::vector<SwapCall> theirs;
};
// An error: a member that cannot go the others' way goes none.
NcclResult sort_called(SwapGroup* group, Sorted* sorted) {
  NcclResult result = kNcclSuccess;
  const std::vector<SwapCalled> all = decide_called(*group, &result);
  for (const SwapCalled& one : all) {
    const bool decided = one.known && one.known->is_decided();
    if (decided && one.known->broken() != kNcclSuccess) return one.known->broken();
    if (one.known && one.known->puts_off()) {
      sorted->late.push_back(one);
    } else if (decided && one.known->swaps()) {
      sorted->ours.push_back(one);
    } else {
      sorted->theirs.push_back(one.call);
      group->others.push_back({one.call.library, one.call.call.comm});
    }
  }
  return result;
}

}  // namespace

NcclResult nccl_swap_end_group(NcclResult result, bool launched) {
  SwapGroup* waiting = PerThread<SwapGroup>::if_any();
  if (!waiting) return result;
  SwapGroup group = std::move(*waiting);
  *waiting = {};
  if (!is_good(result)) return result;
  note_swaps_made(group.made);
  if (!launched || group.calls.empty()) return result;
  Sorted sorted;
  if (const NcclResult broken = sort_called(&group, &sorted); broken != kNcclSuccess) return broken;
  const NcclResult real = call_unswapped(sorted.theirs);
  if (real != kNcclSuccess) result = real;
  if (!is_good(result)) return result;
  for (const SwapCalled& one : sorted.late) put_off_swap(*one.known, one.call);
  if (!sorted.ours.empty() && result == kNcclInProgress && !wait_for_others(group)) return kNcclSystemError;
  if (const NcclResult own = launch_swaps(sorted.ours); own != kNcclSuccess) result = own;
  return sorted.late.empty() || !is_good(result) ? result : kNcclInProgress;
}

void nccl_swap_forget(NcclComm comm, bool aborts) {
  find_swap(comm);  // its handle may not be known yet
  if (const SwapHeld found = take_out_swap(comm)) found->end(aborts);
}

void forget_nccl_swap_in_child() {
  forget_swap_entries_in_child();
  if (SwapGroup* group = PerThread<SwapGroup>::if_any()) *group = {};
  forget_swap_means_in_child();
  forget_swap_process_in_child();
}

}  // namespace forkpoint
