#include "kernels/scatter_launch.h"

#include "kernels/scatter_sort.h"

namespace forkpoint {
namespace {

constexpr int64_t kBlock = 128;  // of the pieces' kernel
constexpr int64_t kBlocksPerProcessor = 16;
constexpr int64_t kColumnsOfCombine = 32;  // of one block
constexpr int64_t kMostColumnBlocks = 1024;

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }

int64_t element_bytes(ScatterType type) {
  return type == ScatterType::float64 ? 8 : type == ScatterType::float32 ? 4 : 2;
}

bool fits_vectors(const ScatterWork& work, int64_t bytes) {
  const auto addresses = reinterpret_cast<uintptr_t>(work.src) | reinterpret_cast<uintptr_t>(work.out);
  const int64_t elements = 16 / bytes;
  return addresses % 16 == 0 && work.columns % elements == 0 && work.src_stride % elements == 0 &&
         work.out_stride % elements == 0;
}

// An odd number of blocks: pieces of a long segment start at every 128th place, and strides that share a factor with
// that would leave most blocks without work.
uint32_t grid_of(int64_t needed, int64_t room) {
  const int64_t grid = at_most(needed, room < 1 ? 1 : room);
  return static_cast<uint32_t>(grid > 2 ? (grid - 1) | 1 : grid);
}

ScatterLaunch plan_pieces(ScatterType type, ScatterWork* work, int multiprocessors) {
  const int64_t bytes = element_bytes(type);
  const bool vectors = fits_vectors(*work, bytes);
  const int64_t needed_threads = divide_up(work->columns, vectors ? 16 / bytes : 1);
  int threads = 1;
  while (threads < kBlock && threads < needed_threads) threads *= 2;
  ScatterLaunch launch;
  launch.kernel = (vectors ? kScatterPiecesVector : kScatterPieces) + static_cast<int>(type);
  launch.block = static_cast<uint32_t>(kBlock);
  launch.grid_y =
      static_cast<uint32_t>(threads == kBlock ? at_most(divide_up(needed_threads, kBlock), kMostColumnBlocks) : 1);
  const int64_t units_of_block = kBlock / (threads > 32 ? threads : 32);
  const int64_t room = multiprocessors * kBlocksPerProcessor / launch.grid_y;
  const int least = threads > 32 ? 1 : 32 / threads;  // places of a unit, at least one for each of its groups
  int places = 32;
  while (places > least && divide_up(work->keys.count, places) < room * units_of_block) places /= 2;
  work->piece_threads = threads;
  work->places = places;
  launch.grid_x = grid_of(divide_up(divide_up(work->keys.count, places), units_of_block), room);
  return launch;
}

}  // namespace

const char* const kScatterKernelNames[kScatterKernelCount] = {
    "forkpoint_scatter_starts",          "forkpoint_scatter_pieces_float32",   "forkpoint_scatter_pieces_float16",
    "forkpoint_scatter_pieces_bfloat16", "forkpoint_scatter_pieces_float64",   "forkpoint_scatter_vectors_float32",
    "forkpoint_scatter_vectors_float16", "forkpoint_scatter_vectors_bfloat16", "forkpoint_scatter_vectors_float64",
    "forkpoint_scatter_combine_float32", "forkpoint_scatter_combine_float16",  "forkpoint_scatter_combine_bfloat16",
    "forkpoint_scatter_combine_float64", "forkpoint_sort_count",               "forkpoint_sort_move",
};

ScatterScratch lay_out_scratch(ScatterType type, int64_t count, int64_t columns) {
  ScatterScratch at{};
  const auto take = [&](size_t bytes) {
    const size_t begin = at.bytes;
    at.bytes += (bytes + 255) / 256 * 256;
    return begin;
  };
  at.keys = take(static_cast<size_t>(count) * 4);
  at.places = take(static_cast<size_t>(count) * 4);
  at.sort = take(sort_scratch_bytes(count));
  at.starts = take(scatter_starts_bytes(count));
  at.partials = take(scatter_partials_bytes(type, count, columns));
  return at;
}

size_t scatter_starts_bytes(int64_t count) { return static_cast<size_t>(divide_up(count, 32)) * 4; }

size_t scatter_partials_bytes(ScatterType type, int64_t count, int64_t columns) {
  if (count <= scatter::kPieceRows) return 0;
  const int64_t bytes = type == ScatterType::float64 ? 8 : 4;
  return static_cast<size_t>(scatter::slots_of(count) * divide_up(columns, 4) * 4 * bytes);
}

ScatterPlan plan_scatter(ScatterType type, const ScatterWork& work, int multiprocessors) {
  ScatterPlan plan;
  plan.work = work;
  plan.work.partial_stride = divide_up(work.columns, 4) * 4;
  const int64_t count = work.keys.count;
  if (count == 0 || work.columns == 0) return plan;
  plan.launches[0] = {kScatterStarts, static_cast<uint32_t>(divide_up(count, 256)), 1, 256};
  plan.launches[1] = plan_pieces(type, &plan.work, multiprocessors);
  if (count <= scatter::kPieceRows) return plan;
  const int64_t marks = divide_up(count, scatter::kPieceRows);
  const int64_t column_blocks = at_most(divide_up(work.columns, kColumnsOfCombine), kMostColumnBlocks);
  plan.launches[2] = {kScatterCombine + static_cast<int>(type),
                      grid_of(divide_up(marks, 32), multiprocessors * 8 / column_blocks + 1),
                      static_cast<uint32_t>(column_blocks), 256};
  return plan;
}

}  // namespace forkpoint
