#include "samples/minigpt/gemm.h"

#include <algorithm>
#include <cstring>

namespace minigpt {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileColumns = 16;

// Wider vectors where the processor has them; the same bits, as every column is a sum of its own.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define MINIGPT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MINIGPT_CLONES
#endif

// Vectors by hand: left to itself the compiler keeps the sums in memory.
using Lanes = float __attribute__((vector_size(32)));
constexpr int kLanes = 8;

MINIGPT_CLONES void full_tile(const Gemm& g, int64_t row, int64_t column, int64_t p, int64_t step) {
  Lanes sums[kTileRows][kTileColumns / kLanes] = {};
  if (g.start)
    for (auto& row_sums : sums) std::memcpy(row_sums, g.start + column, sizeof(row_sums));
  const float* a = g.a + row * g.a_row;
  const float* b = g.b + column;
  for (int64_t n = 0; n < g.depth; ++n, p += step) {
    Lanes factors[kTileColumns / kLanes];
    std::memcpy(factors, b + p * g.columns, sizeof(factors));
    for (int i = 0; i < kTileRows; ++i)
      for (int j = 0; j < kTileColumns / kLanes; ++j) sums[i][j] += a[i * g.a_row + p * g.a_step] * factors[j];
  }
  for (int i = 0; i < kTileRows; ++i) std::memcpy(g.c + (row + i) * g.columns + column, sums[i], sizeof(sums[i]));
}

void part_tile(const Gemm& g, int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t first, int64_t step) {
  for (int64_t i = row; i < row + rows; ++i)
    for (int64_t j = column; j < column + columns; ++j) {
      float sum = g.start ? g.start[j] : 0.0f;
      for (int64_t n = 0, p = first; n < g.depth; ++n, p += step)
        sum += g.a[i * g.a_row + p * g.a_step] * g.b[p * g.columns + j];
      g.c[i * g.columns + j] = sum;
    }
}

}  // namespace

void gemm(const Gemm& g, int64_t row_begin, int64_t row_end, SumOrder order) {
  const int64_t step = order == SumOrder::forward ? 1 : -1;
  const int64_t first = order == SumOrder::forward ? 0 : g.depth - 1;
  for (int64_t column = 0; column < g.columns; column += kTileColumns)
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, row_end - row);
      const int64_t columns = std::min<int64_t>(kTileColumns, g.columns - column);
      if (rows == kTileRows && columns == kTileColumns)
        full_tile(g, row, column, first, step);
      else
        part_tile(g, row, rows, column, columns, first, step);
    }
}

}  // namespace minigpt
