#include "probes/nccl_communicators.h"

#include <sched.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "lib/digest_mix.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint32_t kCommunicators = 4096;  // a power of two
constexpr uint32_t kFamilies = 1024;
constexpr uint32_t kSizes = 256;
constexpr uint32_t kUnfilled = 64;
NcclComm const kForgotten = reinterpret_cast<NcclComm>(1);

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

// Where NCCL will write a communicator that it goes on making after the call has returned.
struct Unfilled {
  NcclComm* made = nullptr;
  const NcclLibrary* library = nullptr;
  NcclFamily* family = nullptr;
  int place = -1;
};

NcclCommunicator communicators[kCommunicators];
NcclFamily families[kFamilies];
struct {
  int size;
  bool seen;
  uint32_t count;
} sizes[kSizes];
// Grows: a reduction that is not known here is a call that fails.
struct ReductionBlock {
  NcclCommunicators::Reduction items[256];  // without a communicator: free
  ReductionBlock* next = nullptr;
};
ReductionBlock reductions;

NcclCommunicators::Reduction* find_reduction_of(NcclComm comm, int op) {
  for (ReductionBlock* block = &reductions; block; block = block->next) {
    for (NcclCommunicators::Reduction& one : block->items) {
      if (one.comm == comm && (!comm || one.op == op)) return &one;
    }
  }
  return nullptr;
}
// nullptr: no memory.
NcclCommunicators::Reduction* free_reduction() {
  if (NcclCommunicators::Reduction* free = find_reduction_of(nullptr, 0)) return free;
  auto* more = new (std::nothrow) ReductionBlock;
  if (!more) return nullptr;
  more->next = reductions.next;
  reductions.next = more;
  return &more->items[0];
}
Unfilled unfilled[kUnfilled];
constinit std::atomic<uint32_t> unfilled_count{0};
constinit std::atomic<bool> any{false};  // something was ever entered

Digest mixed(const Digest& seed, const void* data, size_t size_bytes) {
  const Digest plain = digest_only(data, size_bytes);
  const Digest out{mix64(plain.a ^ mix64(seed.a)), mix64(plain.b + mix64(~seed.b) + size_bytes)};
  return out == Digest{} ? Digest{1, 1} : out;
}

// How many communicators of that size came before, and this one.
uint32_t next_number(int size, bool seen) {
  for (auto& known : sizes) {
    if (known.count == 0) known = {size, seen, 0};
    if (known.size == size && known.seen == seen) return ++known.count;
  }
  return 0;
}

uint32_t cell_of(NcclComm handle) {
  return static_cast<uint32_t>(mix64(reinterpret_cast<uintptr_t>(handle))) & (kCommunicators - 1);
}

}  // namespace

bool read_handle(NcclComm* made, NcclComm* handle) {
  const iovec to = {handle, sizeof(*handle)}, from = {made, sizeof(*made)};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == static_cast<ssize_t>(sizeof(*handle));
}

constinit NcclCommunicators nccl_communicators;

Digest nccl_id(const NcclUniqueId* ids, int count) {
  return mixed({1, 1}, ids, sizeof(NcclUniqueId) * static_cast<size_t>(std::max(count, 0)));
}

Digest nccl_own_id() {
  static constinit std::atomic<uint64_t> count{0};
  uint64_t parts[5] = {static_cast<uint64_t>(getpid()), static_cast<uint64_t>(now_ns()), ++count, 0, 0};
  if (getrandom(&parts[3], 2 * sizeof(parts[3]), GRND_NONBLOCK) < 0) parts[3] = reinterpret_cast<uintptr_t>(&parts);
  return mixed({2, 2}, parts, sizeof(parts));
}

// ---- Making

NcclFamily* NcclCommunicators::enter_locked(const Digest& id, int size, int place, const Name* parent,
                                            const char* made_by) {
  NcclFamily* family = nullptr;
  for (NcclFamily& known : families) {
    if (known.users > 0 && !(id == Digest{}) && known.id == id) family = &known;
  }
  for (NcclFamily& free : families) {
    if (family || free.users > 0) continue;
    family = &free;
    *family = NcclFamily{};
    family->id = id;
    family->size = size;
    family->lowest = INT32_MAX, family->highest = -1;
    family->parent = parent;
    family->made_by = made_by;
    if (!parent) family->number = next_number(size, !(id == Digest{}));
  }
  if (!family) return nullptr;
  ++family->users;
  ++family->places;
  if (place >= 0) {
    family->lowest = std::min(family->lowest, place);
    family->highest = std::max(family->highest, place);
  }
  return family;
}

NcclFamily* NcclCommunicators::enter(const Token&, const Digest& id, int size, int place) {
  const Locked lock;
  any.store(true, std::memory_order_relaxed);
  return enter_locked(id, size, place, nullptr, nullptr);
}

NcclFamily* NcclCommunicators::enter_child(const Token& token, NcclCommunicator& parent, const char* made_by,
                                           uint64_t what) {
  const uint32_t number = parent.children.fetch_add(1) + 1;
  const Name* parent_name = name_of(token, *parent.family);
  Digest id;
  if (!(parent.family->id == Digest{})) {
    const uint64_t parts[] = {number, what, static_cast<uint64_t>(made_by[1])};
    id = mixed(parent.family->id, parts, sizeof(parts));
  }
  const Locked lock;
  NcclFamily* family = enter_locked(id, 0, -1, parent_name, made_by);
  if (family) family->number = number;
  // A process with several places in the parent may get several children of one split, in any order.
  if (family && parent.family->places > 1) family->colour = what, family->has_siblings = true;
  return family;
}

void NcclCommunicators::leave(const Token&, NcclFamily* family) {
  if (!family) return;
  const Locked lock;
  --family->users;
  --family->places;
}

void NcclCommunicators::made(const Token&, NcclComm* made, const NcclLibrary* library, NcclFamily* family, int place) {
  if (!made || !family) return;
  const NcclComm handle = __atomic_load_n(made, __ATOMIC_ACQUIRE);  // a thread of NCCL's may be filling it in
  const Locked lock;
  if (handle) {
    insert(handle, library, family, place);
    return;
  }
  for (Unfilled& slot : unfilled) {
    if (slot.made) continue;
    slot = {made, library, family, place};
    unfilled_count.fetch_add(1);
    return;
  }
}

// Under the lock.
NcclCommunicator* NcclCommunicators::insert(NcclComm handle, const NcclLibrary* library, NcclFamily* family,
                                            int place) {
  NcclCommunicator* free = nullptr;
  for (uint32_t i = 0; i < kCommunicators; ++i) {
    NcclCommunicator& cell = communicators[(cell_of(handle) + i) & (kCommunicators - 1)];
    const NcclComm there = cell.handle.load(std::memory_order_relaxed);
    if (there == handle) {  // destroyed where we did not see it, and its address came round again
      --cell.family->users;
      free = &cell;
      break;
    }
    if (!free && (!there || there == kForgotten)) free = &cell;
    if (!there) break;
  }
  if (!free) return nullptr;
  free->library = library;
  free->family = family;
  free->place = place;
  free->children.store(0);
  free->waited_in_vain.store(false);
  free->entry.store(nullptr);
  free->handle.store(handle, std::memory_order_release);
  return free;
}

void NcclCommunicators::forget(const Token&, NcclComm handle) {
  if (!handle) return;
  const Locked lock;
  NcclCommunicator* known = look_up(handle);
  if (!known) return;
  known->handle.store(kForgotten, std::memory_order_release);
  --known->family->users;
  for (ReductionBlock* block = &reductions; block; block = block->next) {
    for (Reduction& one : block->items) {
      if (one.comm == handle) one.comm = nullptr;
    }
  }
}

// ---- Using

NcclCommunicator* NcclCommunicators::look_up(NcclComm handle) const {
  for (uint32_t i = 0; handle && i < kCommunicators; ++i) {
    NcclCommunicator& cell = communicators[(cell_of(handle) + i) & (kCommunicators - 1)];
    const NcclComm there = cell.handle.load(std::memory_order_acquire);
    if (there == handle) return &cell;
    if (!there) return nullptr;
  }
  return nullptr;
}

const NcclLibrary* NcclCommunicators::library_of(NcclComm handle) const {
  const NcclCommunicator* known = look_up(handle);
  return known ? known->library : nullptr;
}

NcclCommunicator* NcclCommunicators::resolve_unfilled(const Token&, NcclComm handle) {
  if (unfilled_count.load(std::memory_order_acquire) == 0) return nullptr;
  const Locked lock;
  for (Unfilled& slot : unfilled) {
    NcclComm there = nullptr;
    if (!slot.made || !read_handle(slot.made, &there) || there != handle) continue;
    NcclCommunicator* known = insert(handle, slot.library, slot.family, slot.place);
    slot = {};
    unfilled_count.fetch_sub(1);
    return known;
  }
  return nullptr;
}

NcclCommunicator* NcclCommunicators::adopt(const Token&, NcclComm handle, const NcclLibrary* library) {
  int size = 0, place = -1;
  if (!library || !library->CommCount || library->CommCount(handle, &size) != kNcclSuccess) return nullptr;
  if (!library->CommUserRank || library->CommUserRank(handle, &place) != kNcclSuccess) return nullptr;
  const Locked lock;
  if (NcclCommunicator* known = look_up(handle)) return known;
  any.store(true, std::memory_order_relaxed);
  NcclFamily* family = enter_locked({}, size, place, nullptr, nullptr);
  return family ? insert(handle, library, family, place) : nullptr;
}

NcclCommunicator* NcclCommunicators::find(const Token& token, NcclComm handle, const NcclLibrary* library) {
  if (NcclCommunicator* known = look_up(handle)) return known;
  if (NcclCommunicator* known = resolve_unfilled(token, handle)) return known;
  return adopt(token, handle, library);
}

bool NcclCommunicators::learn_place(NcclCommunicator& communicator) {
  const NcclComm handle = communicator.handle.load();
  int size = 0, place = -1;
  const NcclLibrary& nccl = *communicator.library;
  if (!nccl.CommCount || nccl.CommCount(handle, &size) != kNcclSuccess) return false;
  if (!nccl.CommUserRank || nccl.CommUserRank(handle, &place) != kNcclSuccess) return false;
  const Locked lock;
  communicator.family->size = size;
  communicator.family->lowest = std::min(communicator.family->lowest, place);
  communicator.family->highest = std::max(communicator.family->highest, place);
  communicator.place = place;
  return true;
}

NcclFamily NcclCommunicators::snapshot(const NcclFamily& family) const {
  const Locked lock;
  return family;
}

const Name* NcclCommunicators::name_of(const Token& token, NcclFamily& shared) {
  if (const Name* known = __atomic_load_n(&shared.name, __ATOMIC_ACQUIRE)) return known;
  const NcclFamily family = snapshot(shared);
  suggest_rank(token, family);
  char text[256];
  int world_size = 1;
  const int rank = std::max(recorder.known_rank(&world_size), 0);
  const bool whole_world = family.size == world_size && family.places == 1 && family.lowest == rank;
  if (family.has_siblings) {
    const auto colour = static_cast<unsigned long long>(family.colour);
    snprintf(text, sizeof(text), "%s %u (%llu) of %s", family.made_by, family.number, colour, family.parent->text);
  } else if (family.parent) {
    snprintf(text, sizeof(text), "%s %u of %s", family.made_by, family.number, family.parent->text);
  } else if (family.id == Digest{}) {
    snprintf(text, sizeof(text), "unseen %u of %d ranks", family.number, family.size);
  } else if (!whole_world) {
    snprintf(text, sizeof(text), "nccl %u of %d ranks", family.number, family.size);
  } else if (family.number == 1) {
    snprintf(text, sizeof(text), "world");
  } else {
    snprintf(text, sizeof(text), "world %u", family.number);
  }
  const Name* made = recorder.names().create() ? recorder.names().name(text) : nullptr;
  const Locked lock;  // else a snapshot might see half of it
  __atomic_store_n(&shared.name, made, __ATOMIC_RELEASE);  // two threads that make it make the same one
  return made;
}

const CommunicatorEntry* NcclCommunicators::entry(const Token& token, NcclCommunicator& communicator) {
  if (const CommunicatorEntry* known = communicator.entry.load(std::memory_order_acquire)) return known;
  if (communicator.place < 0 && !learn_place(communicator)) return nullptr;
  const Name* name = name_of(token, *communicator.family);
  const NcclFamily family = snapshot(*communicator.family);
  int world_size = 1;
  recorder.known_rank(&world_size);
  const bool has_all_ranks = family.size == world_size && family.places == 1;
  CommunicatorKey key{name, nullptr, 0, family.id, communicator.place, family.size};
  auto* members = static_cast<int32_t*>(malloc(sizeof(int32_t) * static_cast<size_t>(std::max(family.size, 1))));
  if (!name || !members) return free(members), nullptr;
  // In the order of the places only if each rank has that of its number; who reads it sorts.
  for (int i = 0; i < family.size; ++i) members[i] = i;
  key.members = members;
  key.member_count = has_all_ranks ? family.size : 0;
  const CommunicatorEntry* made = recorder.names().communicator(key);
  free(members);
  communicator.entry.store(made, std::memory_order_release);
  return made;
}

void NcclCommunicators::suggest_rank(const Token& token, const NcclFamily& shared) {
  const NcclFamily family = snapshot(shared);
  if (family.id == Digest{} || family.parent || family.size < 2 || family.places == family.size) return;
  const int places = family.places;
  const bool in_blocks =
      family.highest - family.lowest + 1 == places && family.lowest % places == 0 && family.size % places == 0;
  // Several GPUs a process: the process is the rank.
  if (in_blocks) return recorder.suggest_rank(token, family.lowest / places, family.size / places);
  recorder.suggest_rank(token, family.lowest, family.size);
}

// ---- Reductions

void NcclCommunicators::add_reduction(const Token&, const Reduction& reduction) {
  if (!reduction.comm) return;
  const Locked lock;
  Reduction* place = find_reduction_of(reduction.comm, reduction.op);
  if (!place) place = free_reduction();
  if (place) *place = reduction;
}

void NcclCommunicators::remove_reduction(const Token&, NcclComm comm, int op) {
  if (!comm) return;
  const Locked lock;
  if (Reduction* known = find_reduction_of(comm, op)) known->comm = nullptr;
}

bool NcclCommunicators::find_reduction(const Token&, NcclComm comm, int op, Reduction* found) {
  if (!comm) return false;
  const Locked lock;
  const Reduction* known = find_reduction_of(comm, op);
  return known ? (*found = *known, true) : false;
}

void NcclCommunicators::forget_all_in_child() {
  if (!any.exchange(false)) return;
  locked.clear();
  for (NcclCommunicator& cell : communicators) cell.handle.store(nullptr, std::memory_order_relaxed);
  for (NcclFamily& family : families) family = NcclFamily{};
  for (auto& known : sizes) known = {0, false, 0};
  for (Unfilled& slot : unfilled) slot = {};
  for (ReductionBlock* block = &reductions; block; block = block->next) {
    for (Reduction& one : block->items) one.comm = nullptr;
  }
  unfilled_count.store(0);
}

}  // namespace forkpoint
