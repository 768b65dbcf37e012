// What the ranks of a communicator share for the deterministic collectives: where in a rank's staging memory flags and
// slots lie, how a call is cut into pieces, and what a kernel is told. All of it follows from numbers that are the same
// on every rank. No CUDA here.
//
// A block of the kernel speaks only with the same block of the other ranks, so no grid ever waits for itself.
// Pipelined: each rank pushes its input, chunk by chunk, to the chunk's owner, who adds it up in rank order and pushes
// the sum back:
//
//   source s                              owner o
//   in -> inputs[s][k % S] of o
//   fence; input_arrived[s] of o = k+1 ->  all n-1 arrived: add; out, and results[o][k % S] of each s
//   results[o][k % S] -> out           <-  fence; result_arrived[o] of each s = k+1
//
// Slots need no acknowledgement of their own: s fills slot k % S again only once result k-S of every owner is copied
// out, so an owner that sees input k has its result slot at s free. Counters never fall and never wrap (64 bits); they
// live in the staging memory and the kernel itself advances them, so a CUDA graph may be replayed.
//
// Floor, n bytes a rank, N ranks, for each direction of a rank's link: all-reduce 2n(N-1)/N, as a ring (N = 2: n);
// reduce-scatter n(N-1)/N; reduce n(N-1) into the root (N = 2: n). Local memory of an all-reduce: in n, staged inputs
// and results n(N-1)/N written and read each, out n: below 6n (N = 2: 4n), of which an H200 has thirteen times what its
// links move. Additions: n(N-1)/N elements.
//
// Low latency, for small calls: every rank pushes all of its input to all others, in lines of 16 bytes whose halves are
// {4 bytes of data, number of the call}, and adds everything itself: one hop, no fence. Twice the bytes: 2n(N-1) a
// direction.
//
// The cut into chunks, tiles and blocks moves work about and nothing else: no result depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/collective_rule.h"

namespace forkpoint::collective {

inline constexpr uint32_t kMostRanks = 64;
inline constexpr uint32_t kMostBlocks = 64;
inline constexpr uint32_t kBlockThreads = 512;
inline constexpr uint32_t kVectorBytes = 16;
inline constexpr uint32_t kLineData = 8;                               // bytes of data in a line
inline constexpr uint32_t kBlockLineData = kBlockThreads * kLineData;  // of one block, low latency

enum class Kind : uint32_t { all_reduce, reduce_scatter, reduce };
// local: every rank's input lies on this device already (staging[] says where); no other rank takes part.
enum class Protocol : uint32_t { pipelined, low_latency, local };

// Room in the staging memory; equal on all ranks.
struct StagingShape {
  uint32_t ranks = 0;
  uint32_t blocks = 32;            // most that a call uses
  uint32_t slots = 8;              // chunks of one source that may be on their way; a power of two
  uint32_t tile_bytes = 64 << 10;  // of one chunk of every owner

  // Bytes of a chunk's room.
  FORKPOINT_HD uint32_t room() const { return tile_bytes / ranks & ~127u; }
  FORKPOINT_HD uint32_t line_blocks() const { return ranks >= 64 ? 1 : ranks > 4 ? 64 / ranks : 16; }

  // ---- Offsets from the beginning. All zero before the first call.
  FORKPOINT_HD uint64_t input_arrived(uint32_t block, uint32_t source) const {
    return 8 * (block * kMostRanks + source);
  }
  FORKPOINT_HD uint64_t result_arrived(uint32_t block, uint32_t owner) const {
    return 8 * ((kMostBlocks + block) * kMostRanks + owner);
  }
  // The block's own counters: chunks so far, low-latency calls so far.
  FORKPOINT_HD uint64_t chunks_done(uint32_t block) const { return 16 * kMostBlocks * kMostRanks + 16 * block; }
  FORKPOINT_HD uint64_t calls_done(uint32_t block) const { return chunks_done(block) + 8; }
  FORKPOINT_HD uint64_t line(uint32_t block, uint32_t parity, uint32_t source, uint32_t index) const {
    return 16 * kMostBlocks * (kMostRanks + 1) +
           16ull * (((block * 2ull + parity) * ranks + source) * kBlockThreads + index);
  }
  FORKPOINT_HD uint64_t input(uint32_t block, uint32_t source, uint64_t chunk) const {
    return line(line_blocks(), 0, 0, 0) + ((block * uint64_t{ranks} + source) * slots + (chunk & (slots - 1))) * room();
  }
  FORKPOINT_HD uint64_t result(uint32_t block, uint32_t owner, uint64_t chunk) const {
    return input(blocks, 0, 0) + ((block * uint64_t{ranks} + owner) * slots + (chunk & (slots - 1))) * room();
  }
  FORKPOINT_HD uint64_t total_bytes() const { return result(blocks, 0, 0); }
};

// A kernel's only parameter.
struct CollectiveParams {
  StagingShape shape;
  Kind kind = Kind::all_reduce;
  Op op = Op::sum;
  uint32_t rank = 0;
  uint32_t root = 0;  // of a reduce
  Protocol protocol = Protocol::pipelined;
  uint32_t blocks = 1;       // of this call
  uint32_t chunk_bytes = 0;  // of this call; at most shape.room()
  uint32_t unused = 0;
  const char* in = nullptr;
  char* out = nullptr;              // nullptr where this rank has no output
  uint64_t part_bytes = 0;          // all_reduce, reduce: of the whole; reduce_scatter: of a rank's part
  uint64_t factor = 0;              // bits of the factor as the arithmetic's Value
  const void* factor_at = nullptr;  // else where the device finds it, an element of the collective's type
  const uint32_t* abort =
      nullptr;  // becomes non-zero when nobody is to wait any longer; host memory that the device reads
  char* staging[kMostRanks] = {};  // of each rank, as this rank reaches it
};

// ---- How a call is cut into tiles; a tile has a chunk of every owner, block b does tiles b, b + blocks, ...
struct Piece {
  uint64_t in_offset = 0, out_offset = 0;
  uint32_t bytes = 0;  // 0: this owner has nothing in the tile
};

FORKPOINT_HD inline uint32_t owner_count(const CollectiveParams& call) {
  return call.kind == Kind::reduce ? 1 : call.shape.ranks;
}
FORKPOINT_HD inline bool is_owner(const CollectiveParams& call, uint32_t rank) {
  return call.kind != Kind::reduce || rank == call.root;
}
FORKPOINT_HD inline uint64_t tile_count(const CollectiveParams& call) {
  const uint64_t tile = uint64_t{call.chunk_bytes} * (call.kind == Kind::all_reduce ? call.shape.ranks : 1);
  return (call.part_bytes + tile - 1) / tile;
}
FORKPOINT_HD inline Piece piece_of(const CollectiveParams& call, uint64_t tile, uint32_t owner) {
  const bool split = call.kind == Kind::all_reduce;
  const uint64_t begin = (split ? tile * call.shape.ranks + owner : tile) * call.chunk_bytes;
  if (begin >= call.part_bytes) return {};
  const uint64_t left = call.part_bytes - begin;
  Piece piece{begin, begin, left < call.chunk_bytes ? static_cast<uint32_t>(left) : call.chunk_bytes};
  if (call.kind == Kind::reduce_scatter) piece.in_offset += owner * call.part_bytes;
  return piece;
}

}  // namespace forkpoint::collective
