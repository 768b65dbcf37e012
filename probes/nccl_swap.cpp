#include "probes/nccl_swap.h"

#include <sched.h>

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

// What a thread does when its group ends.
struct Waiting {
  const NcclLibrary* library;
  NcclCall call;
};
struct Made {
  const NcclLibrary* library;
  NcclComm* comm;
};
struct SwapGroup {
  std::vector<Waiting> calls;
  std::vector<Made> made;
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

// A non-blocking communicator's first reduction.
bool is_made(const NcclLibrary& library, NcclComm comm) {
  static constinit std::atomic<uint32_t> nobody_wakes{0};
  NcclResult state = kNcclInProgress;
  while (library.CommGetAsyncError && library.CommGetAsyncError(comm, &state) == kNcclSuccess &&
         state == kNcclInProgress) {
    futex_wait(nobody_wakes, 0, 50'000);
  }
  return state == kNcclSuccess;
}

SwapCommunicator* find_or_decide(const NcclLibrary& library, NcclComm comm) {
  if (SwapCommunicator* known = find(comm)) return known;
  if (!is_made(library, comm)) return nullptr;
  decide(library, {comm});
  return find(comm);
}

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

NcclResult launch(SwapCommunicator& one, const NcclCall& call) {
  CollectiveSpec spec;
  if (make_spec(call, &spec))
    return one.launch(spec, call.input.data, const_cast<void*>(call.output.data), call.stream);
  say("a reduction that the program made is not known here: the call fails");  // NCCL alone would wait for the others
                                                                               // for ever
  return kNcclInternalError;
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
  mode = {settings.has_knob("collectives-wide"), settings.has_knob("collectives-tree"),
          settings.has_knob("collectives-messages")};
  is_on.store(settings.has_knob("collectives") || mode.wide || mode.tree || mode.messages);
}
bool nccl_swap_is_on() { return is_on.load(std::memory_order_relaxed); }

void nccl_swap_made(const NcclLibrary& library, NcclComm* comms, int count, NcclResult result) {
  if (!is_good(result) || !comms) return;
  if (inside_nccl_group()) {
    if (SwapGroup* group = PerThread<SwapGroup>::get()) {
      for (int i = 0; i < count; ++i) group->made.push_back({&library, comms + i});
    }
    return;
  }
  if (result == kNcclSuccess) decide(library, std::vector<NcclComm>(comms, comms + count));
}

void nccl_swap_prepare(const NcclLibrary& library, const NcclCall& call) {
  if (call.swap != NcclCall::Swap::none && takes(call) && !inside_nccl_group()) find_or_decide(library, call.comm);
}

bool nccl_swap_call(const NcclLibrary& library, const NcclCall& call, NcclResult* result) {
  if (call.swap == NcclCall::Swap::none || !takes(call)) return false;
  SwapCommunicator* known = find(call.comm);
  if (known && !known->swaps()) return false;
  if (inside_nccl_group()) {
    SwapGroup* group = PerThread<SwapGroup>::get();
    if (!group) return *result = kNcclInternalError, true;
    group->calls.push_back({&library, call});
    return *result = kNcclSuccess, true;
  }
  if (!known) return false;
  *result = launch(*known, call);
  return true;
}

bool nccl_swap_does(const NcclCall& call) {
  if (!takes(call)) return false;
  const SwapCommunicator* known = find(call.comm);
  return known && known->swaps();
}

NcclResult nccl_swap_end_group(NcclResult result, bool launched) {
  SwapGroup* group = PerThread<SwapGroup>::if_any();
  if (!group) return result;
  if (is_good(result) && !group->made.empty() && result == kNcclSuccess) {
    std::vector<NcclComm> comms;
    for (const Made& one : group->made) comms.push_back(*one.comm);
    decide(*group->made[0].library, comms);
  }
  group->made.clear();
  const std::vector<Waiting> calls = std::move(group->calls);
  group->calls.clear();
  if (!is_good(result) || !launched) return result;
  std::vector<NcclComm> undecided;
  for (const Waiting& one : calls) {
    if (!find(one.call.comm) && is_made(*one.library, one.call.comm)) undecided.push_back(one.call.comm);
  }
  if (!undecided.empty()) decide(*calls[0].library, undecided);
  for (const Waiting& one : calls) {
    SwapCommunicator* known = find(one.call.comm);
    const NcclResult own = known && known->swaps() ? launch(*known, one.call) : call_real(*one.library, one.call);
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
  if (aborts) return found->abort();  // by a watchdog's thread, perhaps: another may be in a call on it
  found->release();
  delete found;
}

void forget_nccl_swap_in_child() {
  locked.clear();
  communicators = nullptr;
  if (SwapGroup* group = PerThread<SwapGroup>::if_any()) group->calls.clear(), group->made.clear();
  SwapCommunicator::forget_all_in_child();
}

}  // namespace forkpoint
