// Records of NCCL's calls: what a call is given, before it is made; what it gives, once it is enqueued (in a group:
// once the outermost ncclGroupEnd has returned). All digests are enqueued on the call's own stream. Any thread.
#pragma once

#include <cstddef>

#include "probes/nccl_communicators.h"
#include "probes/scopes.h"

namespace forkpoint {

// One side of a call. parts: how many members' shares of `count` elements it holds; 0: this member has none.
struct NcclBuffer {
  enum Parts : uint8_t { none, one, each };
  const void* data = nullptr;
  Parts parts = none;
};

struct NcclCall {
  const char* op = "";  // "all_reduce"
  NcclBuffer input, output;
  size_t count = 0;
  int type = 0;
  int reduction = -1;  // -1: it has none; likewise below
  int root = -1;
  int peer = -1;
  // What the deterministic kernels would do in its stead (nccl_swap.h); none: nothing.
  enum class Swap : uint8_t { none, all_reduce, reduce_scatter, reduce } swap = Swap::none;
  // Which sides exist at the root only.
  bool input_at_root = false, output_at_root = false;
  NcclComm comm = nullptr;
  void* stream = nullptr;
};

// An output that is still to be recorded.
struct NcclOutput {
  ScopeFrame frame;
  const Name* tensor = nullptr;
  NcclCommunicator* communicator = nullptr;
  NcclComm comm = nullptr;
  const void* data = nullptr;  // of an empty one it may be nullptr
  void* stream = nullptr;
  int64_t shape[2] = {0, 0};
  int dims = 0;
  DType dtype = DType::raw;
};

// Before the real call. true: *output is to be handed to finish_nccl_call. Enters the probe itself.
bool record_nccl_inputs(const NcclCall& call, const NcclLibrary* library, NcclOutput* output);
// After it. Waits for a non-blocking communicator, at most 5 s.
void finish_nccl_call(NcclResult result, const NcclOutput& output);

// ---- Groups of the calling thread. The depth is followed in a dormant process too: it may wake inside a group.
void nccl_group_begun();
// Around the real call that ends one: the first tells whether it is the outermost. launched: it enqueues what is in it.
bool nccl_group_ends();
void finish_nccl_group(NcclResult result, bool launched);
bool inside_nccl_group();
// A communicator whose making ends with the group.
void made_in_nccl_group(NcclComm* made, const NcclLibrary* library, NcclFamily* family, int place);

void forget_nccl_groups_in_child();

// A reduction's factor in the host's memory, of an NCCL data type.
double nccl_scalar(const void* data, int type);

}  // namespace forkpoint
