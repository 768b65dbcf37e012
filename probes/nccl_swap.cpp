#include "probes/nccl_swap.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "lib/digest_mix.h"
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
  uint64_t family;
};
struct Entry : SwapCommunicator {
  using SwapCommunicator::SwapCommunicator;
  // Of one that NCCL makes in the background: where its handle will be, until that is known.
  NcclComm* handle_at = nullptr;
  bool in_background = false;
  // Its reductions wait until the members have decided, under the lock. late: what came of them, if that is an error.
  std::vector<Waiting> pending;
  std::atomic<bool> wanted{false};
  std::atomic<NcclResult> late{kNcclSuccess};
};
using Held = std::shared_ptr<Entry>;
constinit std::vector<Held>* communicators = nullptr;  // under the lock; never freed
constinit std::atomic<bool> any_in_background{false};

struct SwapGroup {
  std::vector<Waiting> calls;
  std::vector<Made> made;
  std::vector<std::pair<const NcclLibrary*, NcclComm>> others;  // whose calls in the group are NCCL's
};

// It may be destroyed by another thread meanwhile: the last who holds it frees it.
Held find(NcclComm comm) {
  const Locked lock;
  for (size_t i = 0; comm && communicators && i < communicators->size(); ++i) {
    if ((*communicators)[i]->handle.load(std::memory_order_relaxed) == comm) return (*communicators)[i];
  }
  for (size_t i = 0; comm && any_in_background && communicators && i < communicators->size(); ++i) {
    Entry& one = *(*communicators)[i];
    NcclComm handle = nullptr;
    if (!one.handle_at || !read_handle(one.handle_at, &handle) || handle != comm) continue;
    one.handle.store(comm), one.handle_at = nullptr;
    return (*communicators)[i];
  }
  return nullptr;
}
void keep(const Held& one) {
  const Locked lock;
  if (!communicators) communicators = new std::vector<Held>;
  communicators->push_back(one);
}
Held take_out(NcclComm comm) {
  Held found;
  const Locked lock;
  for (size_t i = 0; comm && communicators && !found && i < communicators->size(); ++i) {
    if ((*communicators)[i]->handle.load(std::memory_order_relaxed) != comm) continue;
    found = std::move((*communicators)[i]);
    communicators->erase(communicators->begin() + static_cast<std::ptrdiff_t>(i));
  }
  return found;
}

const CudaDriver* driver_of_process() {
  const Guard guard;
  return guard.entered() ? find_cuda_driver(guard.token()) : nullptr;
}

// Declared in the run; on stderr once, for all communicators that it is true of.
void say_decision(const SwapCommunicator& one) {
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

// Of a communicator that this process has seen made, or found. Not asked about before its first reduction.
Held add(const NcclLibrary& library, NcclComm comm, uint64_t family, NcclComm* in_background_at = nullptr) {
  const CudaDriver* driver = driver_of_process();
  if (!driver) return nullptr;
  const auto one = std::make_shared<Entry>(library, *driver, comm, mode, family);
  one->in_background = in_background_at;
  one->handle_at = comm ? nullptr : in_background_at;
  keep(one);
  return one;
}

bool is_made(const NcclLibrary& library, NcclComm comm) { return has_settled(library, comm, kNcclInProgress); }

void decide(const std::vector<Held>& all) {
  SwapCommunicator::decide({all.begin(), all.end()});
  for (const Held& one : all) {
    while (!one->is_decided()) futex_wait(nobody_wakes, 0, kPauseNs);  // by another thread
    if (one->tell_once()) say_decision(*one);
  }
}

Held find_or_decide(const NcclLibrary& library, NcclComm comm) {
  Held known = find(comm);
  if (!known && is_made(library, comm)) known = add(library, comm, 0);
  if (known && !known->in_background && !known->is_decided()) decide({known});
  return known;
}

// What was destroyed where we did not see it has left its address, or its variable, to this one.
void forget_stale(const Made& made) {
  if (const Held stale = take_out(*made.comm)) stale->end(false);
  const Locked lock;
  for (size_t i = 0; communicators && i < communicators->size(); ++i) {
    Entry& one = *(*communicators)[i];
    if (one.handle_at == made.comm) one.handle_at = nullptr;
  }
}

void note_made(const std::vector<Made>& made, NcclResult result) {
  for (const Made& one : made) {
    if (result == kNcclInProgress) any_in_background.store(true);
    forget_stale(one);
    if (result == kNcclInProgress || *one.comm)
      add(*one.library, *one.comm, one.family, result == kNcclInProgress ? one.comm : nullptr);
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

// A call, and its communicator, which another thread may destroy meanwhile. nullptr: it is not known.
struct Called {
  Waiting call;
  Held known;
};

SwapCommunicator::Launch launch_of(const Called& one) {
  const NcclCall& call = one.call.call;
  return {one.known.get(), one.call.spec, call.input.data, const_cast<void*>(call.output.data),
          static_cast<CUstream>(call.stream)};
}

// The k-th calls of all members of a communicator that are here belong together.
NcclResult launch_all(const std::vector<Called>& all) {
  std::vector<std::vector<const Called*>> bundles;
  for (const Called& one : all) {
    const auto fits = [&](const std::vector<const Called*>& bundle) {
      return one.known->family != 0 && bundle[0]->known->family == one.known->family &&
             std::none_of(bundle.begin(), bundle.end(), [&](const Called* other) { return other->known == one.known; });
    };
    const auto found = std::find_if(bundles.begin(), bundles.end(), fits);
    if (found == bundles.end())
      bundles.push_back({&one});
    else
      found->push_back(&one);
  }
  NcclResult result = kNcclSuccess;
  for (const auto& bundle : bundles) {
    std::vector<SwapCommunicator::Launch> calls;
    for (const Called* one : bundle) calls.push_back(launch_of(*one));
    const NcclResult own = SwapCommunicator::launch(calls);
    if (own != kNcclSuccess) result = own;
  }
  return result;
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

// ---- Communicators that do not block: their first reductions wait, and the program is told that they are in progress,
// until it has asked so often, as it must, that the members have agreed.

NcclResult put_on(Entry& known, const Waiting& call) {
  const Locked lock;
  known.pending.push_back(call);
  known.wanted.store(true);
  return kNcclInProgress;
}

// Those whose members have decided against it, together: one thread may hold several members.
NcclResult call_theirs(const std::vector<Waiting>& calls) {
  if (calls.empty()) return kNcclSuccess;
  const NcclLibrary& library = *calls[0].library;
  NcclResult result = library.GroupStart();
  for (const Waiting& one : calls) {
    if (result == kNcclSuccess) result = call_real(*one.library, one.call);
  }
  const NcclResult ended = library.GroupEnd();
  return result == kNcclSuccess ? ended : result;
}

// members: those of one communicator that are here, all decided.
void launch_pending(const std::vector<Held>& members) {
  std::vector<Called> ours;
  std::vector<Waiting> theirs;
  for (const Held& one : members) {
    std::vector<Waiting> calls;
    {
      const Locked lock;
      calls.swap(one->pending);
    }
    for (const Waiting& call : calls) {
      if (one->broken() == kNcclSuccess && one->swaps()) {
        ours.push_back({call, one});
        continue;
      }
      if (one->broken() == kNcclSuccess) theirs.push_back(call);
    }
  }
  const NcclResult real = call_theirs(theirs), own = launch_all(ours);
  for (const Held& one : members) {
    if (!is_good(real) || !is_good(own)) one->late.store(is_good(real) ? own : real);
    if (one->broken() != kNcclSuccess) one->late.store(one->broken());
  }
}

// All of the process: one thread may hold members that wait for each other, and another one may ask for it.
void advance_all() {
  std::vector<Held> waiting;
  {
    const Locked lock;
    for (size_t i = 0; communicators && i < communicators->size(); ++i) {
      const Held& one = (*communicators)[i];
      if (one->wanted && !one->pending.empty()) waiting.push_back(one);
    }
  }
  for (const Held& one : waiting) one->advance(false);
  for (const Held& one : waiting) {
    const bool may_ask = std::all_of(waiting.begin(), waiting.end(), [&](const Held& other) {
      return other->is_prepared() || other->family != one->family || one->family == 0;
    });
    if (!one->advance(may_ask)) continue;
    if (one->tell_once()) say_decision(*one);
  }
  for (const Held& one : waiting) {
    std::vector<Held> members;
    for (const Held& other : waiting) {
      if (other == one || (one->family != 0 && other->family == one->family)) members.push_back(other);
    }
    const bool all = std::all_of(members.begin(), members.end(), [](const Held& each) { return each->is_decided(); });
    if (all) launch_pending(members);
  }
}

}  // namespace

void set_nccl_swap(const Settings& settings) {
  const char* test = getenv("FORKPOINT_TEST_COLLECTIVES");
  mode = {settings.has_knob("collectives-wide"), settings.has_knob("collectives-tree"),
          test && strstr(test, "messages"), test && strstr(test, "say")};
  is_on.store(settings.has_knob("collectives") || mode.wide || mode.tree);
}
bool nccl_swap_is_on() { return is_on.load(std::memory_order_relaxed); }

void nccl_swap_made(const NcclLibrary& library, const NcclSwapMaking& making, NcclResult result) {
  if (!is_good(result) || !making.comms) return;
  std::vector<Made> made;
  for (int i = 0; i < making.count; ++i) made.push_back({&library, making.comms + i, making.family});
  if (inside_nccl_group()) {
    if (SwapGroup* group = PerThread<SwapGroup>::get()) group->made.insert(group->made.end(), made.begin(), made.end());
    return;
  }
  note_made(made, result);
}

void nccl_swap_asked(NcclComm comm, NcclResult* state) {
  if (!any_in_background.load() || !state || !is_good(*state) || inside_nccl_group()) return;
  const Held known = find(comm);
  if (!known || !known->wanted) return;
  const bool waits = !known->is_decided();
  // Also when it is busy: with what it asks the others, perhaps, one of which waits for this thread to let it ask.
  advance_all();
  if (waits) *state = kNcclInProgress;  // what was launched now, NCCL may be busy with
  if (const NcclResult late = known->late.load()) *state = late;
}

uint64_t nccl_swap_child(NcclComm parent, uint64_t what) {
  const Held known = find(parent);
  if (!known) return 0;
  const uint64_t number = known->children.fetch_add(1) + 1;
  return known->family == 0 ? 0 : mix64(known->family ^ mix64(what + (number << 32))) | 1;
}

NcclResult nccl_swap_prepare(const NcclLibrary& library, const NcclCall& call) {
  if (call.swap == NcclCall::Swap::none || !takes(call) || inside_nccl_group()) return kNcclSuccess;
  const Held known = find_or_decide(library, call.comm);
  return known && known->is_decided() ? known->broken() : kNcclSuccess;
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
  const bool may_be_ours = call.swap != NcclCall::Swap::none && takes(call);
  const Held known = may_be_ours ? find(call.comm) : nullptr;
  const bool decided = known && known->is_decided();
  if (decided && known->broken() != kNcclSuccess) return *result = known->broken(), true;
  const bool waits = known && !decided && known->in_background;
  const bool is_theirs = !may_be_ours || (decided && !known->swaps()) || (!decided && !grouped && !waits);
  if (is_theirs) return grouped && put_off(library, call, nullptr, result);
  CollectiveSpec spec;
  if (!make_spec(call, &spec)) {
    // NCCL alone would wait for the others for ever.
    say("a reduction that the program made is not known here: the call fails");
    return *result = kNcclInternalError, true;
  }
  if (grouped) return put_off(library, call, &spec, result);
  if (waits) return *result = put_on(*known, {&library, call, spec}), true;
  SwapCommunicator::Launch alone = launch_of({{&library, call, spec}, known});
  *result = SwapCommunicator::launch({&alone, 1});
  return true;
}

int nccl_swap_does(const NcclCall& call) {
  if (!takes(call)) return 0;
  const Held known = find(call.comm);
  if (known && known->is_decided()) return known->broken() != kNcclSuccess ? -1 : known->swaps() ? 1 : 0;
  return inside_nccl_group() || (known && known->in_background) ? -1 : 0;
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

std::vector<Called> decide_called(const SwapGroup& group) {
  std::vector<Called> all;
  std::vector<Held> fresh;
  for (const Waiting& one : group.calls) {
    Held known = find(one.call.comm);
    if (!known && is_made(*one.library, one.call.comm)) known = add(*one.library, one.call.comm, 0);
    all.push_back({one, known});
    const bool asks = known && !known->in_background && !known->is_decided();
    if (asks && std::find(fresh.begin(), fresh.end(), known) == fresh.end()) fresh.push_back(known);
  }
  if (!fresh.empty()) decide(fresh);
  // Where a device begins one kernel at a time (CUDA_DEVICE_MAX_CONNECTIONS=1), they had better come in one order.
  std::stable_sort(all.begin(), all.end(), [](const Called& a, const Called& b) {
    return (a.known ? a.known->family : 0) < (b.known ? b.known->family : 0);
  });
  return all;
}

}  // namespace

NcclResult nccl_swap_end_group(NcclResult result, bool launched) {
  SwapGroup* waiting = PerThread<SwapGroup>::if_any();
  if (!waiting) return result;
  SwapGroup group = std::move(*waiting);
  *waiting = {};
  if (!is_good(result)) return result;
  note_made(group.made, result);
  if (!launched || group.calls.empty()) return result;
  std::vector<Called> ours, late;
  std::vector<Waiting> theirs;
  for (const Called& one : decide_called(group)) {
    const bool decided = one.known && one.known->is_decided();
    if (decided && one.known->broken() != kNcclSuccess) return one.known->broken();
    if (one.known && !decided) late.push_back(one);
    if (decided && one.known->swaps()) ours.push_back(one);
    if (one.known && (!decided || one.known->swaps())) continue;
    theirs.push_back(one.call);
    group.others.push_back({one.call.library, one.call.call.comm});
  }
  const NcclResult real = call_theirs(theirs);
  if (real != kNcclSuccess) result = real;
  if (!is_good(result)) return result;
  for (const Called& one : late) put_on(*one.known, one.call);
  if (!ours.empty() && result == kNcclInProgress && !wait_for_others(group)) return kNcclSystemError;
  if (const NcclResult own = launch_all(ours); own != kNcclSuccess) result = own;
  return late.empty() || !is_good(result) ? result : kNcclInProgress;
}

void nccl_swap_forget(NcclComm comm, bool aborts) {
  if (const Held found = take_out(comm)) found->end(aborts);
}

void forget_nccl_swap_in_child() {
  locked.clear();
  communicators = nullptr;
  any_in_background.store(false);
  if (SwapGroup* group = PerThread<SwapGroup>::if_any()) *group = {};
  forget_swap_means_in_child();
  forget_swap_process_in_child();
}

}  // namespace forkpoint
