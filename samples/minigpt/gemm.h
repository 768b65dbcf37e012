#pragma once

#include <cstdint>

#include "samples/minigpt/communicator.h"

namespace minigpt {

// c[i, j] = start[j] + sum over p of a[i * a_row + p * a_step] * b[p * columns + j], p in the order given; start null:
// 0. Each element is one plain sum in that order (no fused multiply-add), so that its bits depend neither on how the
// work is cut nor on the processor.
struct Gemm {
  float* c;
  const float* a;
  int64_t a_row, a_step;
  const float* b;
  const float* start;
  int64_t columns, depth;
};
void gemm(const Gemm& g, int64_t row_begin, int64_t row_end, SumOrder order);

}  // namespace minigpt
