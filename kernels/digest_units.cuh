// Views that are no single well-placed run: rows, shards, transposes, broadcasts, odd addresses. A thread takes a unit:
// up to 64 adjacent bytes of a run, cut where 64-byte blocks of the logical tensor end (so that all its words have one
// tile key), or 16 bytes gathered element by element. Units are enumerated in the order of memory, so that the loads of
// a warp lie together also when the logical order does not.
#pragma once

#include <cstdint>

#include "kernels/digest_flat.cuh"

namespace forkpoint::device {

inline constexpr int kUnitBytes = 64;
inline constexpr int kGatherBytes = 16;

// Both keys of a word side by side. After every 16 words there is room for two more, so that threads whose units are 16
// words apart, as those of a row are, read from different banks. The first words follow once more behind the last.
struct UnitsShared {
  static constexpr uint32_t kEntries = kTileWords + 32;
  static constexpr __host__ __device__ uint32_t place(uint32_t in_tile) { return in_tile + in_tile / 16 * 2; }
  alignas(16) uint2 word_key[kEntries + kEntries / 16 * 2];
  uint64_t sums[kBlockWarps][kPartCount];
};

template <DigestLoop kLoop>
struct UnitSums {
  uint64_t a = 0, b = 0, plain = 0;
  Magnitude<kLoop> magnitude;
  __device__ explicit UnitSums(MagnitudeParams params) : magnitude(params) {}

  // A 64-byte block of the logical tensor.
  __device__ void add_block(const uint32_t (&words)[16], uint64_t block, const UnitsShared& shared) {
    take_magnitudes(words);
    const uint32_t in_tile = 16 * (static_cast<uint32_t>(block) % (kTileWords / 16));
    const auto* keys = reinterpret_cast<const uint4*>(&shared.word_key[UnitsShared::place(in_tile)]);
    uint64_t sum_a = 0, sum_b = 0;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const uint4 pair = keys[i / 2];
      add_product(sum_a, pair.x, words[i]);
      add_product(sum_b, pair.y, words[i]);
      add_product(sum_a, pair.z, words[i + 1]);
      add_product(sum_b, pair.w, words[i + 1]);
      plain += words[i];
      plain += words[i + 1];
    }
    finish_tile(sum_a, sum_b, block / (kTileWords / 16));
  }

  // 16 bytes from byte `position` of the logical tensor on: its words may lie across these, and in two tiles. Elements
  // do not straddle words as they stand here.
  __device__ void add_anywhere(const uint32_t (&words)[4], uint64_t position, const UnitsShared& shared) {
    take_magnitudes(words);
    const uint32_t shift = 8 * (static_cast<uint32_t>(position) & 3);
    const uint32_t in_tile = static_cast<uint32_t>(position / 4) % kTileWords;
    uint64_t sum_a[2] = {}, sum_b[2] = {};
#pragma unroll
    for (int i = 0; i <= 4; ++i) {
      const uint32_t word = __funnelshift_l(i == 0 ? 0 : words[i - 1], i == 4 ? 0 : words[i], shift);
      const uint2 key = shared.word_key[UnitsShared::place(in_tile + i)];
      const bool here = in_tile + i < kTileWords;
      add_product(sum_a[0], key.x, here ? word : 0);
      add_product(sum_b[0], key.y, here ? word : 0);
      add_product(sum_a[1], key.x, here ? 0 : word);
      add_product(sum_b[1], key.y, here ? 0 : word);
      plain += word;
    }
    const uint64_t tile = position / kTileBytes;
    finish_tile(sum_a[0], sum_b[0], tile);
    if (in_tile + 4 >= kTileWords) finish_tile(sum_a[1], sum_b[1], tile + 1);
  }
  __device__ Sums sums() const { return {a, b, plain, magnitude.largest(), magnitude.nonfinite()}; }

 private:
  template <int N>
  __device__ void take_magnitudes(const uint32_t (&words)[N]) {
    magnitude.add(words);
    if (!magnitude.settle()) magnitude.recount(words);
  }
  __device__ void finish_tile(uint64_t sum_a, uint64_t sum_b, uint64_t tile) {
    const TileKeys keys = tile_keys(tile);
    a += keys.a * sum_a;
    b += keys.b * sum_b;
  }
};

struct Unit {
  uint64_t address;   // of its run, or of its first element where they are gathered
  uint64_t position;  // likewise
  uint64_t index;     // within the run
};

template <typename Index>
__device__ inline Unit locate(const DigestUnits& work, Index index) {
  Unit unit = {reinterpret_cast<uint64_t>(work.common.data), work.common.first_byte, 0};
  for (int d = 0; d < work.dims; ++d) {
    Index at = index;
    if (d + 1 < work.dims) {
      const Index extent = static_cast<Index>(work.extent[d]);
      index = at / extent;
      at -= index * extent;
    }
    unit.address += static_cast<uint64_t>(at) * static_cast<uint64_t>(work.stride_bytes[d]);
    unit.position += static_cast<uint64_t>(at) * work.position_bytes[d];
    if (d == work.unit_dim) unit.index = at;
  }
  return unit;
}

// The lowest `bytes` bytes of a word set, for any number.
__device__ inline uint32_t low_bytes(int bytes) { return bytes >= 4 ? ~0u : bytes <= 0 ? 0u : ~(~0u << (8 * bytes)); }

// 64 bytes from any address, through aligned loads; of what lies outside the view nothing is read. Unlike the tiles of
// a flat run these loads share sectors with each other, which the first-level cache must keep meanwhile.
__device__ inline void load_unit(uint64_t address, const DigestUnits& work, uint32_t (&words)[16]) {
  const uint32_t shift = static_cast<uint32_t>(address) & 15;
  const uint64_t aligned = address - shift;
  const uint64_t end = aligned + (shift == 0 ? 64 : 80);
  uint4 block[5] = {};
  if (aligned >= work.lowest_address && end <= work.end_address) {
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] = __ldg(reinterpret_cast<const uint4*>(aligned) + i);
    if (shift != 0) block[4] = __ldg(reinterpret_cast<const uint4*>(aligned) + 4);
  } else {
#pragma unroll
    for (int i = 0; i < 5; ++i) block[i] = load_block_within(aligned + 16 * i, work.lowest_address, work.end_address);
  }
  uint32_t raw[20];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    raw[4 * i] = block[i].x;
    raw[4 * i + 1] = block[i].y;
    raw[4 * i + 2] = block[i].z;
    raw[4 * i + 3] = block[i].w;
  }
  if (shift != 0) {
    // By 8, by 4, then by the rest: registers cannot be indexed by a number known only now.
    const bool by_8 = shift & 8, by_4 = shift & 4;
#pragma unroll
    for (int i = 0; i < 18; ++i) raw[i] = by_8 ? raw[i + 2] : raw[i];
#pragma unroll
    for (int i = 0; i < 17; ++i) raw[i] = by_4 ? raw[i + 1] : raw[i];
#pragma unroll
    for (int i = 0; i < 16; ++i) raw[i] = __funnelshift_r(raw[i], raw[i + 1], 8 * (shift & 3));
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = raw[i];
}

template <DigestLoop kLoop>
__device__ void add_adjacent(const DigestUnits& work, const Unit& unit, const UnitsShared& shared,
                             UnitSums<kLoop>& sums) {
  const int head = static_cast<int>(unit.position % kUnitBytes);
  const int64_t offset = static_cast<int64_t>(unit.index * kUnitBytes) - head;  // of the block's first byte in the run
  const int64_t left = static_cast<int64_t>(work.common.size_bytes) - offset;
  if (left <= 0) return;
  uint32_t words[16];
  load_unit(unit.address + static_cast<uint64_t>(offset), work, words);
  const int begin = unit.index == 0 ? head : 0;
  const int end = static_cast<int>(min(left, int64_t{kUnitBytes}));
  if (begin > 0 || end < kUnitBytes) {
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] &= low_bytes(end - 4 * i) & ~low_bytes(begin - 4 * i);
  }
  sums.add_block(words, unit.position / kUnitBytes + unit.index, shared);
}

template <int kElement>
__device__ inline uint64_t load_element(uint64_t address, bool whole) {
  if constexpr (kElement > 1) {
    if (whole) {
      if constexpr (kElement == 2) return *reinterpret_cast<const uint16_t*>(address);
      if constexpr (kElement == 4) return *reinterpret_cast<const uint32_t*>(address);
      if constexpr (kElement == 8) return *reinterpret_cast<const uint64_t*>(address);
    }
  }
  uint64_t value = 0;
#pragma unroll
  for (int i = 0; i < kElement; ++i) value |= uint64_t{*reinterpret_cast<const unsigned char*>(address + i)} << (8 * i);
  return value;
}

constexpr int element_bytes(DigestLoop loop) {
  switch (loop) {
    case kLoopMasked16:
    case kLoopAbsolute16:
      return 2;
    case kLoopMasked32:
    case kLoopAbsolute32:
      return 4;
    case kLoopMasked64:
    case kLoopAbsolute64:
      return 8;
    default:
      return 1;
  }
}

template <DigestLoop kLoop>
__device__ void add_gathered(const DigestUnits& work, const Unit& unit, const UnitsShared& shared,
                             UnitSums<kLoop>& sums) {
  constexpr int kElement = element_bytes(kLoop);
  const int64_t left = static_cast<int64_t>(work.common.size_bytes) - static_cast<int64_t>(unit.index) * kGatherBytes;
  const bool whole = work.load_bytes == kElement;
  uint32_t words[kGatherBytes / 4] = {};
#pragma unroll
  for (int i = 0; i < kGatherBytes / kElement; ++i) {
    if (i * kElement >= left) break;
    const uint64_t value =
        load_element<kElement>(unit.address + static_cast<uint64_t>(i * work.run_stride_bytes), whole);
    constexpr int kPerWord = kElement < 4 ? 4 / kElement : 1;
    if constexpr (kElement < 4) words[i / kPerWord] |= static_cast<uint32_t>(value) << (8 * kElement * (i % kPerWord));
    if constexpr (kElement == 4) words[i] = static_cast<uint32_t>(value);
    if constexpr (kElement == 8) {
      words[2 * i] = static_cast<uint32_t>(value);
      words[2 * i + 1] = static_cast<uint32_t>(value >> 32);
    }
  }
  sums.add_anywhere(words, unit.position, shared);
}

template <DigestLoop kLoop, typename Index>
__device__ void add_units(const DigestUnits& work, const UnitsShared& shared, UnitSums<kLoop>& sums) {
  const Index step = gridDim.x * kBlockThreads;
  const auto end = static_cast<Index>(work.units);
  for (Index i = blockIdx.x * kBlockThreads + threadIdx.x; i < end; i += step) {
    const Unit unit = locate<Index>(work, i);
    if (work.element_bytes == 0) {
      add_adjacent(work, unit, shared, sums);
    } else {
      add_gathered(work, unit, shared, sums);
    }
  }
}

template <DigestLoop kLoop>
__device__ void digest_units(const DigestUnits& work, UnitsShared& shared) {
  for (uint32_t i = threadIdx.x; i < UnitsShared::kEntries; i += kBlockThreads) {
    shared.word_key[UnitsShared::place(i)] =
        make_uint2(kKeyTable.key[0][i % kTileWords], kKeyTable.key[1][i % kTileWords]);
  }
  __syncthreads();
  UnitSums<kLoop> sums({work.common.mask, work.common.largest_finite});
  // Room for one more step of the whole grid, so that the 32-bit counter cannot wrap.
  if (work.units < 0xF0000000u) {
    add_units<kLoop, uint32_t>(work, shared, sums);
  } else {
    add_units<kLoop, uint64_t>(work, shared, sums);
  }
  finish_digest<kLoop != kLoopNone>(sums.sums(), work.common.target, blockIdx.x, work.common.parts, shared.sums);
}

}  // namespace forkpoint::device
