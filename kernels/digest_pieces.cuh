// Several runs of raw bytes, each by adjacent blocks; see digest_pieces.h.
#pragma once

#include <cstdint>

#include "kernels/digest_flat.cuh"
#include "kernels/digest_pieces.h"

namespace forkpoint::device {

// The last whose first block is not behind `block`. The same for all threads of a block. Comparisons that do not depend
// on each other: each step of a search would wait for the one before.
template <typename Pieces>
__device__ int piece_of(const Pieces& pieces, uint32_t block) {
  constexpr int kPlaces = Pieces::kPlaces, kGroup = kPlaces < 16 ? kPlaces : 16;
  int group = 0, place = 0;
#pragma unroll
  for (int i = kGroup; i < kPlaces; i += kGroup) group += pieces.first_block[i] <= block ? kGroup : 0;
#pragma unroll
  for (int i = 1; i < kGroup; ++i) place += pieces.first_block[group + i] <= block;
  return group + place;
}

__device__ inline DigestTarget target_of(const DigestPiece& piece) {
  DigestTarget target;
  target.slot = static_cast<DigestSlot*>(piece.slot_or_ring);
  target.ring = piece.ticket == 0 ? static_cast<DigestRing*>(piece.slot_or_ring) : nullptr;
  target.scratch = piece.scratch;
  target.ticket = piece.ticket;
  target.node = piece.node;
  return target;
}

template <int kCapacity>
__device__ void digest_piece(const DigestPieces<kCapacity>& pieces, FlatShared& shared) {
  const int place = piece_of(pieces, blockIdx.x);
  const DigestPiece& piece = pieces.piece[place];
  DigestFlat run = {};
  run.data = piece.data;
  run.size_bytes = piece.size_bytes;
  const uint32_t part = blockIdx.x - pieces.first_block[place];
  const Sums sums = flat_sums<kLoopNone>(run, part, piece.blocks, shared);
  finish_digest<false>(sums, target_of(piece), part, piece.blocks, shared.sums);
}

}  // namespace forkpoint::device
