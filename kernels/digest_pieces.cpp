#include "kernels/digest_pieces.h"

#include <algorithm>

#include "kernels/digest_blocks.h"
#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

bool may_share(const DigestRequest& request) {
  return request.size_bytes == 0 || reinterpret_cast<uint64_t>(request.data) % 16 == 0;
}

uint64_t tiles_of(const DigestRequest& request) {
  return request.size_bytes / kTileBytes + (request.size_bytes % kTileBytes != 0);
}

DigestPiece piece_of(const DigestRequest& request, uint64_t rounds) {
  const DigestTarget& target = request.target;
  DigestPiece piece = {};
  piece.data = request.data;
  piece.size_bytes = request.size_bytes;
  piece.slot_or_ring = target.ring != nullptr ? static_cast<void*>(target.ring) : target.slot;
  piece.scratch = target.scratch;
  piece.ticket = target.ring != nullptr || target.slot == nullptr ? 0 : target.ticket;
  piece.node = target.node;
  piece.blocks = static_cast<uint32_t>(plan::blocks_of(tiles_of(request), rounds));
  return piece;
}

// Returns the number of blocks.
template <int kCapacity>
uint32_t fill(const DigestRequest* requests, size_t count, uint64_t rounds, DigestPieces<kCapacity>& pieces) {
  uint32_t blocks = 0;
  for (size_t i = 0; i < pieces.kPlaces; ++i) {
    pieces.first_block[i] = i < count ? blocks : pieces.kNoBlock;
    if (i >= kCapacity) continue;
    pieces.piece[i] = i < count ? piece_of(requests[i], rounds) : DigestPiece{};
    blocks += pieces.piece[i].blocks;
  }
  return blocks;
}

void plan_alone(const DigestRequest& request, int multiprocessors, DigestPiecesLaunch& launch) {
  const DigestLaunch single =
      plan_digest_bytes(request.data, request.size_bytes, DType::raw, 0, request.target, multiprocessors);
  launch.kernel = single.kernel;
  launch.grid = single.grid;
  if (single.is_flat()) {
    launch.flat = single.flat;
  } else {
    launch.units = single.units;
  }
}

}  // namespace

size_t plan_digest_pieces(const DigestRequest* requests, size_t count, int multiprocessors,
                          DigestPiecesLaunch* launch) {
  if (count == 0) return 0;
  launch->block = kDigestBlockThreads;
  launch->shared_bytes = 0;
  size_t taken = 0;
  while (taken < std::min<size_t>(count, kMostPieces) && may_share(requests[taken])) ++taken;
  if (taken <= 1) {
    plan_alone(requests[0], multiprocessors, *launch);
    return 1;
  }
  const uint64_t rounds = plan::choose_rounds(taken, multiprocessors, [&](size_t i) { return tiles_of(requests[i]); });
  if (taken <= 4) {
    launch->kernel = kDigestPiecesKernel;
    launch->grid = fill(requests, taken, rounds, launch->few);
  } else if (taken <= 16) {
    launch->kernel = kDigestPiecesKernel + 1;
    launch->grid = fill(requests, taken, rounds, launch->some);
  } else {
    launch->kernel = kDigestPiecesKernel + 2;
    launch->grid = fill(requests, taken, rounds, launch->many);
  }
  return taken;
}

size_t DigestPiecesLaunch::param_bytes() const {
  switch (kernel - kDigestPiecesKernel) {
    case 0:
      return sizeof(few);
    case 1:
      return sizeof(some);
    case 2:
      return sizeof(many);
    default:
      return kernel < static_cast<int>(kLoopCount) ? sizeof(flat) : sizeof(units);
  }
}

}  // namespace forkpoint
