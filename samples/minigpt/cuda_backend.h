// Within the CUDA module only.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <functional>
#include <string>

#include "samples/minigpt/cuda_module.h"
#include "samples/minigpt/error.h"

namespace minigpt {

inline void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw Error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(result));
}
inline void check(cublasStatus_t result, const char* what) {
  if (result != CUBLAS_STATUS_SUCCESS)
    throw Error(std::string("cuBLAS: ") + what + ": " + cublasGetStatusString(result));
}

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const World& world);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;

  cudaStream_t cuda_stream() const { return stream_; }
  // Waits for all that is enqueued. `while_waiting` is called now and then meanwhile, so that a job whose other ranks
  // are gone can end instead of waiting for ever; it may throw.
  void synchronize();
  std::function<void()> while_waiting;

  void* allocate(size_t size_bytes) override;
  void release(void* memory) override;
  void copy_in(void* to, const void* host, size_t size_bytes) override;
  void copy_out(void* host, const void* from, size_t size_bytes) override;
  int forkpoint_device() const override;
  void* stream() const override { return stream_; }

  void embedding_forward(float* y, const int32_t* tokens, const float* table, int64_t rows, int64_t dim) override;
  void embedding_backward(float* dtable, const int32_t* tokens, const float* dy, int64_t rows, int64_t dim,
                          int64_t vocabulary) override;
  void positions_forward(float* y, const float* x, const float* table, int64_t batch, int64_t seq,
                         int64_t dim) override;
  void positions_backward(float* dtable, const float* dy, int64_t batch, int64_t seq, int64_t dim) override;
  void linear_forward(float* y, const float* x, const float* weight, const float* bias, LinearShape shape,
                      SumOrder order) override;
  void linear_backward_input(float* dx, const float* dy, const float* weight, LinearShape shape) override;
  void linear_backward_weight(float* dweight, float* dbias, const float* dy, const float* x,
                              LinearShape shape) override;
  void layer_norm_forward(float* y, float* mean, float* rstd, const float* x, const float* weight, const float* bias,
                          int64_t rows, int64_t dim) override;
  void layer_norm_backward(float* dx, float* dweight, float* dbias, const float* dy, const float* dresidual,
                           const float* x, const float* weight, const float* mean, const float* rstd, int64_t rows,
                           int64_t dim) override;
  void gelu_forward(float* y, const float* x, int64_t count) override;
  void gelu_backward(float* dx, const float* dy, const float* x, int64_t count) override;
  void attention_forward(float* y, float* probabilities, const float* qkv, AttentionShape shape) override;
  void attention_backward(float* dqkv, float* dscores, const float* dy, const float* qkv, const float* probabilities,
                          AttentionShape shape) override;
  void dropout_add_forward(float* y, const float* x, const float* residual, int64_t count, DropoutKey key) override;
  void dropout_backward(float* dx, const float* dy, int64_t count, DropoutKey key) override;
  void cross_entropy(float* loss, float* dlogits, float* row_losses, const float* logits, const int32_t* targets,
                     int64_t rows, int64_t vocabulary) override;
  void sum_of_squares(double* sum, const float* x, int64_t count) override;
  void adamw(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient, int64_t count,
             AdamWStep step) override;

 private:
  cudaStream_t stream_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  void* workspace_ = nullptr;
  double* partial_sums_ = nullptr;
};

std::unique_ptr<Communicator> make_nccl_communicator(const Options& options, const World& world, Backend& backend);

}  // namespace minigpt
