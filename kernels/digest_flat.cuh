// Contiguous runs. A warp takes a tile of 2 KiB, four 16-byte loads a lane; as soon as one is worked on, its registers
// await the same part of the warp's next tile. Word keys lie in shared memory, the keys of a warp's next 32 tiles too
// (mixed by one lane each).
#pragma once

#include <cstdint>

#include "kernels/digest_finish.cuh"
#include "kernels/digest_magnitude.cuh"
#include "lib/digest_mix.h"

namespace forkpoint::device {

inline constexpr int kRows = 4;  // of 512 bytes: one 16-byte load a lane each
inline constexpr uint32_t kRowBytes = kTileBytes / kRows;

// The word keys of both lanes, computed by the compiler.
struct KeyTable {
  uint32_t key[2][kTileWords];
  constexpr KeyTable() : key{} {
    for (uint32_t i = 0; i < kTileWords; ++i) {
      key[0][i] = word_key<1>(i);
      key[1][i] = word_key<2>(i);
    }
  }
};
__device__ constexpr KeyTable kKeyTable{};

struct TileKeys {
  uint64_t a, b;
};
__device__ inline TileKeys tile_keys(uint64_t tile) { return {tile_key<1>(tile), tile_key<2>(tile)}; }

struct FlatShared {
  alignas(16) uint32_t word_key[2][kTileWords];
  alignas(16) TileKeys tile_key[kBlockWarps][32];
  uint64_t sums[kBlockWarps][kPartCount];
};

__device__ inline uint4 load_block(const unsigned char* address) {
  uint4 value;
  // Read once: not worth a place in the first-level cache.
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ inline void load_tile(const unsigned char* lane_address, uint4 (&rows)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = load_block(lane_address + i * kRowBytes);
}

// The part of a 16-byte block that lies in [begin, end), zero elsewhere. Nothing outside is read.
__device__ inline uint4 load_block_within(uint64_t address, uint64_t begin, uint64_t end) {
  if (address >= begin && address + 16 <= end) return load_block(reinterpret_cast<const unsigned char*>(address));
  uint32_t word[4] = {};
  if (address + 16 <= begin || address >= end) return {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (address + i >= begin && address + i < end) {
      word[i / 4] |= uint32_t{*reinterpret_cast<const unsigned char*>(address + i)} << (8 * (i % 4));
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

// One IMAD.WIDE. Written with carries, because of mad.wide the assembler makes a product and an addition.
__device__ inline void add_product(uint64_t& sum, uint32_t key, uint32_t word) {
  asm("{\n\t.reg .u32 low, high;\n\tmov.b64 {low, high}, %0;\n\tmad.lo.cc.u32 low, %1, %2, low;\n\t"
      "madc.hi.u32 high, %1, %2, high;\n\tmov.b64 %0, {low, high};\n\t}"
      : "+l"(sum)
      : "r"(key), "r"(word));
}

__device__ inline void add_products(uint64_t& sum, const uint4& keys, const uint4& words) {
  add_product(sum, keys.x, words.x);
  add_product(sum, keys.y, words.y);
  add_product(sum, keys.z, words.z);
  add_product(sum, keys.w, words.w);
}

template <DigestLoop kLoop>
struct FlatSums {
  uint64_t a = 0, b = 0, plain = 0;
  uint64_t in_tile_a = 0, in_tile_b = 0;
  Magnitude<kLoop> magnitude;
  __device__ explicit FlatSums(MagnitudeParams params) : magnitude(params) {}

  __device__ void add_row(const uint4& row, int number, const FlatShared& shared) {
    const int place = 128 * number + 4 * (threadIdx.x % 32);
    add_products(in_tile_a, *reinterpret_cast<const uint4*>(&shared.word_key[0][place]), row);
    add_products(in_tile_b, *reinterpret_cast<const uint4*>(&shared.word_key[1][place]), row);
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (uint32_t word : words) plain += word;
    magnitude.add(words);
  }
  // A part of a word: the sums are linear in its bytes, though magnitudes are not.
  __device__ void add_bytes(uint32_t word, uint32_t place, const FlatShared& shared) {
    add_product(in_tile_a, shared.word_key[0][place], word);
    add_product(in_tile_b, shared.word_key[1][place], word);
    plain += word;
  }
  __device__ void recount(const uint4& row) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
    magnitude.recount(words);
  }
  // False: recount all rows of the tile.
  __device__ bool end_tile(const TileKeys& keys) {
    a += keys.a * in_tile_a;
    b += keys.b * in_tile_b;
    in_tile_a = in_tile_b = 0;
    return magnitude.settle();
  }
  __device__ Sums sums() const { return {a, b, plain, magnitude.largest(), magnitude.nonfinite()}; }
};

__device__ inline void copy_word_keys(FlatShared& shared) {
  static_assert(sizeof(KeyTable) <= 16 * kBlockThreads);
  if (threadIdx.x >= sizeof(KeyTable) / 16) return;
  reinterpret_cast<uint4*>(&shared.word_key)[threadIdx.x] = reinterpret_cast<const uint4*>(&kKeyTable)[threadIdx.x];
}

// A tile at an end of the run that the run does not fill.
template <DigestLoop kLoop>
__device__ void add_end_tile(const DigestFlat& work, uint64_t tile, const FlatShared& shared, FlatSums<kLoop>& sums) {
  const uint64_t begin = reinterpret_cast<uint64_t>(work.data), end = begin + work.size_bytes;
  const uint64_t origin = begin - work.first_byte + tile * kTileBytes + 16 * (threadIdx.x % 32);
  uint4 rows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = load_block_within(origin + i * kRowBytes, begin, end);
#pragma unroll
  for (int i = 0; i < kRows; ++i) sums.add_row(rows[i], i, shared);
  if (sums.end_tile(tile_keys(tile))) return;
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) sums.recount(load_block_within(origin + i * kRowBytes, begin, end));
}

// Of a tile that the run does not fill: its whole 16-byte blocks, and of those at the run's ends a byte a lane (lanes 0
// to 15 of the first, the others of the last). Far fewer instructions than putting these together, but of raw bytes
// only.
struct EndTile {
  uint4 rows[kRows];
  uint32_t edge = 0, edge_place = 0;  // the byte where it stands in its word, and which word of the tile that is

  __device__ void load(const DigestFlat& work, uint64_t tile) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t begin = reinterpret_cast<uint64_t>(work.data), end = begin + work.size_bytes;
    const uint64_t origin = begin - work.first_byte + tile * kTileBytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint64_t address = origin + i * kRowBytes + 16 * lane;
      const bool whole = address >= begin && address + 16 <= end;
      rows[i] = whole ? load_block(reinterpret_cast<const unsigned char*>(address)) : uint4{};
    }
    const bool at_end = lane >= 16;
    const uint64_t cut = at_end ? end : begin, block = cut / 16 * 16, address = block + lane % 16;
    const bool is_cut = cut != block && !(at_end && begin > block);  // of one block with both ends the first lanes see
    const bool mine = is_cut && address >= max(begin, origin) && address < min(end, origin + kTileBytes);
    const auto place = static_cast<uint32_t>(address - origin);
    edge_place = mine ? place / 4 : 0;
    edge = mine ? uint32_t{*reinterpret_cast<const unsigned char*>(address)} << (8 * (place % 4)) : 0;
  }
  __device__ void add(uint64_t tile, const FlatShared& shared, FlatSums<kLoopNone>& sums) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums.add_row(rows[i], i, shared);
    sums.add_bytes(edge, edge_place, shared);
    sums.end_tile(tile_keys(tile));
  }
};

// The tiles of a run, by number.
struct Tiles {
  uint64_t first, last;           // that it touches
  uint64_t first_full, end_full;  // that it fills
  __device__ explicit Tiles(const DigestFlat& work) {
    const uint64_t end_byte = work.first_byte + work.size_bytes;
    first = work.first_byte / kTileBytes;
    last = (end_byte - 1) / kTileBytes;
    first_full = (work.first_byte + kTileBytes - 1) / kTileBytes;
    end_full = max(end_byte / kTileBytes, first_full);
  }
  __device__ bool fills(uint64_t tile) const { return tile >= first_full && tile < end_full; }
};

// is_loaded: the last tile was, into `ends`.
template <DigestLoop kLoop>
__device__ void add_ends(const DigestFlat& work, const Tiles& tiles, EndTile& ends, bool is_loaded,
                         const FlatShared& shared, FlatSums<kLoop>& sums) {
#pragma unroll 1
  for (uint64_t tile = tiles.last;; tile = tiles.first) {
    if (!tiles.fills(tile)) {
      if constexpr (kLoop == kLoopNone) {
        if (!is_loaded || tile != tiles.last) ends.load(work, tile);
        ends.add(tile, shared, sums);
      } else {
        add_end_tile(work, tile, shared, sums);
      }
    }
    if (tile == tiles.first) break;
  }
}

// This thread's. part: which of the `parts` blocks this one is that go through the run together.
template <DigestLoop kLoop>
__device__ Sums flat_sums(const DigestFlat& work, uint32_t part, uint32_t parts, FlatShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles(work);
  const uint64_t end_full = tiles.end_full;
  const uint64_t step = uint64_t{parts} * kBlockWarps;
  const uint64_t start = tiles.first_full + uint64_t{part} * kBlockWarps + warp;
  // The ends are for the warp that has least to do, the last one. Where it has nothing else, as of a small run, it asks
  // for them now: what it would wait for behind the barrier is as long as all the rest.
  const bool has_ends = part == parts - 1 && warp == kBlockWarps - 1 && work.size_bytes > 0;
  const bool ends_alone = kLoop == kLoopNone && has_ends && start >= end_full && !tiles.fills(tiles.last);
  const unsigned char* address = reinterpret_cast<const unsigned char*>(
      reinterpret_cast<uint64_t>(work.data) - work.first_byte + start * kTileBytes + 16 * lane);

  FlatSums<kLoop> sums({work.mask, work.largest_finite});
  EndTile end_tile;
  uint4 (&rows)[kRows] = end_tile.rows;
  if (start < end_full) load_tile(address, rows);
  if (ends_alone) end_tile.load(work, tiles.last);
  copy_word_keys(shared);
  shared.tile_key[warp][lane] = tile_keys(start + lane * step);
  __syncthreads();
  uint32_t round = 0;
#pragma unroll 1
  for (uint64_t tile = start; tile < end_full; tile += step) {
    const bool more = tile + step < end_full;
    const unsigned char* next = address + step * kTileBytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums.add_row(rows[i], i, shared);
      if (more) rows[i] = load_block(next + i * kRowBytes);
    }
    if (!sums.end_tile(shared.tile_key[warp][round])) {
      // Its registers hold the next tile by now.
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) sums.recount(load_block(address + i * kRowBytes));
    }
    address = next;
    if (++round == 32) {
      round = 0;
      __syncwarp();
      shared.tile_key[warp][lane] = tile_keys(tile + (1 + lane) * step);
      __syncwarp();
    }
  }
  if (has_ends) add_ends(work, tiles, end_tile, ends_alone, shared, sums);
  return sums.sums();
}

template <DigestLoop kLoop>
__device__ void digest_flat(const DigestFlat& work, uint32_t part, uint32_t parts, FlatShared& shared) {
  const Sums sums = flat_sums<kLoop>(work, part, parts, shared);
  finish_digest<kLoop != kLoopNone>(sums, work.target, part, work.parts, shared.sums);
}

}  // namespace forkpoint::device
