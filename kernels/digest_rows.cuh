// Dense rows at any address: tiles of the logical tensor, as in a flat run, but every 16-byte block is looked up: which row
// it lies in, or which two. A block at an odd address is cut out of the two aligned ones that hold it.
#pragma once

#include <cstdint>

#include "kernels/digest_flat.cuh"

namespace forkpoint::device {

// The lowest `bytes` bytes of a word set, for any number.
__device__ inline uint32_t low_bytes(int bytes) { return bytes >= 4 ? ~0u : bytes <= 0 ? 0u : ~(~0u << (8 * bytes)); }

__device__ inline uint4 keep_low_bytes(uint4 block, int bytes) {
  return {block.x & low_bytes(bytes), block.y & low_bytes(bytes - 4), block.z & low_bytes(bytes - 8),
          block.w & low_bytes(bytes - 12)};
}
__device__ inline uint4 drop_low_bytes(uint4 block, int bytes) {
  return {block.x & ~low_bytes(bytes), block.y & ~low_bytes(bytes - 4), block.z & ~low_bytes(bytes - 8),
          block.w & ~low_bytes(bytes - 12)};
}
__device__ inline uint4 joined(const uint4& left, const uint4& right) {
  return {left.x | right.x, left.y | right.y, left.z | right.z, left.w | right.w};
}

// Kept in the first-level cache: the neighbour's lane needs the other part of it.
__device__ inline uint4 load_cached(uint64_t address) { return __ldg(reinterpret_cast<const uint4*>(address)); }

// The 16 bytes from `shift` on of two blocks.
__device__ inline uint4 cut_out(const uint4& low, const uint4& high, uint32_t shift) {
  uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (shift & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) word[i] = word[i + 2];
  }
  if (shift & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) word[i] = word[i + 1];
  }
  const uint32_t bits = 8 * (shift & 3);
  return {__funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits),
          __funnelshift_r(word[2], word[3], bits), __funnelshift_r(word[3], word[4], bits)};
}

// 16 bytes from any address; those outside the view are zero and are not read, neighbours within it may be.
__device__ inline uint4 load_anywhere(uint64_t address, const DigestRows& work) {
  const uint32_t shift = static_cast<uint32_t>(address) & 15;
  const uint64_t aligned = address - shift;
  if (aligned >= work.lowest_address && aligned + 32 <= work.end_address) {
    const uint4 low = load_cached(aligned);
    return shift == 0 ? low : cut_out(low, load_cached(aligned + 16), shift);
  }
  return cut_out(load_block_within(aligned, work.lowest_address, work.end_address),
                 load_block_within(aligned + 16, work.lowest_address, work.end_address), shift);
}

struct RowPlace {
  uint32_t row;
  uint64_t byte;  // within the row; beyond it: in a later row
};

__device__ inline uint64_t row_address(const DigestRows& work, uint32_t row) {
  uint64_t address = reinterpret_cast<uint64_t>(work.common.data);
  for (int d = 0; d < work.dims; ++d) {
    uint32_t at = row;
    if (d + 1 < work.dims) {
      row = work.extent[d].divide(row);
      at -= row * work.extent[d].divisor;
    }
    address += static_cast<uint64_t>(at) * static_cast<uint64_t>(work.stride_bytes[d]);
  }
  return address;
}

// place.byte is at most a tile beyond the row's end.
__device__ inline uint4 load_place(const DigestRows& work, RowPlace place) {
  if (place.byte >= work.row_bytes) {
    uint32_t rows = 1;
    if (work.row_bytes < kTileBytes) rows = work.short_row.divide(static_cast<uint32_t>(place.byte));
    place.row += rows;
    place.byte -= rows * work.row_bytes;
  }
  const uint4 block = load_anywhere(row_address(work, place.row) + place.byte, work);
  const uint64_t left = work.row_bytes - place.byte;
  if (left >= 16) return block;
  // The rest is the beginning of the next row.
  const uint4 rest = load_anywhere(row_address(work, place.row + 1) - left, work);
  return joined(keep_low_bytes(block, static_cast<int>(left)), drop_low_bytes(rest, static_cast<int>(left)));
}

// A tile at an end of the view: of each block only what lies in it.
template <DigestLoop kLoop>
__device__ void add_end_tile(const DigestRows& work, uint64_t tile, const FlatShared& shared, FlatSums<kLoop>& sums) {
  const int64_t origin = static_cast<int64_t>(tile * kTileBytes - work.common.first_byte) + 16 * (threadIdx.x % 32);
  const auto size = static_cast<int64_t>(work.common.size_bytes);
  const auto load = [&](int i) {
    const int64_t offset = origin + static_cast<int64_t>(i * kRowBytes);
    uint4 block = {};
    if (offset <= -16 || offset >= size) return block;
    if (offset < 0) {
      block = drop_low_bytes(load_anywhere(row_address(work, 0) + static_cast<uint64_t>(offset), work),
                             static_cast<int>(-offset));
      // A first row shorter than the block's rest cannot be: rows have 16 bytes or more.
    } else {
      const auto row = static_cast<uint32_t>(static_cast<uint64_t>(offset) / work.row_bytes);
      block = load_place(work, {row, static_cast<uint64_t>(offset) - row * work.row_bytes});
    }
    return keep_low_bytes(block, static_cast<int>(min(size - offset, int64_t{16})));
  };
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) sums.add_row(load(i), i, shared);
  if (sums.end_tile(tile_keys(tile))) return;
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) sums.recount(load(i));
}

template <DigestLoop kLoop>
__device__ void digest_rows(const DigestRows& work, FlatShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t end_byte = work.common.first_byte + work.common.size_bytes;
  const uint64_t first_full = (work.common.first_byte + kTileBytes - 1) / kTileBytes;
  const uint64_t end_full = max(end_byte / kTileBytes, first_full);
  const uint32_t step = gridDim.x * kBlockWarps;
  const uint64_t start = first_full + blockIdx.x * kBlockWarps + warp;
  copy_word_keys(shared);
  shared.tile_key[warp][lane] = tile_keys(start + uint64_t{step} * lane);
  __syncthreads();
  FlatSums<kLoop> sums({work.common.mask, work.common.largest_finite});
  // Where the tile begins; moved on by addition, because 64-bit divisions are slow.
  const uint64_t start_offset = start * kTileBytes - work.common.first_byte, step_bytes = uint64_t{step} * kTileBytes;
  RowPlace place = {static_cast<uint32_t>(start_offset / work.row_bytes), start_offset % work.row_bytes};
  const RowPlace stride = {static_cast<uint32_t>(step_bytes / work.row_bytes), step_bytes % work.row_bytes};
  const uint32_t rounds = start < end_full ? static_cast<uint32_t>((end_full - start - 1) / step + 1) : 0;
#pragma unroll 1
  for (uint32_t round = 0; round < rounds;) {
    uint4 rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = load_place(work, {place.row, place.byte + i * kRowBytes + 16 * lane});
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums.add_row(rows[i], i, shared);
    if (!sums.end_tile(shared.tile_key[warp][round % 32])) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) sums.recount(rows[i]);
    }
    place.row += stride.row;
    place.byte += stride.byte;
    if (place.byte >= work.row_bytes) {
      place.byte -= work.row_bytes;
      ++place.row;
    }
    if (++round % 32 == 0) {
      __syncwarp();
      shared.tile_key[warp][lane] = tile_keys(start + uint64_t{step} * (round + lane));
      __syncwarp();
    }
  }
  if (blockIdx.x == gridDim.x - 1 && warp == kBlockWarps - 1 && work.common.size_bytes > 0) {
    const uint64_t first_tile = work.common.first_byte / kTileBytes, last_tile = (end_byte - 1) / kTileBytes;
#pragma unroll 1
    for (uint64_t tile = first_tile;; tile = last_tile) {
      if (tile < first_full || tile >= end_full) add_end_tile(work, tile, shared, sums);
      if (tile == last_tile) break;
    }
  }
  finish_digest(sums.sums(), work.common.target, work.common.parts, shared.sums);
}

}  // namespace forkpoint::device
