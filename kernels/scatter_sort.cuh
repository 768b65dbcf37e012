// The kernels of kernels/scatter_sort.h. Part of deterministic_scatter.cu.
#pragma once

#include "kernels/scatter_sort.h"

#ifdef NDEBUG  // declared for assert() alone
extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned line,
                                                  const char* function) noexcept __attribute__((noreturn));
#endif

namespace forkpoint::device {

using namespace scatter;

constexpr int kSortWarps = kSortThreads / 32;
constexpr int kSortItems = static_cast<int>(kSortTile) / kSortThreads;
constexpr int kMostBins = 1 << kMostDigitBits;
static_assert(kMostBins == 2 * kSortThreads);  // each thread has two adjacent bins

__device__ inline uint32_t sort_key(const SortWork& work, int64_t place) {
  if (!work.from_index) return work.keys_in[place];
  bool good;
  const uint32_t key = work.index.key_at(static_cast<uint32_t>(place), &good);
  // Also where NDEBUG is set: an error of the program's, as torch's own kernels report it.
  if (!good) __assert_fail("index out of range", "forkpoint", 0, "scatter");
  return key;
}

__device__ inline uint32_t digit_of(const SortWork& work, uint32_t key) {
  return key >> work.shift & ((1u << work.bits) - 1);
}

extern "C" __global__ void __launch_bounds__(kSortThreads) forkpoint_sort_count(const __grid_constant__ SortWork work) {
  __shared__ uint32_t bins[kMostBins];
  const int bin_count = 1 << work.bits;
  for (int bin = static_cast<int>(threadIdx.x); bin < bin_count; bin += kSortThreads) bins[bin] = 0;
  __syncthreads();
  const int64_t count = work.index.count(), begin = int64_t{blockIdx.x} * work.chunk;
  const int64_t end = begin + work.chunk < count ? begin + work.chunk : count;
#pragma unroll 4
  for (int64_t place = begin + threadIdx.x; place < end; place += kSortThreads) {
    atomicAdd(&bins[digit_of(work, sort_key(work, place))], 1u);
  }
  __syncthreads();
  uint32_t* counts = work.scratch + int64_t{blockIdx.x} * bin_count;
  for (int bin = static_cast<int>(threadIdx.x); bin < bin_count; bin += kSortThreads) counts[bin] = bins[bin];
}

// The sum of what threads before this one have; all threads of the block call it.
__device__ inline uint32_t sum_before(uint32_t mine, uint32_t* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += warp_sums[w];
  return sum - mine;
}

// offsets[bin]: where the first place of this chunk with this digit goes.
__device__ inline void find_offsets(const SortWork& work, uint32_t* offsets, uint32_t* warp_sums) {
  const int bin = 2 * static_cast<int>(threadIdx.x), bin_count = 1 << work.bits;
  uint2 before{0, 0}, total{0, 0};
  if (bin < bin_count) {
    const uint32_t* counts = work.scratch + bin;
#pragma unroll 16
    for (uint32_t chunk = 0; chunk < gridDim.x; ++chunk) {
      const uint2 here = *reinterpret_cast<const uint2*>(counts + int64_t{chunk} * bin_count);
      if (chunk < blockIdx.x) before.x += here.x, before.y += here.y;
      total.x += here.x, total.y += here.y;
    }
  }
  const uint32_t smaller = sum_before(total.x + total.y, warp_sums);
  if (bin < bin_count) {
    offsets[bin] = smaller + before.x;
    offsets[bin + 1] = smaller + total.x + before.y;
  }
}

// What a thread has of a tile: of its warp's 32 * kSortItems places each 32nd; `valid` of them are places.
struct TilePart {
  uint32_t keys[kSortItems], places[kSortItems], digits[kSortItems];
  uint32_t ranks[kSortItems];  // how many places of the warp come before and have the same digit
  int valid;
};

__device__ inline void load_tile(const SortWork& work, int64_t tile, int64_t end, TilePart* part) {
  const int64_t first = tile + threadIdx.x / 32 * (kSortItems * 32) + threadIdx.x % 32;
  part->valid = 0;
#pragma unroll
  for (int i = 0; i < kSortItems; ++i) {
    const int64_t place = first + i * 32;
    part->keys[i] = part->places[i] = part->digits[i] = 0;
    if (place >= end) continue;
    part->valid = i + 1;
    part->keys[i] = sort_key(work, place);
    part->places[i] = work.from_index ? static_cast<uint32_t>(place) : work.places_in[place];
    part->digits[i] = digit_of(work, part->keys[i]);
  }
}

// used[digit]: how many of the warp's places have it. A vote a bit costs less than __match_any_sync().
__device__ inline void rank_in_warp(int bits, uint16_t* used, TilePart* part) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t same[kSortItems];
#pragma unroll
  for (int i = 0; i < kSortItems; ++i) {
    const uint32_t valid = __ballot_sync(~0u, i < part->valid);
    same[i] = i < part->valid ? valid : ~valid;
  }
  for (int bit = 0; bit < bits; ++bit) {
#pragma unroll
    for (int i = 0; i < kSortItems; ++i) {
      const bool set = part->digits[i] >> bit & 1u;
      const uint32_t vote = __ballot_sync(~0u, set);
      same[i] &= set ? vote : ~vote;
    }
  }
#pragma unroll
  for (int i = 0; i < kSortItems; ++i) {
    const int leader = __ffs(static_cast<int>(same[i])) - 1;
    uint32_t before = 0;
    if (i < part->valid && lane == static_cast<uint32_t>(leader)) {
      before = used[part->digits[i]];
      used[part->digits[i]] = static_cast<uint16_t>(before + __popc(same[i]));
    }
    part->ranks[i] = __shfl_sync(~0u, before, leader) + __popc(same[i] & ((1u << lane) - 1));
    __syncwarp();
  }
}

// Shared memory of a block. A tile's places are put in order there, so that they are written in runs.
struct SortShared {
  uint32_t offsets[kMostBins];  // where the next place of this digit goes
  uint32_t begins[kMostBins];   // the same, within the tile
  uint32_t warp_sums[kSortWarps];
  union {
    uint16_t used[kSortWarps][kMostBins];  // how many places of each warp have the digit, then of those before it
    uint32_t used_pairs[kSortWarps][kMostBins / 2];
    uint32_t tile[2][kSortTile];  // keys and places
  };
};

// Fills `begins`, and `used` of the warps before each; returns how many have this thread's two digits (16 bits each).
__device__ inline uint32_t add_up_tile(int bin_count, SortShared* shared) {
  const int pair = static_cast<int>(threadIdx.x);
  uint32_t totals = 0;
  for (int w = 0; 2 * pair < bin_count && w < kSortWarps; ++w) {
    const uint32_t here = shared->used_pairs[w][pair];
    shared->used_pairs[w][pair] = totals;
    totals += here;
  }
  const uint32_t low = totals & 0xffffu, smaller = sum_before(low + (totals >> 16), shared->warp_sums);
  if (2 * pair < bin_count) {
    shared->begins[2 * pair] = smaller;
    shared->begins[2 * pair + 1] = smaller + low;
  }
  return totals;
}

__device__ inline void put_in_order(const TilePart& part, SortShared* shared) {
  uint32_t to[kSortItems];
#pragma unroll
  for (int i = 0; i < kSortItems; ++i) {
    to[i] = shared->begins[part.digits[i]] + shared->used[threadIdx.x / 32][part.digits[i]] + part.ranks[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSortItems; ++i) {
    if (i >= part.valid) break;
    shared->tile[0][to[i]] = part.keys[i];
    shared->tile[1][to[i]] = part.places[i];
  }
}

__device__ inline void write_tile(const SortWork& work, int count, const SortShared& shared) {
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x); at < count; at += kSortThreads) {
    const uint32_t key = shared.tile[0][at], place = shared.tile[1][at], digit = digit_of(work, key);
    const uint32_t in_tile = static_cast<uint32_t>(at);
    const uint32_t to = work.alone ? in_tile : shared.offsets[digit] + (in_tile - shared.begins[digit]);
    work.keys_out[to] = key;
    if (work.widens)
      static_cast<int64_t*>(work.places_out)[to] = place;
    else
      static_cast<uint32_t*>(work.places_out)[to] = place;
  }
}

extern "C" __global__ void __launch_bounds__(kSortThreads) forkpoint_sort_move(const __grid_constant__ SortWork work) {
  __shared__ SortShared shared;
  if (!work.alone) find_offsets(work, shared.offsets, shared.warp_sums);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int bin_count = 1 << work.bits, pair = 2 * static_cast<int>(threadIdx.x);
  const int64_t count = work.index.count(), begin = int64_t{blockIdx.x} * work.chunk;
  const int64_t end = begin + work.chunk < count ? begin + work.chunk : count;
  for (int64_t tile = begin; tile < end; tile += kSortTile) {
    for (int bin = lane; bin < bin_count / 2; bin += 32) shared.used_pairs[warp][bin] = 0;
    __syncwarp();
    TilePart part;
    load_tile(work, tile, end, &part);
    rank_in_warp(work.bits, shared.used[warp], &part);
    __syncthreads();
    const uint32_t totals = add_up_tile(bin_count, &shared);
    __syncthreads();
    put_in_order(part, &shared);
    __syncthreads();
    write_tile(work, static_cast<int>(end - tile < kSortTile ? end - tile : kSortTile), shared);
    __syncthreads();
    if (pair < bin_count) {
      shared.offsets[pair] += totals & 0xffffu;
      shared.offsets[pair + 1] += totals >> 16;
    }
  }
}

}  // namespace forkpoint::device
