// Causal attention, written out: a block computes one row of one head. The probabilities are kept for the backward
// pass.
#include "samples/minigpt/cuda_backend.h"
#include "samples/minigpt/cuda_reduce.cuh"

namespace minigpt {
namespace {

constexpr int kThreads = 128;

struct Heads {
  int64_t seq, heads, head_dim;
  __device__ int64_t dim() const { return heads * head_dim; }
  // Element 0 of this block's head in [batch, seq, width]; rows are `width` apart.
  __device__ int64_t head_start(int64_t width) const { return blockIdx.z * seq * width + blockIdx.y * head_dim; }
  // Row 0 of this block's head in [batch, heads, seq, seq].
  __device__ int64_t matrix_start() const { return (blockIdx.z * heads + blockIdx.y) * seq * seq; }
  __device__ float scale() const { return 1.0f / sqrtf(static_cast<float>(head_dim)); }
};

__device__ float dot(const float* a, const float* b, int64_t count) {
  float sum = 0;
  for (int64_t c = 0; c < count; ++c) sum += a[c] * b[c];
  return sum;
}

__global__ void attend(float* y, float* probabilities, const float* qkv, Heads s) {
  const int64_t t = blockIdx.x, stride = 3 * s.dim();
  const float* q = qkv + s.head_start(stride);
  const float *k = q + s.dim(), *v = k + s.dim();
  float* p = probabilities + s.matrix_start() + t * s.seq;
  float largest = -INFINITY, sum = 0;
  for (int64_t u = threadIdx.x; u <= t; u += blockDim.x) {
    p[u] = dot(q + t * stride, k + u * stride, s.head_dim) * s.scale();
    largest = fmaxf(largest, p[u]);
  }
  largest = block_max(largest);
  for (int64_t u = threadIdx.x; u <= t; u += blockDim.x) sum += p[u] = expf(p[u] - largest);
  sum = block_sum(sum);
  for (int64_t u = threadIdx.x; u <= t; u += blockDim.x) p[u] /= sum;
  __syncthreads();  // p is complete
  for (int64_t c = threadIdx.x; c < s.head_dim; c += blockDim.x) {
    float out = 0;
    for (int64_t u = 0; u <= t; ++u) out += p[u] * v[u * stride + c];
    y[s.head_start(s.dim()) + t * s.dim() + c] = out;
  }
}

// Gradients of row t's scores and of its query.
__global__ void attend_backward_row(float* dqkv, float* dscores, const float* dy, const float* qkv,
                                    const float* probabilities, Heads s) {
  const int64_t t = blockIdx.x, stride = 3 * s.dim();
  const float* k = qkv + s.head_start(stride) + s.dim();
  const float* v = k + s.dim();
  const float* p = probabilities + s.matrix_start() + t * s.seq;
  const float* dout = dy + s.head_start(s.dim()) + t * s.dim();
  float* ds = dscores + s.matrix_start() + t * s.seq;
  float mean = 0;
  for (int64_t u = threadIdx.x; u <= t; u += blockDim.x) {
    ds[u] = dot(dout, v + u * stride, s.head_dim);
    mean += p[u] * ds[u];
  }
  mean = block_sum(mean);
  for (int64_t u = threadIdx.x; u <= t; u += blockDim.x) ds[u] = p[u] * (ds[u] - mean) * s.scale();
  __syncthreads();  // ds is complete
  for (int64_t c = threadIdx.x; c < s.head_dim; c += blockDim.x) {
    float dq = 0;
    for (int64_t u = 0; u <= t; ++u) dq += ds[u] * k[u * stride + c];
    dqkv[s.head_start(stride) + t * stride + c] = dq;
  }
}

// Gradients of row u's key and value, from all rows that saw it, in order.
__global__ void attend_backward_column(float* dqkv, const float* dscores, const float* dy, const float* qkv,
                                       const float* probabilities, Heads s) {
  const int64_t u = blockIdx.x, stride = 3 * s.dim();
  const float* q = qkv + s.head_start(stride);
  const float* dout = dy + s.head_start(s.dim());
  const float* p = probabilities + s.matrix_start();
  const float* ds = dscores + s.matrix_start();
  float* dk = dqkv + s.head_start(stride) + u * stride + s.dim();
  for (int64_t c = threadIdx.x; c < s.head_dim; c += blockDim.x) {
    float key = 0, value = 0;
    for (int64_t t = u; t < s.seq; ++t) {
      key += ds[t * s.seq + u] * q[t * stride + c];
      value += p[t * s.seq + u] * dout[t * s.dim() + c];
    }
    dk[c] = key;
    dk[s.dim() + c] = value;
  }
}

dim3 blocks_for(const AttentionShape& s) {
  return {static_cast<unsigned>(s.seq), static_cast<unsigned>(s.heads), static_cast<unsigned>(s.batch)};
}

}  // namespace

void CudaBackend::attention_forward(float* y, float* probabilities, const float* qkv, AttentionShape s) {
  attend<<<blocks_for(s), kThreads, 0, stream_>>>(y, probabilities, qkv, {s.seq, s.heads, s.head_dim});
  check(cudaGetLastError(), "attend");
}

void CudaBackend::attention_backward(float* dqkv, float* dscores, const float* dy, const float* qkv,
                                     const float* probabilities, AttentionShape s) {
  const Heads heads = {s.seq, s.heads, s.head_dim};
  attend_backward_row<<<blocks_for(s), kThreads, 0, stream_>>>(dqkv, dscores, dy, qkv, probabilities, heads);
  attend_backward_column<<<blocks_for(s), kThreads, 0, stream_>>>(dqkv, dscores, dy, qkv, probabilities, heads);
  check(cudaGetLastError(), "attend_backward");
}

}  // namespace minigpt
