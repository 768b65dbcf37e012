// What is known of each NCCL communicator of the process. Its identity follows from how it was made: the hash of the
// unique id, or of the parent's identity, the number of the split and the colour; so that the streams of all ranks can
// be joined. Its name means the same in both runs: it is counted in the order in which the process made communicators
// of that size.
//
// Any thread. No lock is held across a call to NCCL; making and destroying communicators takes a short one.
#pragma once

#include <atomic>
#include <cstdint>

#include "lib/digest.h"
#include "probes/guard.h"
#include "probes/names.h"
#include "probes/nccl_library.h"

namespace forkpoint {

// All places of this process in one communicator.
struct NcclFamily {
  Digest id;            // zero: it was made unseen
  int size = 0;         // 0: a split whose size is not known yet
  uint32_t number = 0;  // of this kind (same size, same parent) in the process, from 1
  const Name* name = nullptr;
  const Name* parent = nullptr;   // of a split or a shrink
  const char* made_by = nullptr;  // "split", "shrink"
  uint64_t colour = 0;            // of a split, or a hash of what a shrink leaves out; part of the name where
  bool has_siblings = false;      // this process may have several children of one call
  int places = 0;                 // that this process holds, counted before NCCL is called
  int lowest = 0, highest = 0;    // of them; lowest > highest: none is known
  uint32_t users = 0;             // 0: free
};

struct NcclCommunicator {
  std::atomic<NcclComm> handle{nullptr};
  const NcclLibrary* library = nullptr;
  NcclFamily* family = nullptr;
  int place = 0;                      // -1: not known yet (a split)
  std::atomic<uint32_t> children{0};  // splits and shrinks so far
  std::atomic<bool> waited_in_vain{false};
  std::atomic<const CommunicatorEntry*> entry{nullptr};
};

class NcclCommunicators {
 public:
  // ---- Making. Before the real call: counts the place, so that when a communicator can be used all places of the
  // process are known. place -1: not known before NCCL says. nullptr: no room.
  NcclFamily* enter(const Token& token, const Digest& id, int size, int place);
  NcclFamily* enter_child(const Token& token, NcclCommunicator& parent, const char* made_by, uint64_t what);
  // The real call failed, or made nothing.
  void leave(const Token& token, NcclFamily* family);
  // It succeeded. made is read now, or when NCCL has filled it in.
  void made(const Token& token, NcclComm* made, const NcclLibrary* library, NcclFamily* family, int place);
  void forget(const Token& token, NcclComm handle);

  // ---- Using. nullptr: no room. One that was made unseen is entered without an identity.
  NcclCommunicator* find(const Token& token, NcclComm handle, const NcclLibrary* library);
  // For calls that need no more than the copy that made it: nullptr when it is not known.
  const NcclLibrary* library_of(NcclComm handle) const;
  // What its records are attributed to; made at the first use. nullptr: too many names.
  const CommunicatorEntry* entry(const Token& token, NcclCommunicator& communicator);
  // A family as it is now: other places of the process may be entered, or learn how large it is, at any time.
  NcclFamily snapshot(const NcclFamily& family) const;
  // Tells the recorder the process's rank where nobody else did (all places must have been entered).
  void suggest_rank(const Token& token, const NcclFamily& family);

  // ---- Reductions that the program made.
  struct Reduction {
    NcclComm comm = nullptr;
    int op = 0;
    int type = 0;
    bool on_device = false;
    double value = 0;
    const void* address = nullptr;
    uint64_t bits = 0;  // of the value, as an element of the type
  };
  void add_reduction(const Token& token, const Reduction& reduction);
  void remove_reduction(const Token& token, NcclComm comm, int op);
  bool find_reduction(const Token& token, NcclComm comm, int op, Reduction* found);

  void forget_all_in_child();

 private:
  NcclFamily* enter_locked(const Digest& id, int size, int place, const Name* parent, const char* made_by);
  NcclCommunicator* insert(NcclComm handle, const NcclLibrary* library, NcclFamily* family, int place);
  NcclCommunicator* look_up(NcclComm handle) const;
  NcclCommunicator* resolve_unfilled(const Token& token, NcclComm handle);
  NcclCommunicator* adopt(const Token& token, NcclComm handle, const NcclLibrary* library);
  bool learn_place(NcclCommunicator& communicator);
  const Name* name_of(const Token& token, NcclFamily& family);
};

extern NcclCommunicators nccl_communicators;

// What NCCL has written there. The variable may be gone when its owner gave the communicator up: then false.
bool read_handle(NcclComm* made, NcclComm* handle);
// Of a unique id, or several.
Digest nccl_id(const NcclUniqueId* ids, int count);
// An id for what has none: never the same twice, in any process.
Digest nccl_own_id();

}  // namespace forkpoint
