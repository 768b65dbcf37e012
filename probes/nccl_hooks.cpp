#include "probes/nccl_hooks.h"

#include <cstring>
#include <exception>

#include "lib/digest_mix.h"
#include "probes/nccl_calls.h"
#include "probes/nccl_swap.h"
#include "probes/nccl_threads.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

thread_local int nccl_depth __attribute__((tls_model("initial-exec"))) = 0;
constinit std::atomic<bool> any_call{false};

class InsideNccl {
 public:
  InsideNccl() { ++nccl_depth; }
  ~InsideNccl() { --nccl_depth; }
  InsideNccl(const InsideNccl&) = delete;
  InsideNccl& operator=(const InsideNccl&) = delete;
};

// Sets nothing when it is set: all threads read the flag.
void note_call() {
  if (!any_call.load(std::memory_order_relaxed)) any_call.store(true, std::memory_order_relaxed);
}

// Our failures are a Gap, never the host's. Result: what body returns, or otherwise.
template <typename Result, typename Body>
Result within_probe(Result otherwise, Body body) {
  const Guard guard;
  if (!guard.entered()) return otherwise;
  try {
    return body(guard.token());
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
  return otherwise;
}

// What a call that makes a communicator told us before it was made.
struct Making {
  const NcclLibrary* library = nullptr;
  NcclFamily* family = nullptr;
  int place = -1;
};

Making begin_making(const NcclLibrary* library, const Digest& id, int size, int place) {
  Making making{library, nullptr, place};
  if (recorder.may_wake()) {
    making.family = within_probe<NcclFamily*>(
        nullptr, [&](const Token& token) { return nccl_communicators.enter(token, id, size, place); });
  }
  return making;
}

Making begin_child(const NcclLibrary* library, NcclComm parent, const char* made_by, uint64_t what) {
  Making making{library, nullptr, -1};
  if (recorder.may_wake()) {
    making.family = within_probe<NcclFamily*>(nullptr, [&](const Token& token) -> NcclFamily* {
      NcclCommunicator* known = nccl_communicators.find(token, parent, library);
      return known ? nccl_communicators.enter_child(token, *known, made_by, what) : nullptr;
    });
  }
  return making;
}

// makes: false where this rank gets none (a split without a colour).
void end_making(const Making& making, NcclResult result, NcclComm* made, bool makes = true) {
  if (!making.family) return;
  const bool good = makes && (result == kNcclSuccess || result == kNcclInProgress);
  if (good && inside_nccl_group()) return made_in_nccl_group(made, making.library, making.family, making.place);
  within_probe(false, [&](const Token& token) {
    if (!good) return nccl_communicators.leave(token, making.family), false;
    nccl_communicators.made(token, made, making.library, making.family, making.place);
    // All places of this process have been entered once one of them is made.
    if (result == kNcclSuccess) nccl_communicators.suggest_rank(token, *making.family);
    return true;
  });
}

// A reduction by the deterministic kernels, or the real call. Either is NCCL's work to whoever watches launches.
NcclResult call_or_swap(const NcclLibrary& library, const NcclCall& call, NcclReal real) {
  const InsideNccl inside;
  NcclResult result = kNcclSuccess;
  return nccl_swap_call(library, call, &result) ? result : real();
}

// Before anybody uses them.
void swap_made(const NcclLibrary& library, const NcclSwapMaking& making, NcclResult result) {
  if (!nccl_swap_is_on() || !making.comms) return;
  const InsideNccl inside;
  nccl_swap_made(library, making, result);
}
uint64_t swap_family_of_child(NcclComm parent, const char* made_by, uint64_t what) {
  return nccl_swap_is_on() ? nccl_swap_child(parent, mix64(what + static_cast<uint64_t>(made_by[1]))) : 0;
}

uint64_t hash_of(const int* numbers, int count) {
  const bool sane = numbers && count > 0 && count <= 1 << 20;  // NCCL refuses others; we must not read them
  const Digest digest = digest_only(numbers, sizeof(int) * static_cast<size_t>(sane ? count : 0));
  return mix64(digest.a ^ mix64(digest.b + static_cast<uint64_t>(count)));
}

}  // namespace

bool inside_nccl() { return nccl_depth > 0; }
bool nccl_is_at_work() { return inside_nccl() || on_thread_of_nccl(); }
bool nccl_seen_by_symbol() { return any_call.load(std::memory_order_relaxed); }

void forget_nccl_in_child() {
  nccl_depth = 0;
  forget_nccl_groups_in_child();
  forget_nccl_swap_in_child();
  nccl_communicators.forget_all_in_child();
}

const NcclLibrary* nccl_for(NcclComm comm, const void* caller) {
  note_call();
  if (const NcclLibrary* maker = nccl_communicators.library_of(comm)) return maker;
  return nccl_of_caller(caller);
}

NcclResult call_collective(const NcclLibrary& library, const NcclCall& call, NcclReal real) {
  if (inside_nccl()) return real();  // ncclBcast calls ncclBroadcast through its symbol
  if (nccl_swap_is_on()) {
    const InsideNccl inside;
    if (const NcclResult broken = nccl_swap_prepare(library, call); broken != kNcclSuccess) return broken;
  }
  NcclOutput output;
  const bool to_finish = recorder.wants_records() && record_nccl_inputs(call, &library, &output);
  const NcclResult result = nccl_swap_is_on() ? call_or_swap(library, call, real) : call_nccl(real);
  if (to_finish) finish_nccl_call(result, output);
  return result;
}

NcclResult call_nccl(NcclReal real) {
  const InsideNccl inside;
  return real();
}

NcclResult begin_group(NcclReal real) {
  const NcclResult result = call_nccl(real);
  if (result == kNcclSuccess) nccl_group_begun();
  return result;
}

NcclResult end_group(NcclReal real, bool launches) {
  const bool outermost = nccl_group_ends();
  NcclResult result = call_nccl(real);
  if (outermost && nccl_swap_is_on()) {
    const InsideNccl inside;
    result = nccl_swap_end_group(result, launches);
  }
  if (outermost) finish_nccl_group(result, launches);
  return result;
}

NcclResult make_ranks(const NcclLibrary& library, const NcclMaking& call, NcclReal real) {
  if (inside_nccl()) return real();
  const bool has_id = call.ids && call.id_count <= call.size;
  const Digest id = has_id ? nccl_id(call.ids, call.id_count) : Digest{};
  const Making making = begin_making(&library, id, call.size, call.place);
  const NcclResult result = call_nccl(real);
  end_making(making, result, call.made);
  swap_made(library, {call.made, 1, has_id ? id.a | 1 : 0, call.config}, result);
  return result;
}

NcclResult make_all(const NcclLibrary& library, NcclComm* made, int size, NcclReal real) {
  if (inside_nccl()) return real();
  const Digest id = nccl_own_id();
  if (!recorder.may_wake()) {
    const NcclResult result = call_nccl(real);
    swap_made(library, {made, size, id.a | 1}, result);
    return result;
  }
  Making last;
  for (int place = 0; place < size; ++place) last = begin_making(&library, id, size, place);
  const NcclResult result = call_nccl(real);
  for (int place = 0; place < size && last.family; ++place) {
    last.place = place;
    end_making(last, result, made ? made + place : nullptr, made != nullptr);
  }
  swap_made(library, {made, size, id.a | 1}, result);
  return result;
}

NcclResult split(const NcclLibrary& library, const NcclSplit& call, NcclReal real) {
  if (inside_nccl()) return real();
  const Making making = begin_child(&library, call.parent, "split", static_cast<uint32_t>(call.color));
  const NcclResult result = call_nccl(real);
  end_making(making, result, call.made, call.color != kNcclNoColor);
  const uint64_t family = swap_family_of_child(call.parent, "split", static_cast<uint32_t>(call.color));
  if (call.color != kNcclNoColor) swap_made(library, {call.made, 1, family, call.config, call.parent}, result);
  return result;
}

NcclResult shrink(const NcclLibrary& library, const NcclShrink& call, NcclReal real) {
  if (inside_nccl()) return real();
  const Making making = begin_child(&library, call.parent, "shrink", hash_of(call.excluded, call.count));
  const NcclResult result = call_nccl(real);
  end_making(making, result, call.made);
  const uint64_t family = swap_family_of_child(call.parent, "shrink", hash_of(call.excluded, call.count));
  swap_made(library, {call.made, 1, family, call.config, call.parent}, result);
  return result;
}

NcclResult ask_state(NcclComm comm, NcclResult* state, NcclReal real) {
  const NcclResult result = call_nccl(real);
  if (result != kNcclSuccess || inside_nccl() || !nccl_swap_is_on()) return result;
  const InsideNccl inside;
  nccl_swap_asked(comm, state);
  return result;
}

void forget_communicator(NcclComm comm, bool aborts) {
  if (inside_nccl()) return;
  if (nccl_swap_is_on()) {
    const InsideNccl inside;
    nccl_swap_forget(comm, aborts);
  }
  if (!recorder.may_wake()) return;
  within_probe(false, [&](const Token& token) { return nccl_communicators.forget(token, comm), true; });
}

void remember_reduction(NcclComm comm, int op, const void* scalar, int type, int residence) {
  if (inside_nccl() || !(recorder.may_wake() || nccl_swap_is_on()) || !scalar) return;
  within_probe(false, [&](const Token& token) {
    NcclCommunicators::Reduction reduction{comm, op, type, residence == kNcclScalarDevice, 0, scalar, 0};
    if (!reduction.on_device) reduction.value = nccl_scalar(scalar, type);
    const DType* dtype = nccl_dtype(type);
    if (!reduction.on_device && dtype) memcpy(&reduction.bits, scalar, static_cast<size_t>(size_bytes(*dtype)));
    return nccl_communicators.add_reduction(token, reduction), true;
  });
}

void forget_reduction(NcclComm comm, int op) {
  if (inside_nccl() || !(recorder.may_wake() || nccl_swap_is_on())) return;
  within_probe(false, [&](const Token& token) { return nccl_communicators.remove_reduction(token, comm, op), true; });
}

}  // namespace forkpoint
