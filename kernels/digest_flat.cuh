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

// This thread's. part: which of the `parts` blocks this one is that go through the run together.
template <DigestLoop kLoop>
__device__ Sums flat_sums(const DigestFlat& work, uint32_t part, uint32_t parts, FlatShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t end_byte = work.first_byte + work.size_bytes;
  const uint64_t first_full = (work.first_byte + kTileBytes - 1) / kTileBytes;
  const uint64_t end_full = max(end_byte / kTileBytes, first_full);
  const uint64_t step = uint64_t{parts} * kBlockWarps;
  const uint64_t start = first_full + uint64_t{part} * kBlockWarps + warp;
  const unsigned char* address = reinterpret_cast<const unsigned char*>(
      reinterpret_cast<uint64_t>(work.data) - work.first_byte + start * kTileBytes + 16 * lane);

  FlatSums<kLoop> sums({work.mask, work.largest_finite});
  uint4 rows[kRows] = {};
  if (start < end_full) load_tile(address, rows);
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
  // By the warp that has least to do: the last one.
  if (part == parts - 1 && warp == kBlockWarps - 1 && work.size_bytes > 0) {
    const uint64_t first_tile = work.first_byte / kTileBytes, last_tile = (end_byte - 1) / kTileBytes;
#pragma unroll 1
    for (uint64_t tile = first_tile;; tile = last_tile) {
      if (tile < first_full || tile >= end_full) add_end_tile(work, tile, shared, sums);
      if (tile == last_tile) break;
    }
  }
  return sums.sums();
}

template <DigestLoop kLoop>
__device__ void digest_flat(const DigestFlat& work, uint32_t part, uint32_t parts, FlatShared& shared) {
  const Sums sums = flat_sums<kLoop>(work, part, parts, shared);
  finish_digest<kLoop != kLoopNone>(sums, work.target, work.parts, shared.sums);
}

}  // namespace forkpoint::device
