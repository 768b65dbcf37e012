// Memory, matrix products (cuBLAS) and what works element by element, row by row or column by column.
#include "samples/minigpt/cuda_backend.h"

#include <chrono>
#include <cstdlib>

#include "probes/forkpoint.h"
#include "samples/minigpt/cuda_reduce.cuh"

namespace minigpt {
namespace {

constexpr int kThreads = 256;
constexpr size_t kWorkspaceBytes = 32u << 20;
constexpr int kPartialSums = 64;

unsigned blocks_for(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 65535 ? blocks : 65535);
}

__device__ int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t index_step() { return int64_t{gridDim.x} * blockDim.x; }

__global__ void embed(float* y, const int32_t* tokens, const float* table, int64_t count, int64_t dim) {
  for (int64_t i = first_index(); i < count; i += index_step()) y[i] = table[tokens[i / dim] * dim + i % dim];
}

// One block a token of the vocabulary looks for it in all rows, in order: no atomics.
__global__ void embed_backward(float* dtable, const int32_t* tokens, const float* dy, int64_t rows, int64_t dim) {
  for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) {
    float sum = dtable[blockIdx.x * dim + c];
    for (int64_t row = 0; row < rows; ++row)
      if (tokens[row] == static_cast<int32_t>(blockIdx.x)) sum += dy[row * dim + c];
    dtable[blockIdx.x * dim + c] = sum;
  }
}

__global__ void add_positions(float* y, const float* x, const float* table, int64_t count, int64_t size) {
  for (int64_t i = first_index(); i < count; i += index_step()) y[i] = x[i] + table[i % size];
}
__global__ void sum_over_batch(float* out, const float* dy, int64_t batch, int64_t size) {
  for (int64_t i = first_index(); i < size; i += index_step()) {
    float sum = 0;
    for (int64_t b = 0; b < batch; ++b) sum += dy[b * size + i];
    out[i] = sum;
  }
}
__global__ void add_bias(float* y, const float* bias, int64_t count, int64_t columns) {
  for (int64_t i = first_index(); i < count; i += index_step()) y[i] += bias[i % columns];
}

__global__ void layer_norm(float* y, float* mean, float* rstd, const float* x, const float* weight, const float* bias,
                           int64_t dim) {
  const int64_t row = blockIdx.x;
  x += row * dim, y += row * dim;
  float sum = 0, squares = 0;
  for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) sum += x[c];
  const float centre = block_sum(sum) / static_cast<float>(dim);
  for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) squares += (x[c] - centre) * (x[c] - centre);
  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(dim) + kLayerNormEpsilon);
  for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) y[c] = (x[c] - centre) * scale * weight[c] + bias[c];
  if (threadIdx.x == 0) mean[row] = centre, rstd[row] = scale;
}

__global__ void layer_norm_backward_input(float* dx, const float* dy, const float* dresidual, const float* x,
                                          const float* weight, const float* mean, const float* rstd, int64_t dim) {
  const int64_t row = blockIdx.x, at = row * dim;
  float sum = 0, sum_normalised = 0;
  for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) {
    const float gradient = dy[at + c] * weight[c];
    sum += gradient;
    sum_normalised += gradient * (x[at + c] - mean[row]) * rstd[row];
  }
  sum = block_sum(sum) / static_cast<float>(dim);
  sum_normalised = block_sum(sum_normalised) / static_cast<float>(dim);
  for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) {
    const float normalised = (x[at + c] - mean[row]) * rstd[row];
    const float own = (dy[at + c] * weight[c] - sum - normalised * sum_normalised) * rstd[row];
    dx[at + c] = dresidual ? dresidual[at + c] + own : own;
  }
}

struct BiasTerm {
  const float* dy;
  int64_t dim;
  __device__ float operator()(int64_t row, int64_t c) const { return dy[row * dim + c]; }
};
struct NormTerm {
  const float *dy, *x, *mean, *rstd;
  int64_t dim;
  __device__ float operator()(int64_t row, int64_t c) const {
    return dy[row * dim + c] * (x[row * dim + c] - mean[row]) * rstd[row];
  }
};

__global__ void gelu_all(float* y, const float* x, int64_t count) {
  for (int64_t i = first_index(); i < count; i += index_step()) y[i] = gelu(x[i]);
}
__global__ void gelu_backward_all(float* dx, const float* dy, const float* x, int64_t count) {
  for (int64_t i = first_index(); i < count; i += index_step()) dx[i] = dy[i] * gelu_slope(x[i]);
}

// y = (residual, if any, +) dropout(x): forward and backward pass. A thread does the four elements of one Philox call.
__global__ void dropout(float* y, const float* x, const float* residual, int64_t count, DropoutKey key) {
  const uint32_t threshold = dropout_threshold(key);
  const float scale = dropout_scale(key);
  for (int64_t group = first_index(); group * 4 < count; group += index_step()) {
    const PhiloxWords words = dropout_words(key, static_cast<uint32_t>(group));
    for (int k = 0; k < 4 && group * 4 + k < count; ++k) {
      const int64_t i = group * 4 + k;
      const float kept = words.word[k] >= threshold ? x[i] * scale : 0.0f;
      y[i] = residual ? residual[i] + kept : kept;
    }
  }
}

__global__ void cross_entropy_row(float* dlogits, float* row_losses, const float* logits, const int32_t* targets,
                                  int64_t rows, int64_t vocabulary) {
  const int64_t row = blockIdx.x;
  logits += row * vocabulary, dlogits += row * vocabulary;
  float largest = -INFINITY, sum = 0;
  for (int64_t v = threadIdx.x; v < vocabulary; v += blockDim.x) largest = fmaxf(largest, logits[v]);
  largest = block_max(largest);
  for (int64_t v = threadIdx.x; v < vocabulary; v += blockDim.x) sum += expf(logits[v] - largest);
  sum = block_sum(sum);
  for (int64_t v = threadIdx.x; v < vocabulary; v += blockDim.x)
    dlogits[v] = (expf(logits[v] - largest) / sum - (v == targets[row] ? 1.0f : 0.0f)) / static_cast<float>(rows);
  if (threadIdx.x == 0) row_losses[row] = logf(sum) + largest - logits[targets[row]];
}

__global__ void mean_of(float* mean, const float* x, int64_t count) {
  float sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *mean = sum / static_cast<float>(count);
}

__global__ void partial_squares(double* partial, const float* x, int64_t count) {
  double sum = 0;
  for (int64_t i = first_index(); i < count; i += index_step()) sum += static_cast<double>(x[i]) * x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
__global__ void add_partials(double* sum, const double* partial) {
  double total = 0;
  for (int i = 0; i < kPartialSums; ++i) total += partial[i];
  *sum = total;
}

__global__ void adamw_all(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient, int64_t count,
                          AdamWStep step) {
  for (int64_t i = first_index(); i < count; i += index_step())
    adamw_element(step, weight[i], exp_avg[i], exp_avg_sq[i], gradient[i]);
}

void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

int choose_device(const World& world) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "no usable GPU");
  if (world.local_rank < count) return world.local_rank;
  if (count == 1 && std::getenv("CUDA_VISIBLE_DEVICES")) return 0;  // the launcher gives each rank a GPU of its own
  throw Error("rank " + std::to_string(world.rank) + " wants GPU " + std::to_string(world.local_rank) +
              ", this host has " + std::to_string(count) + ": start at most that many ranks on it");
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void tell_versions(int device, cublasHandle_t blas) {
  if (!forkpoint_active()) return;
  cudaDeviceProp properties;
  int driver = 0, runtime = 0, cublas = 0;
  check(cudaGetDeviceProperties(&properties, device), "device properties");
  check(cudaDriverGetVersion(&driver), "driver version");
  check(cudaRuntimeGetVersion(&runtime), "runtime version");
  forkpoint_fact("gpu", properties.name);
  forkpoint_fact("cuda_driver", version_text(driver).c_str());
  forkpoint_fact("cuda_runtime", version_text(runtime).c_str());
  check(cublasGetVersion(blas, &cublas), "version");
  forkpoint_fact("cublas", std::to_string(cublas).c_str());
}

}  // namespace

CudaBackend::CudaBackend(const World& world) {
  const int device = choose_device(world);
  check(cudaSetDevice(device), "choosing the GPU");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  check(cublasCreate(&blas_), "cannot start");
  check(cublasSetStream(blas_, stream_), "stream");
  // A workspace of our own and plain fp32: the same algorithm, and so the same bits, in every run.
  check(cudaMalloc(&workspace_, kWorkspaceBytes), "workspace");
  check(cublasSetWorkspace(blas_, workspace_, kWorkspaceBytes), "workspace");
  check(cublasSetMathMode(blas_, CUBLAS_PEDANTIC_MATH), "math mode");
  check(cudaMalloc(&partial_sums_, kPartialSums * sizeof(double)), "scratch memory");
  tell_versions(device, blas_);
}

CudaBackend::~CudaBackend() {
  cublasDestroy(blas_);
  cudaFree(partial_sums_);
  cudaFree(workspace_);
  cudaStreamDestroy(stream_);
}

void* CudaBackend::allocate(size_t size_bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, size_bytes > 0 ? size_bytes : 1), "memory");
  check(cudaMemsetAsync(memory, 0, size_bytes, stream_), "memory");
  return memory;
}
void CudaBackend::release(void* memory) { cudaFree(memory); }

void CudaBackend::synchronize() {
  auto next_look = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) check(state, "the GPU stopped");
    if (!while_waiting || std::chrono::steady_clock::now() < next_look) continue;
    while_waiting();
    next_look = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  }
}

void CudaBackend::copy_in(void* to, const void* host, size_t size_bytes) {
  check(cudaMemcpyAsync(to, host, size_bytes, cudaMemcpyHostToDevice, stream_), "copy to the GPU");
  synchronize();
}
void CudaBackend::copy_out(void* host, const void* from, size_t size_bytes) {
  synchronize();  // first: a copy to pageable memory would wait by itself, and for ever if a rank is gone
  check(cudaMemcpyAsync(host, from, size_bytes, cudaMemcpyDeviceToHost, stream_), "copy from the GPU");
  synchronize();
}
int CudaBackend::forkpoint_device() const { return FORKPOINT_CUDA; }

void CudaBackend::embedding_forward(float* y, const int32_t* tokens, const float* table, int64_t rows, int64_t dim) {
  embed<<<blocks_for(rows * dim), kThreads, 0, stream_>>>(y, tokens, table, rows * dim, dim);
  check_launch("embed");
}
void CudaBackend::embedding_backward(float* dtable, const int32_t* tokens, const float* dy, int64_t rows, int64_t dim,
                                     int64_t vocabulary) {
  embed_backward<<<static_cast<unsigned>(vocabulary), kThreads, 0, stream_>>>(dtable, tokens, dy, rows, dim);
  check_launch("embed_backward");
}
void CudaBackend::positions_forward(float* y, const float* x, const float* table, int64_t batch, int64_t seq,
                                    int64_t dim) {
  add_positions<<<blocks_for(batch * seq * dim), kThreads, 0, stream_>>>(y, x, table, batch * seq * dim, seq * dim);
  check_launch("add_positions");
}
void CudaBackend::positions_backward(float* dtable, const float* dy, int64_t batch, int64_t seq, int64_t dim) {
  sum_over_batch<<<blocks_for(seq * dim), kThreads, 0, stream_>>>(dtable, dy, batch, seq * dim);
  check_launch("sum_over_batch");
}

// cuBLAS is column-major: a row-major [r, c] is its [c, r]. So y = x w^T becomes y' = w'^T x'.
void CudaBackend::linear_forward(float* y, const float* x, const float* weight, const float* bias, LinearShape s,
                                 SumOrder order) {
  const auto part = [&](int64_t begin, int64_t end, float keep) {
    const float one = 1;
    check(cublasSgemm(blas_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(s.out), static_cast<int>(s.rows),
                      static_cast<int>(end - begin), &one, weight + begin, static_cast<int>(s.in), x + begin,
                      static_cast<int>(s.in), &keep, y, static_cast<int>(s.out)),
          "linear forward");
  };
  const int64_t half = s.in / 2;
  if (order == SumOrder::forward || half == 0) {
    part(0, s.in, 0);
  } else {
    part(half, s.in, 0);
    part(0, half, 1);
  }
  if (!bias) return;
  add_bias<<<blocks_for(s.rows * s.out), kThreads, 0, stream_>>>(y, bias, s.rows * s.out, s.out);
  check_launch("add_bias");
}

void CudaBackend::linear_backward_input(float* dx, const float* dy, const float* weight, LinearShape s) {
  const float one = 1, zero = 0;
  check(cublasSgemm(blas_, CUBLAS_OP_N, CUBLAS_OP_N, static_cast<int>(s.in), static_cast<int>(s.rows),
                    static_cast<int>(s.out), &one, weight, static_cast<int>(s.in), dy, static_cast<int>(s.out), &zero,
                    dx, static_cast<int>(s.in)),
        "linear backward");
}

void CudaBackend::linear_backward_weight(float* dweight, float* dbias, const float* dy, const float* x, LinearShape s) {
  const float one = 1, zero = 0;
  check(cublasSgemm(blas_, CUBLAS_OP_N, CUBLAS_OP_T, static_cast<int>(s.in), static_cast<int>(s.out),
                    static_cast<int>(s.rows), &one, x, static_cast<int>(s.in), dy, static_cast<int>(s.out), &zero,
                    dweight, static_cast<int>(s.in)),
        "linear backward");
  if (!dbias) return;
  column_sums<<<static_cast<unsigned>((s.out + 31) / 32), dim3(32, 32), 0, stream_>>>(dbias, s.rows, s.out,
                                                                                      BiasTerm{dy, s.out});
  check_launch("column_sums");
}

void CudaBackend::layer_norm_forward(float* y, float* mean, float* rstd, const float* x, const float* weight,
                                     const float* bias, int64_t rows, int64_t dim) {
  layer_norm<<<static_cast<unsigned>(rows), kThreads, 0, stream_>>>(y, mean, rstd, x, weight, bias, dim);
  check_launch("layer_norm");
}

void CudaBackend::layer_norm_backward(float* dx, float* dweight, float* dbias, const float* dy, const float* dresidual,
                                      const float* x, const float* weight, const float* mean, const float* rstd,
                                      int64_t rows, int64_t dim) {
  const unsigned column_blocks = static_cast<unsigned>((dim + 31) / 32);
  column_sums<<<column_blocks, dim3(32, 32), 0, stream_>>>(dweight, rows, dim, NormTerm{dy, x, mean, rstd, dim});
  column_sums<<<column_blocks, dim3(32, 32), 0, stream_>>>(dbias, rows, dim, BiasTerm{dy, dim});
  layer_norm_backward_input<<<static_cast<unsigned>(rows), kThreads, 0, stream_>>>(dx, dy, dresidual, x, weight, mean,
                                                                                   rstd, dim);
  check_launch("layer_norm_backward");
}

void CudaBackend::gelu_forward(float* y, const float* x, int64_t count) {
  gelu_all<<<blocks_for(count), kThreads, 0, stream_>>>(y, x, count);
  check_launch("gelu");
}
void CudaBackend::gelu_backward(float* dx, const float* dy, const float* x, int64_t count) {
  gelu_backward_all<<<blocks_for(count), kThreads, 0, stream_>>>(dx, dy, x, count);
  check_launch("gelu_backward");
}

void CudaBackend::dropout_add_forward(float* y, const float* x, const float* residual, int64_t count, DropoutKey key) {
  dropout<<<blocks_for((count + 3) / 4), kThreads, 0, stream_>>>(y, x, residual, count, key);
  check_launch("dropout");
}
void CudaBackend::dropout_backward(float* dx, const float* dy, int64_t count, DropoutKey key) {
  dropout<<<blocks_for((count + 3) / 4), kThreads, 0, stream_>>>(dx, dy, nullptr, count, key);
  check_launch("dropout_backward");
}

void CudaBackend::cross_entropy(float* loss, float* dlogits, float* row_losses, const float* logits,
                                const int32_t* targets, int64_t rows, int64_t vocabulary) {
  cross_entropy_row<<<static_cast<unsigned>(rows), kThreads, 0, stream_>>>(dlogits, row_losses, logits, targets, rows,
                                                                           vocabulary);
  mean_of<<<1, kThreads, 0, stream_>>>(loss, row_losses, rows);
  check_launch("cross_entropy");
}

void CudaBackend::sum_of_squares(double* sum, const float* x, int64_t count) {
  partial_squares<<<kPartialSums, kThreads, 0, stream_>>>(partial_sums_, x, count);
  add_partials<<<1, 1, 0, stream_>>>(sum, partial_sums_);
  check_launch("sum_of_squares");
}

void CudaBackend::adamw(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient, int64_t count,
                        AdamWStep step) {
  adamw_all<<<blocks_for(count), kThreads, 0, stream_>>>(weight, exp_avg, exp_avg_sq, gradient, count, step);
  check_launch("adamw");
}

namespace {
std::unique_ptr<Backend> make_cuda_backend(const World& world) { return std::make_unique<CudaBackend>(world); }
}  // namespace

}  // namespace minigpt

extern "C" __attribute__((visibility("default")))
const minigpt::CudaModule minigpt_cuda_module = {minigpt::make_cuda_backend, minigpt::make_nccl_communicator};
