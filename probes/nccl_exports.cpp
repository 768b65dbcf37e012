// NCCL's symbols, in front of the real ones. In the shared library only. Nothing is done here but to say what each call
// is.
#include "probes/nccl_calls.h"

namespace {

using namespace forkpoint;

NcclCall reducing(const char* op, int reduction, NcclComm comm, void* stream) {
  NcclCall call;
  call.op = op, call.reduction = reduction, call.comm = comm, call.stream = stream;
  return call;
}
NcclCall moving(const char* op, NcclComm comm, void* stream) { return reducing(op, -1, comm, stream); }

void give(NcclCall* call, const void* in, NcclBuffer::Parts in_parts, const void* out, NcclBuffer::Parts out_parts,
          size_t count, int type) {
  call->input = {in, in_parts};
  call->output = {out, out_parts};
  call->count = count;
  call->type = type;
}

}  // namespace

#define FORKPOINT_EXPORT extern "C" __attribute__((visibility("default"))) NcclResult
// Defines `nccl`, the copy that serves this call of `name`.
#define FORKPOINT_FIND(name, comm)                                       \
  const NcclLibrary* nccl = nccl_for(comm, __builtin_return_address(0)); \
  if (!nccl || !nccl->name) return nccl_not_there("nccl" #name);

FORKPOINT_EXPORT ncclAllReduce(const void* in, void* out, size_t count, int type, int op, NcclComm comm, void* stream) {
  FORKPOINT_FIND(AllReduce, comm)
  NcclCall call = reducing("all_reduce", op, comm, stream);
  call.swap = NcclCall::Swap::all_reduce;
  give(&call, in, NcclBuffer::one, out, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->AllReduce(in, out, count, type, op, comm, stream); });
}

FORKPOINT_EXPORT ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                                   void* stream) {
  FORKPOINT_FIND(ReduceScatter, comm)
  NcclCall call = reducing("reduce_scatter", op, comm, stream);
  call.swap = NcclCall::Swap::reduce_scatter;
  give(&call, in, NcclBuffer::each, out, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->ReduceScatter(in, out, count, type, op, comm, stream); });
}

FORKPOINT_EXPORT ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, NcclComm comm,
                            void* stream) {
  FORKPOINT_FIND(Reduce, comm)
  NcclCall call = reducing("reduce", op, comm, stream);
  call.swap = NcclCall::Swap::reduce;
  call.root = root, call.output_at_root = true;
  give(&call, in, NcclBuffer::one, out, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Reduce(in, out, count, type, op, root, comm, stream); });
}

FORKPOINT_EXPORT ncclBroadcast(const void* in, void* out, size_t count, int type, int root, NcclComm comm,
                               void* stream) {
  FORKPOINT_FIND(Broadcast, comm)
  NcclCall call = moving("broadcast", comm, stream);
  call.root = root, call.input_at_root = true;
  give(&call, in, NcclBuffer::one, out, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Broadcast(in, out, count, type, root, comm, stream); });
}

FORKPOINT_EXPORT ncclBcast(void* data, size_t count, int type, int root, NcclComm comm, void* stream) {
  FORKPOINT_FIND(Bcast, comm)
  NcclCall call = moving("broadcast", comm, stream);
  call.root = root, call.input_at_root = true;
  give(&call, data, NcclBuffer::one, data, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Bcast(data, count, type, root, comm, stream); });
}

FORKPOINT_EXPORT ncclAllGather(const void* in, void* out, size_t count, int type, NcclComm comm, void* stream) {
  FORKPOINT_FIND(AllGather, comm)
  NcclCall call = moving("all_gather", comm, stream);
  give(&call, in, NcclBuffer::one, out, NcclBuffer::each, count, type);
  return call_collective(*nccl, call, [&] { return nccl->AllGather(in, out, count, type, comm, stream); });
}

FORKPOINT_EXPORT ncclAlltoAll(const void* in, void* out, size_t count, int type, NcclComm comm, void* stream) {
  FORKPOINT_FIND(AlltoAll, comm)
  NcclCall call = moving("all_to_all", comm, stream);
  give(&call, in, NcclBuffer::each, out, NcclBuffer::each, count, type);
  return call_collective(*nccl, call, [&] { return nccl->AlltoAll(in, out, count, type, comm, stream); });
}

FORKPOINT_EXPORT ncclGather(const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream) {
  FORKPOINT_FIND(Gather, comm)
  NcclCall call = moving("gather", comm, stream);
  call.root = root, call.output_at_root = true;
  give(&call, in, NcclBuffer::one, out, NcclBuffer::each, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Gather(in, out, count, type, root, comm, stream); });
}

FORKPOINT_EXPORT ncclScatter(const void* in, void* out, size_t count, int type, int root, NcclComm comm, void* stream) {
  FORKPOINT_FIND(Scatter, comm)
  NcclCall call = moving("scatter", comm, stream);
  call.root = root, call.input_at_root = true;
  give(&call, in, NcclBuffer::each, out, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Scatter(in, out, count, type, root, comm, stream); });
}

FORKPOINT_EXPORT ncclSend(const void* in, size_t count, int type, int peer, NcclComm comm, void* stream) {
  FORKPOINT_FIND(Send, comm)
  NcclCall call = moving("send", comm, stream);
  call.peer = peer;
  give(&call, in, NcclBuffer::one, nullptr, NcclBuffer::none, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Send(in, count, type, peer, comm, stream); });
}

FORKPOINT_EXPORT ncclRecv(void* out, size_t count, int type, int peer, NcclComm comm, void* stream) {
  FORKPOINT_FIND(Recv, comm)
  NcclCall call = moving("recv", comm, stream);
  call.peer = peer;
  give(&call, nullptr, NcclBuffer::none, out, NcclBuffer::one, count, type);
  return call_collective(*nccl, call, [&] { return nccl->Recv(out, count, type, peer, comm, stream); });
}

FORKPOINT_EXPORT ncclGroupStart() {
  FORKPOINT_FIND(GroupStart, nullptr)
  return begin_group([&] { return nccl->GroupStart(); });
}

FORKPOINT_EXPORT ncclGroupEnd() {
  FORKPOINT_FIND(GroupEnd, nullptr)
  return end_group([&] { return nccl->GroupEnd(); }, true);
}

FORKPOINT_EXPORT ncclGroupSimulateEnd(void* info) {
  FORKPOINT_FIND(GroupSimulateEnd, nullptr)
  return end_group([&] { return nccl->GroupSimulateEnd(info); }, false);
}

FORKPOINT_EXPORT ncclCommInitRank(NcclComm* comm, int size, NcclUniqueId id, int rank) {
  FORKPOINT_FIND(CommInitRank, nullptr)
  return make_ranks(*nccl, {comm, &id, 1, size, rank}, [&] { return nccl->CommInitRank(comm, size, id, rank); });
}

FORKPOINT_EXPORT ncclCommInitRankConfig(NcclComm* comm, int size, NcclUniqueId id, int rank, void* config) {
  FORKPOINT_FIND(CommInitRankConfig, nullptr)
  return make_ranks(*nccl, {comm, &id, 1, size, rank, config},
                    [&] { return nccl->CommInitRankConfig(comm, size, id, rank, config); });
}

FORKPOINT_EXPORT ncclCommInitRankScalable(NcclComm* comm, int size, int rank, int ids, NcclUniqueId* id, void* config) {
  FORKPOINT_FIND(CommInitRankScalable, nullptr)
  return make_ranks(*nccl, {comm, id, ids, size, rank, config},
                    [&] { return nccl->CommInitRankScalable(comm, size, rank, ids, id, config); });
}

FORKPOINT_EXPORT ncclCommInitAll(NcclComm* comms, int size, const int* devices) {
  FORKPOINT_FIND(CommInitAll, nullptr)
  return make_all(*nccl, comms, size, [&] { return nccl->CommInitAll(comms, size, devices); });
}

FORKPOINT_EXPORT ncclCommSplit(NcclComm comm, int color, int key, NcclComm* made, void* config) {
  FORKPOINT_FIND(CommSplit, comm)
  return split(*nccl, {comm, color, made, config}, [&] { return nccl->CommSplit(comm, color, key, made, config); });
}

FORKPOINT_EXPORT ncclCommShrink(NcclComm comm, int* excluded, int count, NcclComm* made, void* config, int flags) {
  FORKPOINT_FIND(CommShrink, comm)
  return shrink(*nccl, {comm, excluded, count, made, config},
                [&] { return nccl->CommShrink(comm, excluded, count, made, config, flags); });
}

FORKPOINT_EXPORT ncclCommGetAsyncError(NcclComm comm, NcclResult* state) {
  FORKPOINT_FIND(CommGetAsyncError, comm)
  return ask_state(comm, state, [&] { return nccl->CommGetAsyncError(comm, state); });
}

FORKPOINT_EXPORT ncclCommFinalize(NcclComm comm) {
  FORKPOINT_FIND(CommFinalize, comm)
  return call_nccl([&] { return nccl->CommFinalize(comm); });
}

FORKPOINT_EXPORT ncclCommDestroy(NcclComm comm) {
  FORKPOINT_FIND(CommDestroy, comm)
  forget_communicator(comm, false);
  return call_nccl([&] { return nccl->CommDestroy(comm); });
}

FORKPOINT_EXPORT ncclCommAbort(NcclComm comm) {
  FORKPOINT_FIND(CommAbort, comm)
  forget_communicator(comm, true);
  return call_nccl([&] { return nccl->CommAbort(comm); });
}

FORKPOINT_EXPORT ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, NcclComm comm) {
  FORKPOINT_FIND(RedOpCreatePreMulSum, comm)
  const NcclResult result = call_nccl([&] { return nccl->RedOpCreatePreMulSum(op, scalar, type, residence, comm); });
  if (result == kNcclSuccess && op) remember_reduction(comm, *op, scalar, type, residence);
  return result;
}

FORKPOINT_EXPORT ncclRedOpDestroy(int op, NcclComm comm) {
  FORKPOINT_FIND(RedOpDestroy, comm)
  forget_reduction(comm, op);
  return call_nccl([&] { return nccl->RedOpDestroy(op, comm); });
}
