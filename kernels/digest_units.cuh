// Views that are neither a run nor dense rows: shards of columns, transposes, broadcasts, very short rows. A thread takes a unit: up
// to 64 adjacent bytes of a run, or 16 bytes gathered element by element, and places each word by its logical position.
// Units are enumerated in the order of memory, so that the loads of a warp lie together also when the logical order does not.
#pragma once

#include <cstdint>

#include "kernels/digest_rows.cuh"

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

  // words[0] starts at byte `position` of the logical tensor (negative in front of a run: such bytes are zero). Elements do
  // not straddle words as they stand here.
  template <int N>
  __device__ void add(const uint32_t (&words)[N], int64_t position, const UnitsShared& shared) {
    magnitude.add(words);
    if (!magnitude.settle()) magnitude.recount(words);
    const uint32_t in_tile = static_cast<uint32_t>(position >> 2) % kTileWords;
    if ((position & 3) == 0 && in_tile % 16 == 0) {
      add_aligned(words, position >> 11, in_tile, shared);
    } else {
      add_shifted(words, position, in_tile, shared);
    }
  }
  __device__ Sums sums() const { return {a, b, plain, magnitude.largest(), magnitude.nonfinite()}; }

 private:
  template <int N>
  __device__ void add_aligned(const uint32_t (&words)[N], int64_t tile, uint32_t in_tile, const UnitsShared& shared) {
    const auto* keys = reinterpret_cast<const uint4*>(&shared.word_key[UnitsShared::place(in_tile)]);
    uint64_t sum_a = 0, sum_b = 0;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint4 pair = keys[i / 2];
      add_product(sum_a, pair.x, words[i]);
      add_product(sum_b, pair.y, words[i]);
      add_product(sum_a, pair.z, words[i + 1]);
      add_product(sum_b, pair.w, words[i + 1]);
      plain += words[i];
      plain += words[i + 1];
    }
    const TileKeys tile_key = tile_keys(static_cast<uint64_t>(tile));
    a += tile_key.a * sum_a;
    b += tile_key.b * sum_b;
  }

  // The logical words lie across these, and may lie in two tiles.
  template <int N>
  __device__ void add_shifted(const uint32_t (&words)[N], int64_t position, uint32_t in_tile, const UnitsShared& shared) {
    const uint32_t shift = 8 * (static_cast<uint32_t>(position) & 3);
    uint64_t sum_a = 0, sum_b = 0, beyond_a = 0, beyond_b = 0;
    const uint32_t here = kTileWords - in_tile;  // words left in this tile
    const uint2* keys = &shared.word_key[UnitsShared::place(in_tile)];
    const uint32_t room = 16 - in_tile % 16;  // entries before the next gap of the table
#pragma unroll
    for (int i = 0; i <= N; ++i) {
      const uint32_t word = __funnelshift_l(i == 0 ? 0 : words[i - 1], i == N ? 0 : words[i], shift);
      const uint2 key = keys[i + (i >= room ? 2 : 0)];
      add_product(sum_a, key.x, word);
      add_product(sum_b, key.y, word);
      plain += word;
    }
    const auto tile = static_cast<uint64_t>(position >> 11);
    const TileKeys tile_key = tile_keys(tile);
    a += tile_key.a * sum_a;
    b += tile_key.b * sum_b;
    if (here > N) return;
    // Those beyond the tile were given the wrong tile's key.
#pragma unroll
    for (int i = 1; i <= N; ++i) {
      const uint32_t word = __funnelshift_l(words[i - 1], i == N ? 0 : words[i], shift);
      const uint2 key = keys[i + (i >= room ? 2 : 0)];
      add_product(beyond_a, key.x, i < here ? 0 : word);
      add_product(beyond_b, key.y, i < here ? 0 : word);
    }
    const TileKeys next = tile_keys(tile + 1);
    a += (next.a - tile_key.a) * beyond_a;
    b += (next.b - tile_key.b) * beyond_b;
  }
};
static_assert(kTileBytes == 1 << 11, "shifts by 11 divide by it");

struct Unit {
  uint64_t row_address;
  int64_t row_position;
  uint64_t index;  // within the run
};

template <typename Index>
__device__ inline Unit locate(const DigestUnits& work, Index index) {
  Unit unit = {reinterpret_cast<uint64_t>(work.common.data), static_cast<int64_t>(work.common.first_byte), 0};
  for (int d = 0; d < work.dims; ++d) {
    Index at = index;
    if (d + 1 < work.dims) {
      const Index extent = static_cast<Index>(work.extent[d]);
      index = at / extent;
      at -= index * extent;
    }
    unit.row_address += static_cast<uint64_t>(at) * static_cast<uint64_t>(work.stride_bytes[d]);
    unit.row_position += static_cast<int64_t>(at * work.position_bytes[d]);
    if (d == work.unit_dim) unit.index = at;
  }
  return unit;
}

template <DigestLoop kLoop>
__device__ void add_adjacent(const DigestUnits& work, const Unit& unit, const UnitsShared& shared, UnitSums<kLoop>& sums) {
  const int head = static_cast<int>(unit.row_address & 15);
  const int64_t offset = static_cast<int64_t>(unit.index * kUnitBytes) - head;  // of the unit's first byte in the run
  const int64_t left = static_cast<int64_t>(work.common.size_bytes) - offset;
  if (left <= 0) return;
  const int begin = unit.index == 0 ? head : 0;
  const int end = static_cast<int>(min(left, int64_t{kUnitBytes}));
  const uint64_t address = unit.row_address + static_cast<uint64_t>(offset);
  uint4 block[kUnitBytes / 16];
  // Bytes of the same 16-byte blocks beside the run may be read, but none outside the view.
  if (address >= work.lowest_address && address + kUnitBytes <= work.end_address) {
#pragma unroll
    for (int i = 0; i < kUnitBytes / 16; ++i) block[i] = load_cached(address + 16 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kUnitBytes / 16; ++i) {
      block[i] = load_block_within(address + 16 * i, work.lowest_address, work.end_address);
    }
  }
  uint32_t words[kUnitBytes / 4];
#pragma unroll
  for (int i = 0; i < kUnitBytes / 16; ++i) {
    words[4 * i] = block[i].x;
    words[4 * i + 1] = block[i].y;
    words[4 * i + 2] = block[i].z;
    words[4 * i + 3] = block[i].w;
  }
  if (begin > 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] &= ~low_bytes(begin - 4 * i);
  }
  if (end < kUnitBytes) {
#pragma unroll
    for (int i = 0; i < kUnitBytes / 4; ++i) words[i] &= low_bytes(end - 4 * i);
  }
  sums.add(words, unit.row_position + offset, shared);
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
    case kLoopMasked16: case kLoopAbsolute16: return 2;
    case kLoopMasked32: case kLoopAbsolute32: return 4;
    case kLoopMasked64: case kLoopAbsolute64: return 8;
    default: return 1;
  }
}

template <DigestLoop kLoop>
__device__ void add_gathered(const DigestUnits& work, const Unit& unit, const UnitsShared& shared, UnitSums<kLoop>& sums) {
  constexpr int kElement = element_bytes(kLoop);
  const int64_t left = static_cast<int64_t>(work.common.size_bytes) - static_cast<int64_t>(unit.index) * kGatherBytes;
  const bool whole = work.load_bytes == kElement;
  uint32_t words[kGatherBytes / 4] = {};
#pragma unroll
  for (int i = 0; i < kGatherBytes / kElement; ++i) {
    if (i * kElement >= left) break;
    const uint64_t value =
        load_element<kElement>(unit.row_address + static_cast<uint64_t>(i * work.run_stride_bytes), whole);
    constexpr int kPerWord = kElement < 4 ? 4 / kElement : 1;
    if constexpr (kElement < 4) words[i / kPerWord] |= static_cast<uint32_t>(value) << (8 * kElement * (i % kPerWord));
    if constexpr (kElement == 4) words[i] = static_cast<uint32_t>(value);
    if constexpr (kElement == 8) {
      words[2 * i] = static_cast<uint32_t>(value);
      words[2 * i + 1] = static_cast<uint32_t>(value >> 32);
    }
  }
  sums.add(words, unit.row_position, shared);
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
    shared.word_key[UnitsShared::place(i)] = make_uint2(kKeyTable.key[0][i % kTileWords], kKeyTable.key[1][i % kTileWords]);
  }
  __syncthreads();
  UnitSums<kLoop> sums({work.common.mask, work.common.largest_finite});
  // Room for one more step of the whole grid, so that the 32-bit counter cannot wrap.
  if (work.units < 0xF0000000u) {
    add_units<kLoop, uint32_t>(work, shared, sums);
  } else {
    add_units<kLoop, uint64_t>(work, shared, sums);
  }
  finish_digest(sums.sums(), work.common.target, work.common.parts, shared.sums);
}

}  // namespace forkpoint::device
