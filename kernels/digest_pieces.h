// Several runs of raw bytes in one launch, all of it in the kernel's parameters: no table on the device, no copy, no
// allocation, so that it may follow every launch of a program, and be captured in a CUDA graph.
//
//   DigestPiecesLaunch launch;
//   for (size_t done = 0; done < count; done += covered) {
//     covered = plan_digest_pieces(requests + done, count - done, multiprocessors, &launch);
//     void* arguments[] = {launch.params()};
//     cuLaunchKernel(function[launch.kernel], launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream,
//                    arguments, nullptr);
//   }
//
// Guarantee: gpu_to_gpu, for the reason in kernels/digest_launch.h. Planning is pure and thread-safe, allocates nothing
// and never fails.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/digest_launch.h"

namespace forkpoint {

struct DigestRequest {
  const void* data = nullptr;  // device address; any alignment, though only multiples of 16 bytes share a launch
  uint64_t size_bytes = 0;     // 0 is answered too (digest zero)
  DigestTarget target;         // each its own; with a slot the ticket is not 0
};

inline constexpr int kMostPieces = 48;

// ---- Kernel parameters: passed by value, filled by the planner. A piece is shared by adjacent blocks.
struct alignas(16) DigestPiece {
  const void* data;
  uint64_t size_bytes;
  void* slot_or_ring;  // with ticket 0 a DigestRing or nothing, else a DigestSlot
  DigestScratch* scratch;
  uint32_t ticket;
  uint32_t node;
  uint32_t blocks;  // that share the piece
  uint32_t unused;
};

template <int kCapacity>
struct DigestPieces {
  static constexpr uint32_t kNoBlock = 0xFFFFFFFFu;
  static constexpr int kPlaces = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kCapacity)));
  uint32_t first_block[kPlaces];  // ascending; kNoBlock behind the last piece
  DigestPiece piece[kCapacity];
};
static_assert(sizeof(DigestPiece) == 48);
static_assert(sizeof(DigestPieces<kMostPieces>) <= 4096, "of what every driver takes as parameters");

struct DigestPiecesLaunch {
  int kernel = 0;  // index into kDigestKernelNames
  uint32_t grid = 0;
  uint32_t block = 0;
  uint32_t shared_bytes = 0;
  union {
    DigestFlat flat;    // one request
    DigestUnits units;  // one request at an odd address
    DigestPieces<4> few;
    DigestPieces<16> some;
    DigestPieces<48> many;
  };
  DigestPiecesLaunch() {}           // no more than is needed is written, by the planner
  void* params() { return &many; }  // the kernel's only parameter
  size_t param_bytes() const;       // of it
  const char* name() const { return kDigestKernelNames[kernel]; }
};

// How many of the first requests *launch covers: 0 for none, else at least 1. The caller loops over the rest.
size_t plan_digest_pieces(const DigestRequest* requests, size_t count, int multiprocessors, DigestPiecesLaunch* launch);

}  // namespace forkpoint
