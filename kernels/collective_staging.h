// What the ranks of a communicator share for the deterministic collectives: where in a rank's staging memory flags and
// slots lie, how a call is cut into pieces, and what a kernel is told. All of it follows from numbers that are the same
// on every rank. No CUDA here.
//
// A block of the kernel speaks only with the same block of the other ranks, so no grid ever waits for itself.
// Pipelined: each rank pushes its input, chunk by chunk, into the chunk's owner's staging memory; the owner adds it up
// in rank order and pushes the sum back. A block goes in steps, one signal each (collective_protocol.h):
//
//   step t    push inputs of chunk t                        to their owners
//             signal t                                      the block's writes so far have arrived
//             every other rank's signal t - lag is there:
//             add chunk t - lag                             to out, and into the others' results
//             copy the results of chunk t - 2 lag - 1       to out
//
// Two ranks need no owners: each pushes all of its input and adds up everything by itself: as many bytes over the link,
// half the hops, and no results to copy.
//
// Slots need no acknowledgement of their own: whoever has heard signal t of a rank knows that it has added chunk
// t-1-lag and copied chunk t-2-2lag. So a slot may be filled again after 2 lag + 2 chunks, also from one call to the
// next. Counters never fall and never wrap (64 bits); they live in the staging memory and the kernel itself advances
// them, so a CUDA graph may be replayed.
//
// Floor, n bytes a rank, N ranks, for each direction of a rank's link: all-reduce 2n(N-1)/N, as a ring (N = 2: n);
// reduce-scatter n(N-1)/N; reduce n(N-1) into the root (N = 2: n). Local memory of an all-reduce: in n twice, staged
// inputs and results n(N-1)/N written and read each, out n: below 7n (N = 2: 5n), of which an H200 has thirteen times
// what its links move.
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
inline constexpr uint32_t kMostBlocks = 128;
inline constexpr uint32_t kBlockThreads = 256;
inline constexpr uint32_t kVectorBytes = 16;
inline constexpr uint32_t kLineData = 8;  // bytes of data in a line
inline constexpr uint32_t kLineBytes = 16;

enum class Kind : uint32_t { all_reduce, reduce_scatter, reduce };
// local: every rank's input lies on this device already (staging[] says where); no other rank takes part.
enum class Protocol : uint32_t { pipelined, low_latency, local };

// Room in the staging memory; equal on all ranks. staging_for() says what suits how many.
struct StagingShape {
  uint32_t ranks = 0;
  uint32_t blocks = 128;           // most that a call uses
  uint32_t slots = 4;              // chunks of one source that may be on their way; a power of two, at least 4
  uint32_t tile_bytes = 64 << 10;  // of one chunk of every owner

  // Bytes of a chunk's room.
  FORKPOINT_HD uint32_t room() const { return tile_bytes / ranks & ~127u; }
  FORKPOINT_HD uint32_t most_lag() const { return slots / 2 - 1; }
  // Low latency: blocks, and lines of each of them and each source.
  FORKPOINT_HD uint32_t line_blocks() const {
    const uint32_t most = ranks > 8 ? 1024 / ranks : kMostBlocks;
    return blocks < most ? blocks : most;
  }
  FORKPOINT_HD uint32_t block_lines() const { return ranks > 4 ? kBlockThreads : 2 * kBlockThreads; }

  // ---- Offsets from the beginning. All zero before the first call.
  // How many signals the block has had of a source.
  FORKPOINT_HD uint64_t signals(uint32_t block, uint32_t source) const { return 8ull * (block * kMostRanks + source); }
  // The block's own counters: chunks so far, signals so far, low-latency calls so far.
  FORKPOINT_HD uint64_t chunks_done(uint32_t block) const { return 8ull * kMostBlocks * kMostRanks + 32 * block; }
  FORKPOINT_HD uint64_t signals_done(uint32_t block) const { return chunks_done(block) + 8; }
  FORKPOINT_HD uint64_t calls_done(uint32_t block) const { return chunks_done(block) + 16; }
  // Rank `from` as one of the others of rank `of`, and room for each of those.
  FORKPOINT_HD static uint32_t other(uint32_t of, uint32_t from) { return from > of ? from - 1 : from; }
  FORKPOINT_HD uint32_t others() const { return ranks - 1; }
  FORKPOINT_HD uint64_t line(uint32_t block, uint32_t parity, uint32_t other, uint32_t index) const {
    return chunks_done(kMostBlocks) +
           uint64_t{kLineBytes} * (((block * 2ull + parity) * others() + other) * block_lines() + index);
  }
  FORKPOINT_HD uint64_t input(uint32_t block, uint32_t other, uint64_t chunk) const {
    return line(line_blocks(), 0, 0, 0) +
           ((block * uint64_t{others()} + other) * slots + (chunk & (slots - 1))) * room();
  }
  FORKPOINT_HD uint64_t result(uint32_t block, uint32_t other, uint64_t chunk) const {
    return input(blocks, 0, 0) + ((block * uint64_t{others()} + other) * slots + (chunk & (slots - 1))) * room();
  }
  // Two ranks have no results on their way.
  FORKPOINT_HD uint64_t total_bytes() const { return ranks > 2 ? result(blocks, 0, 0) : input(blocks, 0, 0); }
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
  uint32_t chunk_bytes = 0;  // of this call; at most shape.room(). Low latency: of a block's lines
  uint32_t room = 0;         // shape.room(), and where slots begin: a device divides slowly
  uint64_t inputs_at = 0, results_at = 0;
  uint32_t lag = 1;      // steps from a chunk to its addition; at most shape.most_lag()
  bool all_own = false;  // an all_reduce whose ranks add up everything each by itself
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

FORKPOINT_HD inline bool is_owner(const CollectiveParams& call, uint32_t rank) {
  return call.kind != Kind::reduce || rank == call.root;
}
// Does each rank add up a part, for all of them?
FORKPOINT_HD inline bool is_split(const CollectiveParams& call) {
  return call.kind == Kind::all_reduce && !call.all_own;
}
FORKPOINT_HD inline uint64_t tile_count(const CollectiveParams& call) {
  const uint64_t tile = uint64_t{call.chunk_bytes} * (is_split(call) ? call.shape.ranks : 1);
  return (call.part_bytes + tile - 1) / tile;
}
FORKPOINT_HD inline Piece piece_of(const CollectiveParams& call, uint64_t tile, uint32_t owner) {
  const uint64_t begin = (is_split(call) ? tile * call.shape.ranks + owner : tile) * call.chunk_bytes;
  if (begin >= call.part_bytes) return {};
  const uint64_t left = call.part_bytes - begin;
  Piece piece{begin, begin, left < call.chunk_bytes ? static_cast<uint32_t>(left) : call.chunk_bytes};
  if (call.kind == Kind::reduce_scatter) piece.in_offset += owner * call.part_bytes;
  return piece;
}

}  // namespace forkpoint::collective
