// The operations that the model is made of, and the memory that they work on. All numbers are fp32, all tensors
// row-major and contiguous. Every operation is deterministic: the order of each sum is fixed, whatever the number of
// threads. Operations are enqueued on stream(); copy_out waits for them. Errors throw Error. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "samples/minigpt/communicator.h"
#include "samples/minigpt/formulas.h"
#include "samples/minigpt/philox.h"

namespace minigpt {

struct LinearShape {
  int64_t rows, in, out;
};
struct AttentionShape {
  int64_t batch, seq, heads, head_dim;
  int64_t dim() const { return heads * head_dim; }
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void* allocate(size_t size_bytes) = 0;  // zeros
  virtual void release(void* memory) = 0;
  virtual void copy_in(void* to, const void* host, size_t size_bytes) = 0;
  virtual void copy_out(void* host, const void* from, size_t size_bytes) = 0;
  virtual int forkpoint_device() const = 0;  // enum forkpoint_device
  virtual void* stream() const = 0;          // cudaStream_t; nullptr on the CPU

  // y[row] = table[tokens[row]]
  virtual void embedding_forward(float* y, const int32_t* tokens, const float* table, int64_t rows, int64_t dim) = 0;
  // dtable[tokens[row]] += dy[row], rows in order
  virtual void embedding_backward(float* dtable, const int32_t* tokens, const float* dy, int64_t rows, int64_t dim,
                                  int64_t vocabulary) = 0;
  // y[b, t] = x[b, t] + table[t]
  virtual void positions_forward(float* y, const float* x, const float* table, int64_t batch, int64_t seq,
                                 int64_t dim) = 0;
  // dtable[t] = sum over b of dy[b, t]
  virtual void positions_backward(float* dtable, const float* dy, int64_t batch, int64_t seq, int64_t dim) = 0;

  // y = x * weight^T + bias; weight is [out, in], bias may be null. order: of the sum over `in`.
  virtual void linear_forward(float* y, const float* x, const float* weight, const float* bias, LinearShape shape,
                              SumOrder order) = 0;
  virtual void linear_backward_input(float* dx, const float* dy, const float* weight, LinearShape shape) = 0;
  // dbias may be null.
  virtual void linear_backward_weight(float* dweight, float* dbias, const float* dy, const float* x,
                                      LinearShape shape) = 0;

  // mean and rstd: [rows], kept for the backward pass.
  virtual void layer_norm_forward(float* y, float* mean, float* rstd, const float* x, const float* weight,
                                  const float* bias, int64_t rows, int64_t dim) = 0;
  // dx = dresidual + the layer norm's own gradient; dresidual (of a path around it) may be null.
  virtual void layer_norm_backward(float* dx, float* dweight, float* dbias, const float* dy, const float* dresidual,
                                   const float* x, const float* weight, const float* mean, const float* rstd,
                                   int64_t rows, int64_t dim) = 0;

  virtual void gelu_forward(float* y, const float* x, int64_t count) = 0;
  virtual void gelu_backward(float* dx, const float* dy, const float* x, int64_t count) = 0;

  // Causal. qkv: [batch, seq, 3 * dim]; probabilities: [batch, heads, seq, seq], kept for the backward pass.
  virtual void attention_forward(float* y, float* probabilities, const float* qkv, AttentionShape shape) = 0;
  // dscores: scratch of the size of probabilities.
  virtual void attention_backward(float* dqkv, float* dscores, const float* dy, const float* qkv,
                                  const float* probabilities, AttentionShape shape) = 0;

  // y = residual + dropout(x)
  virtual void dropout_add_forward(float* y, const float* x, const float* residual, int64_t count, DropoutKey key) = 0;
  virtual void dropout_backward(float* dx, const float* dy, int64_t count, DropoutKey key) = 0;

  // loss: one float, the mean over the rows. row_losses: [rows], scratch. dlogits: of the mean.
  virtual void cross_entropy(float* loss, float* dlogits, float* row_losses, const float* logits,
                             const int32_t* targets, int64_t rows, int64_t vocabulary) = 0;

  virtual void sum_of_squares(double* sum, const float* x, int64_t count) = 0;
  virtual void adamw(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient, int64_t count,
                     AdamWStep step) = 0;
};

std::unique_ptr<Backend> make_cpu_backend(int threads);

}  // namespace minigpt
