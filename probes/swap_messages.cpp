#include "probes/swap_messages.h"

#include <algorithm>

namespace forkpoint {
namespace {

using collective::CollectiveLaunch;
using collective::CollectiveParams;
using collective::CollectiveSpec;
using collective::Piece;

// Bytes of a round and owner.
uint64_t message_room(const SwapMessages& part) {
  constexpr uint64_t kMostMessageBytes = 4 << 20;
  return std::min(kMostMessageBytes, collective::staging_for(part.ranks).total_bytes() / part.ranks) & ~uint64_t{127};
}

char* received_from(const SwapMessages& part, int peer) {
  return part.staging + static_cast<uint64_t>(peer) * message_room(part);
}

NcclResult send_inputs(const SwapMessages& part, uint64_t round) {
  const CollectiveParams& call = part.params;
  NcclResult result = kNcclSuccess;
  for (int peer = 0; peer < static_cast<int>(part.ranks) && result == kNcclSuccess; ++peer) {
    const auto number = static_cast<uint32_t>(peer);
    if (peer == part.place) continue;
    const Piece theirs = collective::piece_of(call, round, number), own = collective::piece_of(call, round, call.rank);
    if (collective::is_owner(call, number) && theirs.bytes > 0)
      result = part.library.Send(call.in + theirs.in_offset, theirs.bytes, kNcclBytes, peer, part.comm, part.stream);
    if (result == kNcclSuccess && collective::is_owner(call, call.rank) && own.bytes > 0)
      result = part.library.Recv(received_from(part, peer), own.bytes, kNcclBytes, peer, part.comm, part.stream);
  }
  return result;
}

NcclResult send_sums(const SwapMessages& part, uint64_t round) {
  const CollectiveParams& call = part.params;
  NcclResult result = kNcclSuccess;
  const Piece own = collective::piece_of(call, round, call.rank);
  for (int peer = 0; peer < static_cast<int>(part.ranks) && result == kNcclSuccess; ++peer) {
    const Piece theirs = collective::piece_of(call, round, static_cast<uint32_t>(peer));
    if (peer == part.place) continue;
    if (own.bytes > 0)
      result = part.library.Send(call.out + own.out_offset, own.bytes, kNcclBytes, peer, part.comm, part.stream);
    if (result == kNcclSuccess && theirs.bytes > 0)
      result = part.library.Recv(call.out + theirs.out_offset, theirs.bytes, kNcclBytes, peer, part.comm, part.stream);
  }
  return result;
}

NcclResult add_round(const SwapMessages& part, uint64_t round) {
  const CollectiveParams& call = part.params;
  const Piece own = collective::piece_of(call, round, call.rank);
  if (own.bytes == 0) return kNcclSuccess;
  const void* inputs[collective::kMostRanks] = {};
  for (int i = 0; i < static_cast<int>(part.ranks); ++i)
    inputs[i] = i == part.place ? call.in + own.in_offset : received_from(part, i);
  CollectiveSpec spec = part.spec;
  spec.count = own.bytes / static_cast<uint64_t>(size_bytes(spec.dtype));
  CollectiveLaunch launch;
  constexpr uint32_t kBlocks = 64;
  const InContext here(part.driver, part.context);
  if (!collective::plan_local_sum(spec, inputs, part.ranks, call.out + own.out_offset, kBlocks, &launch) ||
      !here.entered())
    return kNcclCudaError;
  return part.kernels->run(part.driver, launch, part.stream) ? kNcclSuccess : kNcclCudaError;
}

}  // namespace

NcclResult add_by_messages(std::span<SwapMessages> parts) {
  for (SwapMessages& one : parts) one.params.chunk_bytes = static_cast<uint32_t>(message_room(one));
  const uint64_t rounds = collective::tile_count(parts[0].params);
  const bool sends_back = collective::is_split(parts[0].params);
  for (uint64_t round = 0; round < rounds + (sends_back ? 1 : 0); ++round) {
    const NcclLibrary& library = parts[0].library;
    NcclResult result = library.GroupStart();
    for (const SwapMessages& one : parts) {
      if (result == kNcclSuccess && round < rounds) result = send_inputs(one, round);
      if (result == kNcclSuccess && sends_back && round > 0) result = send_sums(one, round - 1);
    }
    const NcclResult ended = library.GroupEnd();
    if (result != kNcclSuccess && result != kNcclInProgress) return result;
    for (const SwapMessages& one : parts) {
      if (!has_settled(library, one.comm, ended)) return ended == kNcclInProgress ? kNcclSystemError : ended;
    }
    for (const SwapMessages& one : parts) {
      if (round == rounds || !collective::is_owner(one.params, one.params.rank)) continue;
      const NcclResult added = add_round(one, round);
      if (added != kNcclSuccess) return added;
    }
  }
  return kNcclSuccess;
}

NcclResult connect_by_messages(const SwapMessages& part, const char* to, char* from, uint64_t stride) {
  constexpr size_t kBytes = 16;
  NcclResult result = part.library.GroupStart();
  for (int peer = 0; peer < static_cast<int>(part.ranks); ++peer) {
    if (peer == part.place) continue;
    if (result == kNcclSuccess) result = part.library.Send(to, kBytes, kNcclBytes, peer, part.comm, part.stream);
    if (result == kNcclSuccess)
      result = part.library.Recv(from + static_cast<uint64_t>(peer) * stride, kBytes, kNcclBytes, peer, part.comm,
                                 part.stream);
  }
  const NcclResult ended = part.library.GroupEnd();
  return result == kNcclSuccess ? ended : result;
}

}  // namespace forkpoint
