#include "probes/swap_communicator.h"

#include <algorithm>

#include "probes/os.h"

namespace forkpoint {

using collective::CollectiveLaunch;
using collective::CollectiveParams;
using collective::CollectivePlace;
using collective::CollectiveSpec;

CUresult SwapCommunicator::capture_of(CUstream stream, uint64_t* capture) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  const CUresult result = driver_.cuStreamGetCaptureInfo_(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
  *capture = status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id + 1 : 0;
  return result;
}

// Kernels of one communicator run one after another, on whatever streams, as NCCL's do. In one graph each comes behind
// the one before by an edge. The first of a graph waits for whatever was launched before the graph was, and each tells
// who is launched later: by an event that lies outside, so that it is so for each replay.
CUresult SwapCommunicator::order_before(CUstream stream, uint64_t capture) {
  if (capture == 0)
    return any_launch_ ? driver_.cuStreamWaitEvent_(stream, means_->last, CU_EVENT_WAIT_DEFAULT) : CUDA_SUCCESS;
  if (capture == capture_) return driver_.cuStreamWaitEvent_(stream, means_->captured, CU_EVENT_WAIT_DEFAULT);
  return driver_.cuStreamWaitEvent_(stream, means_->last, CU_EVENT_WAIT_EXTERNAL);
}
CUresult SwapCommunicator::order_behind(CUstream stream, uint64_t capture) {
  any_launch_ = true;
  if (capture == 0) return driver_.cuEventRecord_(means_->last, stream);
  any_capture_ = true;
  const CUresult result = driver_.cuEventRecordWithFlags_(means_->last, stream, CU_EVENT_RECORD_EXTERNAL);
  if (result != CUDA_SUCCESS) return result;
  capture_ = capture;
  return driver_.cuEventRecord_(means_->captured, stream);
}

// What comes before the call's own work on its stream, and behind it.
NcclResult SwapCommunicator::begin_launch(Launch& call) {
  if (ended_.load()) return kNcclSystemError;
  const CollectivePlace place{shape_, static_cast<uint32_t>(place_), reached_,
                              reinterpret_cast<const uint32_t*>(means_->host_on_device), call.in, call.out};
  const InContext here(driver_, context_);
  if (!collective::plan_collective(call.spec, place, &call.planned) || !here.entered()) return kNcclCudaError;
  if (call.planned.grid == 0) return kNcclSuccess;
  const bool ordered =
      capture_of(call.stream, &call.capture) == CUDA_SUCCESS && order_before(call.stream, call.capture) == CUDA_SUCCESS;
  if (!ordered) return kNcclCudaError;
  return by_messages() ? kNcclSuccess : run(call.planned, call.stream);
}
NcclResult SwapCommunicator::end_launch(const Launch& call) {
  const InContext here(driver_, context_);
  return call.planned.grid == 0 || order_behind(call.stream, call.capture) == CUDA_SUCCESS ? kNcclSuccess : kNcclCudaError;
}

NcclResult SwapCommunicator::launch(std::span<Launch> calls) {
  NcclResult result = kNcclSuccess;
  size_t begun = 0;
  for (; begun < calls.size() && result == kNcclSuccess; ++begun)
    result = calls[begun].one->begin_launch(calls[begun]);
  if (result == kNcclSuccess && calls[0].one->by_messages() && calls[0].planned.grid > 0) result = send_and_add(calls);
  // Also where it failed halfway: part of it may be under way.
  for (size_t i = 0; i < begun; ++i) {
    const NcclResult ended = calls[i].one->end_launch(calls[i]);
    if (result == kNcclSuccess) result = ended;
  }
  return result;
}

NcclResult SwapCommunicator::run(CollectiveLaunch& launch, CUstream stream) {
  const CUresult result = driver_.cuLaunchKernel_(means_->kernels->function[launch.kernel], launch.grid, 1, 1,
                                                  launch.block, 1, 1, 0, stream, launch.arguments(), nullptr);
  return result == CUDA_SUCCESS ? kNcclSuccess : kNcclCudaError;
}

// ---- By messages, where devices do not reach each other's memory: the inputs to the owner of each piece, who adds
// them up, and the sums back; the sums of a round travel with the inputs of the next. The staging memory holds what a
// round receives.

// calls: of the members that this thread holds. Their messages leave together: those to each other would wait else.
NcclResult SwapCommunicator::send_and_add(std::span<Launch> calls) {
  for (Launch& one : calls) one.planned.params.chunk_bytes = static_cast<uint32_t>(one.one->message_room());
  const uint64_t rounds = collective::tile_count(calls[0].planned.params);
  const bool sends_back = collective::is_split(calls[0].planned.params);
  for (uint64_t round = 0; round < rounds + (sends_back ? 1 : 0); ++round) {
    const NcclLibrary& library = calls[0].one->library_;
    NcclResult result = library.GroupStart();
    for (const Launch& one : calls) {
      const CollectiveParams& call = one.planned.params;
      if (result == kNcclSuccess && round < rounds) result = one.one->send_inputs(call, round, one.stream);
      if (result == kNcclSuccess && sends_back && round > 0)
        result = one.one->send_sums(call, round - 1, one.stream);
    }
    const NcclResult ended = library.GroupEnd();
    if (result != kNcclSuccess && result != kNcclInProgress) return result;
    for (const Launch& one : calls) {
      if (!has_settled(library, one.one->handle.load(), ended))
        return ended == kNcclInProgress ? kNcclSystemError : ended;
    }
    for (const Launch& one : calls) {
      if (round == rounds || !collective::is_owner(one.planned.params, one.planned.params.rank)) continue;
      const NcclResult added = one.one->add_round(one.spec, one.planned.params, round, one.stream);
      if (added != kNcclSuccess) return added;
    }
  }
  return kNcclSuccess;
}

uint64_t SwapCommunicator::message_room() const {
  constexpr uint64_t kMostMessageBytes = 4 << 20;
  return std::min(kMostMessageBytes, collective::staging_for(shape_.ranks).total_bytes() / shape_.ranks) &
         ~uint64_t{127};
}

NcclResult SwapCommunicator::send_inputs(const CollectiveParams& call, uint64_t round, CUstream stream) {
  const NcclComm comm = handle.load();
  NcclResult result = kNcclSuccess;
  for (int peer = 0; peer < size_ && result == kNcclSuccess; ++peer) {
    const auto number = static_cast<uint32_t>(peer);
    if (peer == place_) continue;
    const collective::Piece theirs = collective::piece_of(call, round, number),
                            own = collective::piece_of(call, round, call.rank);
    if (collective::is_owner(call, number) && theirs.bytes > 0) {
      result = library_.Send(call.in + theirs.in_offset, theirs.bytes, kNcclBytes, peer, comm, stream);
    }
    if (result == kNcclSuccess && collective::is_owner(call, call.rank) && own.bytes > 0) {
      result = library_.Recv(received_from(peer), own.bytes, kNcclBytes, peer, comm, stream);
    }
  }
  return result;
}

NcclResult SwapCommunicator::send_sums(const CollectiveParams& call, uint64_t round, CUstream stream) {
  const NcclComm comm = handle.load();
  NcclResult result = kNcclSuccess;
  const collective::Piece own = collective::piece_of(call, round, call.rank);
  for (int peer = 0; peer < size_ && result == kNcclSuccess; ++peer) {
    const collective::Piece theirs = collective::piece_of(call, round, static_cast<uint32_t>(peer));
    if (peer == place_) continue;
    if (own.bytes > 0) result = library_.Send(call.out + own.out_offset, own.bytes, kNcclBytes, peer, comm, stream);
    if (result == kNcclSuccess && theirs.bytes > 0) {
      result = library_.Recv(call.out + theirs.out_offset, theirs.bytes, kNcclBytes, peer, comm, stream);
    }
  }
  return result;
}

NcclResult SwapCommunicator::add_round(CollectiveSpec spec, const CollectiveParams& call, uint64_t round,
                                       CUstream stream) {
  const collective::Piece own = collective::piece_of(call, round, call.rank);
  if (own.bytes == 0) return kNcclSuccess;
  const void* inputs[collective::kMostRanks] = {};
  for (int i = 0; i < size_; ++i) inputs[i] = i == place_ ? call.in + own.in_offset : received_from(i);
  spec.count = own.bytes / static_cast<uint64_t>(size_bytes(spec.dtype));
  CollectiveLaunch launch;
  constexpr uint32_t kBlocks = 64;
  const InContext here(driver_, context_);
  if (!collective::plan_local_sum(spec, inputs, shape_.ranks, call.out + own.out_offset, kBlocks, &launch) ||
      !here.entered())
    return kNcclCudaError;
  return run(launch, stream);
}

}  // namespace forkpoint
