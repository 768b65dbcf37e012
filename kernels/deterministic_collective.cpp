#include "kernels/deterministic_collective.h"

#include <algorithm>
#include <cstring>

#include "kernels/collective_vectors.h"

namespace forkpoint::collective {
namespace {

// The order of kernels: the integers; 8-bit floats, then wide; the other floats, each followed by its tree; the wide
// ones alike.
constexpr DType kTypes[] = {DType::i8,     DType::u8,     DType::i32, DType::u32, DType::i64, DType::u64,
                            DType::f8e4m3, DType::f8e5m2, DType::f32, DType::f64, DType::f16, DType::bf16};
constexpr int kFirstFloat = 6, kFirstWithTree = 8, kFirst16Bit = 10;

int index_of(DType dtype) {
  const auto* found = std::find(std::begin(kTypes), std::end(kTypes), dtype);
  return found == std::end(kTypes) ? -1 : static_cast<int>(found - std::begin(kTypes));
}

int kernel_of(const CollectiveSpec& spec) {
  const int index = index_of(spec.dtype);
  if (index < kFirstFloat) return index;
  if (index < kFirstWithTree) return index + (spec.wide ? 2 : 0);
  const int wide = spec.wide && index >= kFirst16Bit ? 2 : 0;
  return kFirstWithTree + 2 + 2 * (index - kFirstWithTree + wide) + (spec.tree ? 1 : 0);
}

bool is_float(DType dtype) { return index_of(dtype) >= kFirstFloat; }

// Calls body.operator()<Arithmetic>().
template <bool kWide, typename Body>
void with_arithmetic(DType dtype, Body body) {
  switch (dtype) {
#define FORKPOINT_CASE(type) \
  case DType::type:          \
    return body.template operator()<Arithmetic<DType::type, kWide>>();
    FORKPOINT_CASE(i8)
    FORKPOINT_CASE(u8)
    FORKPOINT_CASE(i32)
    FORKPOINT_CASE(u32)
    FORKPOINT_CASE(i64)
    FORKPOINT_CASE(u64)
    FORKPOINT_CASE(f32)
    FORKPOINT_CASE(f64)
    FORKPOINT_CASE(f16)
    FORKPOINT_CASE(bf16)
    FORKPOINT_CASE(f8e4m3)
    FORKPOINT_CASE(f8e5m2)
#undef FORKPOINT_CASE
    default:
      return;
  }
}

template <typename A>
typename A::Stored read(const void* address, uint64_t index) {
  typename A::Stored stored;
  memcpy(&stored, static_cast<const char*>(address) + index * sizeof(stored), sizeof(stored));
  return stored;
}

// Bits of the factor as a Value: what an average of floats is scaled by, or the given one.
template <typename A>
uint64_t factor_bits(const CollectiveSpec& spec, uint32_t ranks) {
  typename A::Value value = A::load(read<A>(&spec.factor, 0));
  if (spec.op == Op::average) value = static_cast<typename A::Value>(1) / static_cast<typename A::Value>(ranks);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(value));
  return bits;
}

// What the kernel is to do for the op that was asked for.
void set_operation(const CollectiveSpec& spec, uint32_t ranks, CollectiveParams* params) {
  const bool scales = spec.op == Op::scaled_sum || (spec.op == Op::average && is_float(spec.dtype));
  params->op = scales ? Op::scaled_sum : spec.op;
  if (!scales) return;
  if (spec.op == Op::scaled_sum) params->factor_at = spec.factor_at;
  with_arithmetic<false>(spec.dtype, [&]<typename A>() { params->factor = factor_bits<A>(spec, ranks); });
}

bool is_sound(const StagingShape& shape) {
  const bool slots = shape.slots >= 4 && (shape.slots & (shape.slots - 1)) == 0;
  return shape.ranks >= 1 && shape.ranks <= kMostRanks && shape.blocks >= 1 && shape.blocks <= kMostBlocks && slots &&
         shape.room() >= 128;
}

bool fits_lines(const CollectiveParams& call, const CollectiveTuning& tuning) {
  const uint64_t others = call.shape.ranks - 1;
  return call.part_bytes <= uint64_t{call.shape.line_blocks()} * call.shape.block_lines() * kLineData &&
         call.part_bytes * others <= tuning.low_latency_bytes && tuning.low_latency_bytes > 0;
}

// To a block as few lines as all blocks let it have: one a thread, if that is enough.
void cut_lines(CollectiveParams* call) {
  constexpr uint64_t kRound = uint64_t{kBlockThreads} * kLineData;
  const uint64_t blocks = call->shape.line_blocks();
  call->chunk_bytes = static_cast<uint32_t>(((call->part_bytes + blocks - 1) / blocks + kRound - 1) / kRound * kRound);
  call->blocks = static_cast<uint32_t>((call->part_bytes + call->chunk_bytes - 1) / call->chunk_bytes);
}

void cut(const CollectiveTuning& tuning, CollectiveParams* call) {
  const uint64_t chunks =
      uint64_t{call->shape.blocks} * std::max(tuning.chunks, 1u) * (is_split(*call) ? call->shape.ranks : 1);
  const uint64_t wanted = (call->part_bytes + chunks - 1) / chunks;
  const uint64_t room = call->shape.room();
  const uint64_t least = std::clamp<uint64_t>(tuning.least_chunk_bytes, 128, room);
  call->chunk_bytes = static_cast<uint32_t>(std::clamp((wanted + 127) / 128 * 128, (least + 127) / 128 * 128, room));
  call->blocks = static_cast<uint32_t>(std::min<uint64_t>(call->shape.blocks, tile_count(*call)));
  call->lag = std::clamp(tuning.lag, 1u, call->shape.most_lag());
}

}  // namespace

#define FORKPOINT_NAMES(type) "forkpoint_collective_" #type, "forkpoint_collective_" #type "_tree"
const char* const kCollectiveKernelNames[kCollectiveKernelCount] = {"forkpoint_collective_i8",
                                                                    "forkpoint_collective_u8",
                                                                    "forkpoint_collective_i32",
                                                                    "forkpoint_collective_u32",
                                                                    "forkpoint_collective_i64",
                                                                    "forkpoint_collective_u64",
                                                                    "forkpoint_collective_f8e4m3",
                                                                    "forkpoint_collective_f8e5m2",
                                                                    "forkpoint_collective_f8e4m3_wide",
                                                                    "forkpoint_collective_f8e5m2_wide",
                                                                    FORKPOINT_NAMES(f32),
                                                                    FORKPOINT_NAMES(f64),
                                                                    FORKPOINT_NAMES(f16),
                                                                    FORKPOINT_NAMES(bf16),
                                                                    FORKPOINT_NAMES(f16_wide),
                                                                    FORKPOINT_NAMES(bf16_wide)};

StagingShape staging_for(uint32_t ranks) {
  StagingShape shape;
  shape.ranks = ranks;
  if (ranks > 2) shape.blocks = kMostBlocks / 2;  // each moves more of them in a step
  return shape;
}

// One block a multiprocessor, though each holds two: they spread before they double up. The first communicator leaves
// the least to one other; with fewer blocks NCCL's messages would be as fast.
uint32_t blocks_for_communicator(uint32_t multiprocessors, uint32_t taken, uint32_t wanted) {
  constexpr uint32_t kLeast = 24, kOfNccl = 32;
  const uint32_t in_use = taken + kOfNccl;
  const uint32_t left = multiprocessors > in_use ? multiprocessors - in_use : 0;
  if (left < kLeast) return 0;
  return std::min(wanted, taken > 0 || left < 2 * kLeast ? left : left - kLeast);
}

bool has_collective(DType dtype, bool tree) {
  const int index = index_of(dtype);
  return index >= 0 && !(tree && index >= kFirstFloat && index < kFirstWithTree);
}

bool plan_collective(const CollectiveSpec& spec, const CollectivePlace& place, CollectiveLaunch* launch,
                     const CollectiveTuning& tuning) {
  if (!has_collective(spec.dtype, spec.tree) || !is_sound(place.shape)) return false;
  launch->kernel = kernel_of(spec);
  launch->grid = 0;
  CollectiveParams& params = launch->params = {};
  params.shape = place.shape;
  params.room = place.shape.room();
  params.inputs_at = place.shape.input(0, 0, 0);
  params.results_at = place.shape.result(0, 0, 0);
  params.kind = spec.kind;
  params.rank = place.rank;
  params.root = spec.root;
  params.in = static_cast<const char*>(place.in);
  params.out = static_cast<char*>(place.out);
  params.part_bytes = spec.count * static_cast<uint64_t>(size_bytes(spec.dtype));
  params.abort = place.abort;
  std::copy_n(reinterpret_cast<char* const*>(place.staging), place.shape.ranks, params.staging);
  params.all_own = spec.kind == Kind::all_reduce && place.shape.ranks <= std::max(tuning.all_own_ranks, 2u);
  set_operation(spec, place.shape.ranks, &params);
  if (spec.count == 0) return true;
  if (fits_lines(params, tuning)) {
    params.protocol = Protocol::low_latency;
    cut_lines(&params);
  } else {
    cut(tuning, &params);
  }
  launch->grid = params.blocks;
  return true;
}

bool plan_local_sum(const CollectiveSpec& spec, const void* const* inputs, uint32_t ranks, void* out, uint32_t blocks,
                    CollectiveLaunch* launch) {
  if (!has_collective(spec.dtype, spec.tree) || ranks < 1 || ranks > kMostRanks) return false;
  launch->kernel = kernel_of(spec);
  CollectiveParams& params = launch->params = {};
  params.protocol = Protocol::local;
  params.shape.ranks = ranks;
  params.out = static_cast<char*>(out);
  params.part_bytes = spec.count * static_cast<uint64_t>(size_bytes(spec.dtype));
  for (uint32_t i = 0; i < ranks; ++i) params.staging[i] = static_cast<char*>(const_cast<void*>(inputs[i]));
  set_operation(spec, ranks, &params);
  const uint64_t threads = (params.part_bytes + kVectorBytes - 1) / kVectorBytes;
  launch->grid = static_cast<uint32_t>(std::min<uint64_t>(blocks, (threads + kBlockThreads - 1) / kBlockThreads));
  return true;
}

namespace {

template <typename A, bool kTree>
void collect(const CollectiveSpec& spec, const CollectiveParams& call, const void* const* inputs, uint64_t first,
             void* out) {
  typename A::Value factor;
  memcpy(&factor, &call.factor, sizeof(factor));
  if (call.factor_at) factor = A::load(read<A>(call.factor_at, 0));
  for (uint64_t i = 0; i < spec.count; ++i) {
    RankSum<A, sizeof(typename A::Stored), kTree> sum;
    for (uint32_t rank = 0; rank < call.shape.ranks; ++rank) {
      Vector vector = {};
      const auto stored = read<A>(inputs[rank], first + i);
      memcpy(&vector, &stored, sizeof(stored));
      sum.take(call.op, factor, rank, vector);
    }
    const Vector result = sum.finish(call.op, call.shape.ranks);
    memcpy(static_cast<char*>(out) + i * sizeof(typename A::Stored), &result, sizeof(typename A::Stored));
  }
}

}  // namespace

void collect_on_host(const CollectiveSpec& spec, const void* const* inputs, uint32_t ranks, uint32_t rank, void* out) {
  if (spec.kind == Kind::reduce && rank != spec.root) return;
  CollectiveParams call;
  call.shape.ranks = ranks;
  set_operation(spec, ranks, &call);
  const uint64_t first = spec.kind == Kind::reduce_scatter ? rank * spec.count : 0;
  const auto run = [&]<typename A>() {
    if (spec.tree)
      collect<A, true>(spec, call, inputs, first, out);
    else
      collect<A, false>(spec, call, inputs, first, out);
  };
  if (spec.wide)
    with_arithmetic<true>(spec.dtype, run);
  else
    with_arithmetic<false>(spec.dtype, run);
}

}  // namespace forkpoint::collective
