// The planner of the device kernels, checked without a device: the kernels' enumeration is followed on the host, and
// every byte must come exactly once, from its address, at its logical position.
#include "kernels/digest_launch.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "lib/digest_magnitude.h"
#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

using Place = std::pair<uint64_t, uint64_t>;  // address, position

constexpr uint64_t kBase = 0x7000000000;

std::multiset<Place> places_of(uint64_t base, const TensorView& view) {
  std::multiset<Place> places;
  const int64_t size = size_bytes(view.dtype);
  int64_t elements = 1;
  for (int d = 0; d < view.dims; ++d) elements *= view.shape[d];
  for (int64_t i = 0; i < elements; ++i) {
    int64_t rest = i, offset = 0, position = view.first_position;
    for (int d = view.dims - 1; d >= 0; --d) {
      offset += rest % view.shape[d] * view.strides[d];
      position += rest % view.shape[d] * view.positions[d];
      rest /= view.shape[d];
    }
    for (int64_t b = 0; b < size; ++b) places.insert({base + offset * size + b, position * size + b});
  }
  return places;
}

void add_unit(const DigestUnits& units, uint64_t row, int64_t position, uint64_t index, std::multiset<Place>& places) {
  const auto run = static_cast<int64_t>(units.common.size_bytes);
  if (units.element_bytes == 0) {
    const int64_t offset = static_cast<int64_t>(index) * 64 - position % 64;
    for (int64_t b = std::max<int64_t>(offset, 0); b < std::min(run, offset + 64); ++b) {
      places.insert({row + b, position + b});
    }
    return;
  }
  const int64_t size = units.element_bytes;
  for (int64_t i = 0; i < 16 / size && static_cast<int64_t>(index) * 16 + i * size < run; ++i) {
    for (int64_t b = 0; b < size; ++b) {
      const uint64_t address = row + i * units.run_stride_bytes + b;
      places.insert({address, position + i * size + b});
    }
  }
}

std::multiset<Place> places_of(const DigestLaunch& launch) {
  std::multiset<Place> places;
  const DigestFlat& flat = launch.flat;
  if (launch.is_flat()) {
    for (uint64_t b = 0; b < flat.size_bytes; ++b) {
      places.insert({reinterpret_cast<uint64_t>(flat.data) + b, flat.first_byte + b});
    }
    return places;
  }
  const DigestUnits& units = launch.units;
  for (uint64_t i = 0; i < units.units; ++i) {
    uint64_t rest = i, index = 0, row = reinterpret_cast<uint64_t>(units.common.data);
    auto position = static_cast<int64_t>(units.common.first_byte);
    for (int d = 0; d < units.dims; ++d) {
      const uint64_t at = rest % units.extent[d];
      rest /= units.extent[d];
      row += at * units.stride_bytes[d];
      position += static_cast<int64_t>(at * units.position_bytes[d]);
      if (d == units.unit_dim) index = at;
    }
    add_unit(units, row, position, index, places);
  }
  return places;
}

void check_plan(uint64_t base, const TensorView& view) {
  DigestTarget target;
  target.ticket = 1;
  const DigestLaunch launch = plan_digest(reinterpret_cast<const void*>(base), view, target, 132);
  const std::multiset<Place> expected = places_of(base, view);
  CHECK(places_of(launch) == expected);
  CHECK(launch.grid == launch.flat.parts);
  CHECK(launch.grid >= 1);
  if (launch.is_flat()) {
    CHECK((base - launch.flat.first_byte) % 16 == 0);
    return;
  }
  CHECK(launch.units.lowest_address == expected.begin()->first);
  CHECK(launch.units.end_address == expected.rbegin()->first + 1);
}

TensorView random_view(std::mt19937_64& random) {
  const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % (high - low + 1)); };
  const auto dtype = static_cast<DType>(pick(0, kDTypeCount - 1));
  const auto dims = static_cast<size_t>(pick(0, 4));
  std::vector<int64_t> shape(dims), strides(dims), global(dims), offset(dims);
  std::vector<size_t> order(dims);
  for (size_t d = 0; d < dims; ++d) {
    shape[d] = pick(1, d + 1 == dims ? 40 : 5);
    offset[d] = pick(0, 3);
    global[d] = offset[d] + shape[d] + pick(0, 3);
    order[d] = d;
  }
  if (pick(0, 1)) std::shuffle(order.begin(), order.end(), random);
  int64_t step = 1;
  for (size_t k = dims; k-- > 0;) {
    const size_t d = order[k];
    strides[d] = step;
    step *= shape[d] + pick(0, 1) * pick(0, 3);
    const int64_t kind = pick(0, 11);
    if (kind == 0) strides[d] = 0;
    if (kind == 1) strides[d] = -strides[d];
  }
  return pick(0, 1) ? shard_view(dtype, shape, strides, global, offset) : whole_view(dtype, shape, strides);
}

}  // namespace

TEST_CASE("a plan reads every byte of a view once, in its logical place") {
  std::mt19937_64 random(7);
  for (int i = 0; i < 1500; ++i) {
    const TensorView view = random_view(random);
    CAPTURE(i);
    check_plan(kBase + (random() % 2 ? 0 : random() % 33), view);
  }
}

TEST_CASE("a contiguous tensor at an aligned address is one flat run, also as a shard of whole rows") {
  const int64_t shape[] = {8, 1024}, global[] = {64, 1024}, offset[] = {16, 0};
  DigestTarget target;
  CHECK(plan_digest(reinterpret_cast<void*>(kBase), whole_view(DType::f32, shape), target, 132).is_flat());
  CHECK(plan_digest(reinterpret_cast<void*>(kBase), shard_view(DType::f32, shape, {}, global, offset), target, 132)
            .is_flat());
  CHECK_FALSE(plan_digest(reinterpret_cast<void*>(kBase + 4), whole_view(DType::f32, shape), target, 132).is_flat());
}

TEST_CASE("a transposed matrix is read in the order of memory") {
  const int64_t shape[] = {300, 200}, strides[] = {1, 300};
  const DigestLaunch launch =
      plan_digest(reinterpret_cast<void*>(kBase), whole_view(DType::f32, shape, strides), {}, 132);
  REQUIRE_FALSE(launch.is_flat());
  CHECK(launch.units.stride_bytes[0] == 4);
  CHECK(launch.units.extent[0] == 300);
}

TEST_CASE("an empty tensor and a misplaced run are planned too") {
  const int64_t empty[] = {4, 0};
  const DigestLaunch nothing = plan_digest(nullptr, whole_view(DType::f32, empty), {}, 132);
  CHECK(nothing.is_flat());
  CHECK(nothing.grid == 1);
  CHECK(nothing.flat.size_bytes == 0);
  const DigestLaunch odd = plan_digest_bytes(reinterpret_cast<void*>(kBase + 3), 5000, DType::raw, 2, {}, 132);
  std::multiset<Place> expected;
  for (uint64_t b = 0; b < 5000; ++b) expected.insert({kBase + 3 + b, 2 + b});
  CHECK(places_of(odd) == expected);
}

TEST_CASE("a batch cuts long tensors at tiles and counts each one's pieces") {
  std::vector<DigestLaunch> singles;
  std::vector<uint64_t> sizes = {0, 1, 4096, 65536, 65536 * 9 + 100, 3};
  for (size_t i = 0; i < sizes.size(); ++i) {
    DigestTarget target;
    target.node = static_cast<uint32_t>(i);
    singles.push_back(plan_digest_bytes(reinterpret_cast<void*>(kBase + (uint64_t{i} << 32) + 48), sizes[i], DType::raw,
                                        48, target, 132));
    REQUIRE(singles.back().is_flat());
  }
  std::vector<DigestFlat> pieces(100);
  DigestLaunch launch;
  CHECK(plan_digest_batch(singles.data(), singles.size(), nullptr, pieces.data(), 5, 132, &launch) == 0);
  const size_t count =
      plan_digest_batch(singles.data(), singles.size(), nullptr, pieces.data(), pieces.size(), 132, &launch);
  REQUIRE(count > 0);
  CHECK(launch.grid == count);
  std::map<uint32_t, uint64_t> bytes, parts;
  for (size_t i = 0; i < count; ++i) {
    const DigestFlat& piece = pieces[i];
    const uint32_t node = piece.target.node;
    CHECK(piece.first_byte == 48 + bytes[node]);
    CHECK(reinterpret_cast<uint64_t>(piece.data) == kBase + (uint64_t{node} << 32) + 48 + bytes[node]);
    bytes[node] += piece.size_bytes;
    ++parts[node];
    if (bytes[node] < sizes[node]) CHECK((piece.first_byte + piece.size_bytes) % kTileBytes == 0);
  }
  for (size_t i = 0; i < count; ++i) CHECK(pieces[i].parts == parts[pieces[i].target.node]);
  for (size_t i = 0; i < sizes.size(); ++i) CHECK(bytes[static_cast<uint32_t>(i)] == sizes[i]);
  CHECK(parts[4] > 1);
}

TEST_CASE("a slot is read only once every cell bears the ticket") {
  DigestSlot slot = {};
  SlotResult result;
  for (int i = 0; i < kSlotCells; ++i) {
    CHECK_FALSE(read_slot(slot, 9, &result));
    slot.cell[i] = uint64_t{9} << 32 | static_cast<uint32_t>(100 + i);
  }
  REQUIRE(read_slot(slot, 9, &result));
  CHECK_FALSE(read_slot(slot, 8, &result));
  // A half's sum may exceed 32 bits: cell 1 carries into cell 2.
  CHECK(result.raw.digest.a == 100 + (uint64_t{101 + 102} << 32));
  CHECK(result.raw.digest.b == 104 + (uint64_t{105 + 106} << 32));
  CHECK(result.raw.magnitude.largest_finite == 108 + (uint64_t{109 + 110} << 32));
  CHECK(result.raw.word_sum == (112 | uint64_t{113} << 32));
  CHECK(result.raw.magnitude.nonfinite == (114 | uint64_t{115} << 32));
  CHECK(result.node == 116);
  CHECK(result.ordinal == 117);
}

}  // namespace forkpoint
