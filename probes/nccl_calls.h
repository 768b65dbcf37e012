// What the exported symbols (nccl_exports.cpp) hand over: the call as the probe sees it, and how the real one is made.
// Between nccl_exports.cpp and nccl_hooks.cpp.
#pragma once

#include "probes/nccl_records.h"

namespace forkpoint {

// The real call with the caller's arguments. Refers to a function object that outlives it.
class NcclReal {
 public:
  template <typename Call>
  NcclReal(const Call& call)
      : object_(&call), call_([](const void* object) { return (*static_cast<const Call*>(object))(); }) {}
  NcclResult operator()() const { return call_(object_); }

 private:
  const void* object_;
  NcclResult (*call_)(const void*);
};

struct NcclMaking {
  NcclComm* made = nullptr;
  const NcclUniqueId* ids = nullptr;
  int id_count = 0;
  int size = 0;
  int place = 0;
  const void* config = nullptr;  // ncclConfig_t; likewise below
};
struct NcclSplit {
  NcclComm parent = nullptr;
  int color = 0;
  NcclComm* made = nullptr;
  const void* config = nullptr;
};
struct NcclShrink {
  NcclComm parent = nullptr;
  const int* excluded = nullptr;
  int count = 0;
  NcclComm* made = nullptr;
  const void* config = nullptr;
};

// The copy that made the communicator, else the caller's. nullptr: there is none.
const NcclLibrary* nccl_for(NcclComm comm, const void* caller);

NcclResult call_nccl(NcclReal real);
NcclResult call_collective(const NcclLibrary& library, const NcclCall& call, NcclReal real);
NcclResult begin_group(NcclReal real);
// launches: what is in the group is enqueued when the outermost ends.
NcclResult end_group(NcclReal real, bool launches);
NcclResult make_ranks(const NcclLibrary& library, const NcclMaking& call, NcclReal real);
NcclResult make_all(const NcclLibrary& library, NcclComm* made, int size, NcclReal real);
NcclResult split(const NcclLibrary& library, const NcclSplit& call, NcclReal real);
NcclResult shrink(const NcclLibrary& library, const NcclShrink& call, NcclReal real);
// Is it ready, as the program asks?
NcclResult ask_state(NcclComm comm, NcclResult* state, NcclReal real);
// Before it is destroyed: its address may come round again at once. aborts: it goes with whatever it was doing.
void forget_communicator(NcclComm comm, bool aborts);
void remember_reduction(NcclComm comm, int op, const void* scalar, int type, int residence);
void forget_reduction(NcclComm comm, int op);

}  // namespace forkpoint
