// Sums and maxima of a block and of columns. Deterministic: the order depends on the shape alone; no atomics.
#pragma once

#include <cstdint>

namespace minigpt {

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The same value in every thread. REQUIRES: all threads of the block call it; their number is a multiple of 32, at most
// 1024.
template <typename T, typename Op>
__device__ T block_reduce(T value, T neutral, Op op) {
  __shared__ T of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(~0u, value, offset));
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  value = lane < warps ? of_warp[lane] : neutral;
  for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();  // of_warp may be used again at once
  return value;
}
template <typename T>
__device__ T block_sum(T value) {
  return block_reduce(value, T(0), Sum{});
}
__device__ inline float block_max(float value) { return block_reduce(value, -INFINITY, Max{}); }

// out[c] = sum over rows of term(row, c). Launch with 32 x 32 threads and one block for 32 columns.
template <typename Term>
__global__ void column_sums(float* out, int64_t rows, int64_t columns, Term term) {
  __shared__ float parts[32][33];
  const int64_t column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  if (column < columns)
    for (int64_t row = threadIdx.y; row < rows; row += 32) sum += term(row, column);
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  sum = 0;
  for (int part = 0; part < 32; ++part) sum += parts[part][threadIdx.x];
  out[column] = sum;
}

}  // namespace minigpt
