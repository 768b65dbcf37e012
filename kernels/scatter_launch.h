// How the deterministic scatter kernels are launched, without any CUDA header (as kernels/digest_launch.h does for the
// digest): plan_scatter() fills three launches, to be made in this order on one stream. Before them, a sort by
// destination (kernels/scatter_sort.h) where the keys are not sorted yet.
//
// What they compute: for each destination row d, over the places p with keys[p] == d, in ascending order of p,
//   sum(d) = weight(p) * src[row(p)]  added up (or multiplied, kProduct) as kernels/scatter_plan.h says,
//   out[d] = rounded once from  (add: out[d] +) alpha * sum(d), divided (mean) by the places and, where added to, one
//   more.
// Rows without places are left as they are. Sums are formed in float for float and narrower types, in double for
// double.
//
// Guarantee: gpu_to_gpu, as the order of additions depends on the keys alone and every operation rounds as IEEE 754
// says (fused multiply-adds are asked for by name). Nothing is allocated or waited for; may be captured in a CUDA
// graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/scatter_plan.h"

namespace forkpoint {

enum class ScatterType : uint8_t { float32, float16, bfloat16, float64 };
enum ScatterFlags : uint32_t { kScatterAdd = 1, kScatterMean = 2, kScatterProduct = 4 };

struct ScatterWork {
  const void* src;      // row r begins at element r * src_stride
  void* out;            // row d begins at element d * out_stride
  const void* rows;     // of src, by place; null: place p is row p
  const void* weights;  // float (double where the type is), by place; null: all are 1
  uint32_t* starts;     // scratch of scatter_starts_bytes()
  void* partials;       // scratch of scatter_partials_bytes(), on 16 bytes
  scatter::SortedKeys keys;
  int64_t out_rows;
  int64_t columns;
  int64_t src_stride;
  int64_t out_stride;
  int64_t partial_stride;  // elements; filled by the planner
  double alpha;
  uint32_t flags;
  bool narrow_rows;  // rows are uint32_t, else int64_t
  // Filled by the planner: how the pieces are spread. No bit of the result depends on them.
  int32_t piece_threads;  // threads that share a piece: a power of two up to 128
  int32_t places;         // the share of a warp (or of more, that share a piece), a power of two up to 32
};

enum ScatterKernel : int {
  kScatterStarts,
  kScatterPieces,
  kScatterPiecesVector = kScatterPieces + 4,
  kScatterCombine = kScatterPiecesVector + 4,
  kSortCount = kScatterCombine + 4,
  kSortMove,
  kScatterKernelCount
};
extern const char* const kScatterKernelNames[kScatterKernelCount];

struct ScatterLaunch {
  int kernel = 0;
  uint32_t grid_x = 0, grid_y = 1;  // grid_x 0: nothing to launch
  uint32_t block = 0;
};
struct ScatterPlan {
  ScatterWork work;
  ScatterLaunch launches[3];
};

// One allocation for a sort and the sums that follow it; fields: bytes from its begin, each a multiple of 256.
struct ScatterScratch {
  size_t keys, places, sort, starts, partials, bytes;
};
ScatterScratch lay_out_scratch(ScatterType type, int64_t count, int64_t columns);

size_t scatter_starts_bytes(int64_t count);
size_t scatter_partials_bytes(ScatterType type, int64_t count, int64_t columns);
// Pure; any thread. REQUIRES: fields of `work` above the planner's are filled.
ScatterPlan plan_scatter(ScatterType type, const ScatterWork& work, int multiprocessors);

}  // namespace forkpoint
