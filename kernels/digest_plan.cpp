#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/digest_launch.h"
#include "lib/digest_magnitude.h"
#include "lib/digest_mix.h"
#include "lib/digest_view_plan.h"

namespace forkpoint {
namespace {

constexpr uint32_t kBlockThreads = kDigestBlockThreads;
constexpr uint64_t kWarps = kBlockThreads / 32;
constexpr uint64_t kFlatBlocksPerMultiprocessor = 1024 / kBlockThreads;
constexpr uint64_t kUnitBlocksPerMultiprocessor = 768 / kBlockThreads;
constexpr uint64_t kUnitBytes = 64;
constexpr uint64_t kGatherBytes = 16;

DigestLoop loop_of(const MagnitudeRule& rule) {
  if (rule.kind == MagnitudeKind::none) return kLoopNone;
  const int first = rule.kind == MagnitudeKind::masked ? kLoopMasked8 : kLoopAbsolute8;
  return static_cast<DigestLoop>(first + std::countr_zero(rule.bytes));
}

uint32_t word_mask(const MagnitudeRule& rule) {
  const auto mask = static_cast<uint32_t>(rule.bytes == 8 ? rule.mask >> 32 : rule.mask);
  return rule.bytes == 1 ? mask * 0x01010101u : rule.bytes == 2 ? mask * 0x00010001u : mask;
}

DigestFlat flat_run(const void* data, uint64_t size_bytes, const MagnitudeRule& rule, uint64_t first_byte,
                    const DigestTarget& target) {
  DigestFlat flat = {};
  flat.target = target;
  flat.data = data;
  flat.size_bytes = size_bytes;
  flat.first_byte = first_byte;
  flat.largest_finite = rule.nonfinite_from == ~uint64_t{0} ? ~uint64_t{0} : rule.nonfinite_from - 1;
  flat.mask = word_mask(rule);
  flat.parts = 1;
  flat.loop = loop_of(rule);
  return flat;
}

uint64_t tiles_of(const DigestFlat& flat) {
  if (flat.size_bytes == 0) return 0;
  return (flat.first_byte + flat.size_bytes - 1) / kTileBytes - flat.first_byte / kTileBytes + 1;
}

// As many blocks as run at once, or as few as give every warp the same number of tiles: the slowest warp decides.
uint32_t flat_blocks(uint64_t tiles, int multiprocessors) {
  const uint64_t most = kFlatBlocksPerMultiprocessor * static_cast<uint64_t>(multiprocessors);
  const uint64_t rounds = std::max<uint64_t>(1, (tiles + most * kWarps - 1) / (most * kWarps));
  const uint64_t blocks = (tiles + rounds * kWarps - 1) / (rounds * kWarps);
  return static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, most));
}

void launch_flat(const DigestFlat& flat, int multiprocessors, DigestLaunch& launch) {
  launch.kernel = static_cast<int>(flat.loop);
  launch.flat = flat;
  launch.grid = launch.flat.parts = flat_blocks(tiles_of(flat), multiprocessors);
  launch.block = kBlockThreads;
}

// ---- Views that are not one well-placed run.

struct Axis {
  uint64_t extent;
  int64_t stride_bytes;
  uint64_t position_bytes;
  bool is_unit = false;
};

struct Axes {
  int count = 0;
  Axis axis[kUnitDims] = {};
  void add(const Axis& next) { axis[count++] = next; }
};

uint64_t magnitude_of(int64_t value) {
  return value < 0 ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
}

// Adjacent threads take adjacent memory, whatever the logical order: the sum does not mind.
void order_by_memory(Axes& axes) {
  for (int i = 1; i < axes.count; ++i) {
    for (int k = i; k > 0; --k) {
      if (magnitude_of(axes.axis[k - 1].stride_bytes) <= magnitude_of(axes.axis[k].stride_bytes)) break;
      std::swap(axes.axis[k - 1], axes.axis[k]);
    }
  }
}

void bound_addresses(const void* data, const ViewPlan& plan, uint64_t element, DigestUnits& work) {
  work.lowest_address = work.end_address = reinterpret_cast<uint64_t>(data);
  work.end_address += element;
  const auto widen = [&](const ViewDim& dim) {
    const int64_t reach = (dim.extent - 1) * dim.stride * static_cast<int64_t>(element);
    (reach < 0 ? work.lowest_address : work.end_address) += static_cast<uint64_t>(reach);
  };
  for (int d = 0; d < plan.dims; ++d) widen(plan.dim[d]);
  widen(plan.inner);
}

// Every run starts at a multiple of `bytes` in memory.
bool runs_aligned(const void* data, const Axes& axes, uint64_t bytes) {
  uint64_t bits = reinterpret_cast<uint64_t>(data);
  for (int i = 0; i < axes.count; ++i) {
    if (!axes.axis[i].is_unit) bits |= static_cast<uint64_t>(axes.axis[i].stride_bytes);
  }
  return bits % bytes == 0;
}

// Every run starts at a multiple of `bytes` in the logical tensor.
bool runs_placed(uint64_t first_byte, const Axes& axes, uint64_t bytes) {
  uint64_t bits = first_byte;
  for (int i = 0; i < axes.count; ++i) {
    if (!axes.axis[i].is_unit) bits |= axes.axis[i].position_bytes;
  }
  return bits % bytes == 0;
}

// The dimension along which one element follows the other in the logical tensor becomes the run.
void choose_run(ViewPlan& plan) {
  for (int d = 0; d < plan.dims && plan.inner.position != 1; ++d) {
    if (plan.dim[d].position == 1) std::swap(plan.dim[d], plan.inner);
  }
  if (plan.inner.position == 1) return;
  plan.dim[plan.dims++] = plan.inner;
  plan.inner = {};
}

void launch_units(const void* data, ViewPlan plan, const MagnitudeRule& rule, const DigestFlat& common,
                  int multiprocessors, DigestLaunch& launch) {
  const uint64_t element = rule.bytes;
  DigestUnits units = {};
  units.common = common;
  choose_run(plan);
  bound_addresses(data, plan, element, units);
  Axes axes;
  for (int d = 0; d < plan.dims; ++d) {
    axes.add({static_cast<uint64_t>(plan.dim[d].extent), plan.dim[d].stride * static_cast<int64_t>(element),
              static_cast<uint64_t>(plan.dim[d].position) * element});
  }
  const auto run_bytes = static_cast<uint64_t>(plan.inner.extent) * element;
  units.common.size_bytes = run_bytes;
  if (plan.inner.stride == 1) {
    const uint64_t slack = runs_placed(common.first_byte, axes, kUnitBytes) ? 0 : kUnitBytes - 1;
    axes.add({(run_bytes + slack + kUnitBytes - 1) / kUnitBytes, 0, 0, true});
  } else {
    units.element_bytes = static_cast<int32_t>(element);
    units.run_stride_bytes = plan.inner.stride * static_cast<int64_t>(element);
    units.load_bytes = runs_aligned(data, axes, element) ? static_cast<int32_t>(element) : 1;
    axes.add({(run_bytes + kGatherBytes - 1) / kGatherBytes,
              units.run_stride_bytes * static_cast<int64_t>(kGatherBytes / element), kGatherBytes, true});
  }
  order_by_memory(axes);
  units.units = 1;
  units.dims = axes.count;
  for (int i = 0; i < axes.count; ++i) {
    if (axes.axis[i].is_unit) units.unit_dim = i;
    units.extent[i] = axes.axis[i].extent;
    units.stride_bytes[i] = axes.axis[i].stride_bytes;
    units.position_bytes[i] = axes.axis[i].position_bytes;
    units.units *= axes.axis[i].extent;
  }
  const uint64_t most = kUnitBlocksPerMultiprocessor * static_cast<uint64_t>(multiprocessors);
  units.common.parts =
      static_cast<uint32_t>(std::clamp<uint64_t>((units.units + kBlockThreads - 1) / kBlockThreads, 1, most));
  launch.kernel = kLoopCount + static_cast<int>(common.loop);
  launch.grid = units.common.parts;
  launch.block = kBlockThreads;
  launch.units = units;
}

// A complex element is two real ones that follow each other.
TensorView real_view(const TensorView& view, int64_t parts) {
  TensorView real = view;
  real.first_position *= parts;
  for (int d = 0; d < view.dims; ++d) {
    real.strides[d] *= parts;
    real.positions[d] *= parts;
  }
  return real;
}

}  // namespace

DigestLaunch plan_digest(const void* data, const TensorView& view, const DigestTarget& target, int multiprocessors) {
  const MagnitudeRule rule = magnitude_rule(view.dtype);
  const int64_t parts = size_bytes(view.dtype) / rule.bytes;
  ViewPlan plan = plan_view(real_view(view, parts));
  if (parts != 1) {
    if (plan.inner.stride == parts && plan.inner.position == parts) {
      plan.inner = {plan.inner.extent * parts, 1, 1};
    } else {
      plan.dim[plan.dims++] = plan.inner;
      plan.inner = {parts, 1, 1};
    }
  }
  const uint64_t first_byte =
      static_cast<uint64_t>(view.first_position) * static_cast<uint64_t>(size_bytes(view.dtype));
  const bool one_run = plan.dims == 0 && plan.inner.stride == 1 && plan.inner.position == 1;
  const auto run_bytes = static_cast<uint64_t>(plan.inner.extent) * rule.bytes;
  const bool empty = plan.elements == 0;
  const DigestFlat common = flat_run(data, empty ? 0 : run_bytes, rule, empty ? 0 : first_byte, target);
  DigestLaunch launch;
  if (empty || (one_run && (reinterpret_cast<uint64_t>(data) - first_byte) % 16 == 0)) {
    launch_flat(common, multiprocessors, launch);
  } else {
    launch_units(data, plan, rule, common, multiprocessors, launch);
  }
  return launch;
}

DigestLaunch plan_digest_bytes(const void* data, size_t size, DType dtype, uint64_t first_byte,
                               const DigestTarget& target, int multiprocessors) {
  MagnitudeRule rule = magnitude_rule(dtype);
  if (size % rule.bytes != 0 || first_byte % rule.bytes != 0) rule = {};
  const DigestFlat common = flat_run(data, size, rule, first_byte, target);
  DigestLaunch launch;
  if (size == 0 || (reinterpret_cast<uint64_t>(data) - first_byte) % 16 == 0) {
    launch_flat(common, multiprocessors, launch);
    return launch;
  }
  ViewPlan plan;
  plan.elements = plan.inner.extent = static_cast<int64_t>(size / rule.bytes);
  launch_units(data, plan, rule, common, multiprocessors, launch);
  return launch;
}

size_t plan_digest_batch(const DigestLaunch* singles, size_t count, const DigestFlat* device_pieces, DigestFlat* pieces,
                         size_t capacity, int multiprocessors, DigestLaunch* launch) {
  uint64_t tiles = 0;
  for (size_t i = 0; i < count; ++i) tiles += tiles_of(singles[i].flat);
  // Small enough that the last wave of blocks is short, large enough to be worth a block's start and end.
  const uint64_t waves = 8 * kFlatBlocksPerMultiprocessor * static_cast<uint64_t>(multiprocessors);
  const uint64_t piece_bytes = std::max<uint64_t>({4 * kWarps, tiles / waves, tiles / kMostParts + 2}) * kTileBytes;
  size_t used = 0;
  for (size_t i = 0; i < count; ++i) {
    const DigestFlat& whole = singles[i].flat;
    const size_t first = used;
    uint64_t begin = 0;
    do {
      if (used == capacity) return 0;
      // Pieces end where a tile ends.
      const uint64_t end = std::min(whole.size_bytes, begin + piece_bytes - (whole.first_byte + begin) % kTileBytes);
      DigestFlat& piece = pieces[used++];
      piece = whole;
      piece.data = static_cast<const char*>(whole.data) + begin;
      piece.first_byte = whole.first_byte + begin;
      piece.size_bytes = end - begin;
      begin = end;
    } while (begin < whole.size_bytes);
    for (size_t k = first; k < used; ++k) pieces[k].parts = static_cast<uint32_t>(used - first);
  }
  launch->kernel = kDigestBatchKernel;
  launch->grid = static_cast<uint32_t>(used);
  launch->block = kBlockThreads;
  launch->shared_bytes = 0;
  launch->batch = {device_pieces};
  return used;
}

}  // namespace forkpoint
