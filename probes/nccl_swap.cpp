#include "probes/nccl_swap.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "probes/os.h"
#include "probes/per_thread.h"
#include "probes/recorder.h"
#include "probes/settings.h"
#include "probes/swap_communicator.h"

namespace forkpoint {
namespace {

using collective::CollectiveSpec;
constexpr NcclResult kNcclInternalError = 3;

constinit std::atomic<bool> is_on{false};
constinit SwapMode mode;

constinit std::atomic_flag locked = ATOMIC_FLAG_INIT;
class Locked {
 public:
  Locked() {
    while (locked.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  ~Locked() { locked.clear(std::memory_order_release); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
};
constinit SwapCommunicator* communicators = nullptr;  // under the lock

constinit std::atomic<int> undecided{0};  // of them, those that NCCL makes in the background
constinit std::atomic<uint32_t> nobody_wakes{0};
constexpr int64_t kPauseNs = 50'000;

// What a thread does when its group ends.
struct Waiting {
  const NcclLibrary* library;
  NcclCall call;
  CollectiveSpec spec;  // as things were when the program made the call
};
struct Made {
  const NcclLibrary* library;
  NcclComm* comm;
  NcclComm parent;
  uint64_t family;
};
struct SwapGroup {
  std::vector<Waiting> calls;
  std::vector<Made> made;
  std::vector<std::pair<const NcclLibrary*, NcclComm>> others;  // whose calls in the group are NCCL's
};

SwapCommunicator* find(NcclComm comm) {
  const Locked lock;
  for (SwapCommunicator* known = communicators; known; known = known->next) {
    if (known->handle.load(std::memory_order_relaxed) == comm) return known;
  }
  return nullptr;
}

const CudaDriver* driver_of_process() {
  const Guard guard;
  return guard.entered() ? find_cuda_driver(guard.token()) : nullptr;
}

// Declared in the run; on stderr once, for all communicators that it is true of.
void say_refusal(const SwapCommunicator& one) {
  if (one.size() < 2) return;
  static constinit std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    say("reductions of a communicator of %d ranks are left to NCCL, whose order of additions is its own: %s",
        one.size(), one.refusal());
  }
  const Guard guard;
  if (!guard.entered() || !recorder.is_awake()) return;
  char detail[160];
  snprintf(detail, sizeof(detail), "of %d ranks: %s", one.size(), one.refusal());
  recorder.note_limit("reductions in NCCL's own order", detail);
}

// Of communicators that NCCL has made and this process has not looked at yet.
void decide(const NcclLibrary& library, const std::vector<NcclComm>& comms) {
  const CudaDriver* driver = driver_of_process();
  if (!driver) return;
  std::vector<SwapCommunicator*> fresh;
  for (const NcclComm comm : comms) {
    if (!comm || find(comm)) continue;
    auto* one = new (std::nothrow) SwapCommunicator(library, *driver, comm, mode);
    if (!one) continue;
    fresh.push_back(one);
    const Locked lock;
    one->next = communicators;
    communicators = one;
  }
  if (fresh.empty()) return;
  SwapCommunicator::decide(fresh.data(), fresh.size());
  for (const SwapCommunicator* one : fresh) {
    if (!one->swaps()) say_refusal(*one);
  }
}

// ---- Communicators that NCCL makes in the background. Their members agree while the program asks NCCL, as it must,
// whether they are ready: until they have agreed, it is told that they are not.

void expect(const NcclLibrary& library, const Made& made) {
  const CudaDriver* driver = driver_of_process();
  if (!driver || (*made.comm && find(*made.comm))) return;
  auto* one = new (std::nothrow) SwapCommunicator(library, *driver, *made.comm, mode);
  if (!one) return;
  one->maker = gettid();
  one->family = made.family;
  if (!*made.comm) one->handle_at = made.comm, one->parent = made.parent;
  undecided.fetch_add(1);
  const Locked lock;
  one->next = communicators;
  communicators = one;
}

// Goes on with those that this thread has had made, since it may hold members that wait for each other, and with
// `comm`. ready: NCCL says so of that.
void advance_all(NcclComm comm, bool ready) {
  std::vector<SwapCommunicator*> waiting;
  {
    const Locked lock;
    for (SwapCommunicator* one = communicators; one; one = one->next) {
      if (one->is_decided()) continue;
      // Until its parent is ready, NCCL itself keeps the address.
      if (ready && one->handle_at && one->parent == comm) one->handle.store(*one->handle_at), one->handle_at = nullptr;
      const NcclComm handle = one->handle.load();
      if (handle && (handle == comm || one->maker == gettid())) waiting.push_back(one);
    }
  }
  for (SwapCommunicator* one : waiting) one->advance(false);
  for (SwapCommunicator* one : waiting) {
    const bool may_ask = std::all_of(waiting.begin(), waiting.end(), [&](const SwapCommunicator* other) {
      return other->is_prepared() || other->family != one->family || one->family == 0;
    });
    if (!one->advance(may_ask) || !one->tell_once()) continue;
    undecided.fetch_sub(1);
    if (!one->swaps()) say_refusal(*one);
  }
}

bool is_made(const NcclLibrary& library, NcclComm comm) { return has_settled(library, comm, kNcclInProgress); }

// Where the program has not asked whether it is ready.
SwapCommunicator* find_or_decide(const NcclLibrary& library, NcclComm comm) {
  SwapCommunicator* known = find(comm);
  while (known && !known->is_decided()) {
    advance_all(comm, false);
    if (!known->is_decided()) futex_wait(nobody_wakes, 0, kPauseNs);
  }
  if (known || !is_made(library, comm)) return known;
  decide(library, {comm});
  return find(comm);
}

void decide_made(const std::vector<Made>& made, NcclResult result) {
  std::vector<NcclComm> comms;
  for (const Made& one : made) comms.push_back(*one.comm);
  if (result == kNcclSuccess && !comms.empty()) decide(*made[0].library, comms);
  for (const Made& one : made) {
    if (result == kNcclInProgress) expect(*one.library, one);
  }
}

// ---- Calls

// What follows from facts that all members share. false: NCCL does it on all of them.
bool takes(const NcclCall& call) {
  const DType* dtype = nccl_dtype(call.type);
  return call.comm && call.reduction >= 0 && dtype && collective::has_collective(*dtype, mode.tree);
}

bool make_spec(const NcclCall& call, CollectiveSpec* spec) {
  spec->kind = static_cast<collective::Kind>(static_cast<int>(call.swap) - 1);
  spec->dtype = *nccl_dtype(call.type);
  spec->wide = mode.wide;
  spec->tree = mode.tree;
  spec->count = call.count;
  spec->root = call.root < 0 ? 0 : static_cast<uint32_t>(call.root);
  spec->op = static_cast<collective::Op>(call.reduction);
  if (call.reduction < kNcclBuiltInReductions) return true;
  spec->op = collective::Op::scaled_sum;
  NcclCommunicators::Reduction known;
  const Guard guard;
  if (!guard.entered() || !nccl_communicators.find_reduction(guard.token(), call.comm, call.reduction, &known))
    return false;
  spec->factor = known.bits;
  spec->factor_at = known.on_device ? known.address : nullptr;
  return known.type == call.type;
}

NcclResult launch(SwapCommunicator& one, const NcclCall& call, const CollectiveSpec& spec) {
  return one.launch(spec, call.input.data, const_cast<void*>(call.output.data), call.stream);
}

NcclResult call_real(const NcclLibrary& library, const NcclCall& call) {
  void* out = const_cast<void*>(call.output.data);
  switch (call.swap) {
    case NcclCall::Swap::all_reduce:
      return library.AllReduce(call.input.data, out, call.count, call.type, call.reduction, call.comm, call.stream);
    case NcclCall::Swap::reduce_scatter:
      return library.ReduceScatter(call.input.data, out, call.count, call.type, call.reduction, call.comm, call.stream);
    default:
      return library.Reduce(call.input.data, out, call.count, call.type, call.reduction, call.root, call.comm,
                            call.stream);
  }
}

bool is_good(NcclResult result) { return result == kNcclSuccess || result == kNcclInProgress; }

}  // namespace

void set_nccl_swap(const Settings& settings) {
  const char* test = getenv("FORKPOINT_TEST_COLLECTIVES");
  mode = {settings.has_knob("collectives-wide"), settings.has_knob("collectives-tree"),
          test && strcmp(test, "messages") == 0};
  is_on.store(settings.has_knob("collectives") || mode.wide || mode.tree);
}
bool nccl_swap_is_on() { return is_on.load(std::memory_order_relaxed); }

void nccl_swap_made(const NcclLibrary& library, const NcclSwapMaking& making, NcclResult result) {
  if (!is_good(result) || !making.comms) return;
  std::vector<Made> made;
  for (int i = 0; i < making.count; ++i) made.push_back({&library, making.comms + i, making.parent, making.family});
  if (inside_nccl_group()) {
    if (SwapGroup* group = PerThread<SwapGroup>::get()) group->made.insert(group->made.end(), made.begin(), made.end());
    return;
  }
  decide_made(made, result);
}

void nccl_swap_asked(NcclComm comm, NcclResult* state) {
  if (undecided.load() == 0 || !state || !is_good(*state) || inside_nccl_group()) return;
  // Also when it is busy: with what it asks the others, perhaps, one of which waits for this thread to let it ask.
  advance_all(comm, *state == kNcclSuccess);
  const SwapCommunicator* known = find(comm);
  if (known && !known->is_decided()) *state = kNcclInProgress;
}

void nccl_swap_prepare(const NcclLibrary& library, const NcclCall& call) {
  if (call.swap != NcclCall::Swap::none && takes(call) && !inside_nccl_group()) find_or_decide(library, call.comm);
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
  SwapCommunicator* known = call.swap == NcclCall::Swap::none || !takes(call) ? nullptr : find(call.comm);
  const bool is_theirs = call.swap == NcclCall::Swap::none || !takes(call) ||
                         (known && known->is_decided() && !known->swaps()) || (!known && !grouped);
  if (is_theirs) return grouped && put_off(library, call, nullptr, result);
  CollectiveSpec spec;
  if (!make_spec(call, &spec)) {
    // NCCL alone would wait for the others for ever.
    say("a reduction that the program made is not known here: the call fails");
    return *result = kNcclInternalError, true;
  }
  if (grouped) return put_off(library, call, &spec, result);
  *result = launch(*known, call, spec);
  return true;
}

int nccl_swap_does(const NcclCall& call) {
  if (!takes(call)) return 0;
  const SwapCommunicator* known = find(call.comm);
  if (known && known->is_decided()) return known->swaps() ? 1 : 0;
  return inside_nccl_group() ? -1 : 0;
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

void decide_called(const SwapGroup& group) {
  std::vector<NcclComm> fresh;
  for (const Waiting& one : group.calls) {
    if (find(one.call.comm))
      find_or_decide(*one.library, one.call.comm);
    else if (is_made(*one.library, one.call.comm))
      fresh.push_back(one.call.comm);
  }
  if (!fresh.empty()) decide(*group.calls[0].library, fresh);
}

}  // namespace

namespace {

// Those whose members have decided against it, together: one thread may hold several members.
NcclResult call_theirs(const std::vector<const Waiting*>& calls) {
  if (calls.empty()) return kNcclSuccess;
  const NcclLibrary& library = *calls[0]->library;
  NcclResult result = library.GroupStart();
  for (const Waiting* one : calls) {
    if (result == kNcclSuccess) result = call_real(*one->library, one->call);
  }
  const NcclResult ended = library.GroupEnd();
  return result == kNcclSuccess ? ended : result;
}

}  // namespace

NcclResult nccl_swap_end_group(NcclResult result, bool launched) {
  SwapGroup* waiting = PerThread<SwapGroup>::if_any();
  if (!waiting) return result;
  SwapGroup group = std::move(*waiting);
  *waiting = {};
  if (!is_good(result)) return result;
  decide_made(group.made, result);
  if (!launched || group.calls.empty()) return result;
  decide_called(group);
  std::vector<const Waiting*> ours, theirs;
  for (const Waiting& one : group.calls) {
    const SwapCommunicator* known = find(one.call.comm);
    const bool is_ours = known && known->swaps();
    (is_ours ? ours : theirs).push_back(&one);
    if (!is_ours) group.others.push_back({one.library, one.call.comm});
  }
  const NcclResult real = call_theirs(theirs);
  if (real != kNcclSuccess) result = real;
  if (!is_good(result) || ours.empty()) return result;
  if (result == kNcclInProgress && !wait_for_others(group)) return kNcclSystemError;
  for (const Waiting* one : ours) {
    const NcclResult own = launch(*find(one->call.comm), one->call, one->spec);
    if (own != kNcclSuccess) result = own;
  }
  return result;
}

void nccl_swap_forget(NcclComm comm, bool aborts) {
  SwapCommunicator* found = nullptr;
  {
    const Locked lock;
    for (SwapCommunicator** link = &communicators; *link; link = &(*link)->next) {
      if ((*link)->handle.load(std::memory_order_relaxed) != comm) continue;
      found = *link;
      *link = found->next;
      break;
    }
  }
  if (!found) return;
  if (!found->is_decided() && found->tell_once()) undecided.fetch_sub(1);
  if (aborts) return found->abort();  // by a watchdog's thread, perhaps: another may be in a call on it
  found->release();
  delete found;
}

void forget_nccl_swap_in_child() {
  locked.clear();
  communicators = nullptr;
  undecided.store(0);
  if (SwapGroup* group = PerThread<SwapGroup>::if_any()) *group = {};
  SwapCommunicator::forget_all_in_child();
}

}  // namespace forkpoint
