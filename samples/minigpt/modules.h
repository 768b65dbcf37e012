// The layers. Each owns its output and its input's gradient, remembers its input for the backward pass, tells forkpoint
// what it reads and writes, and is where planted faults strike. backward() wants the gradient of the last forward()'s
// output.
#pragma once

#include <deque>
#include <string>

#include "samples/minigpt/fault.h"
#include "samples/minigpt/tensor.h"

namespace minigpt {

// What all modules share.
struct Context {
  Backend& backend;
  const FaultPlan& faults;
  std::deque<Parameter>& parameters;  // grows as modules are made, in forward order
  int rank = 0;
  int64_t step = 0;
  uint64_t dropout_seed = 0;
};

class Module {
 protected:
  Module(Context& context, std::string path, const std::vector<int64_t>& output_shape,
         const std::vector<int64_t>& input_shape)
      : context_(context),
        path_(std::move(path)),
        output_(context.backend, output_shape),
        grad_input_(context.backend, input_shape) {}
  Parameter& add_parameter(const char* name, const std::vector<int64_t>& shape);
  // Faults, then the record.
  const Tensor& finish_forward();
  void before_use(Parameter& weight) const;
  void finish_gradient(Parameter& parameter) const;

  Context& context_;
  std::string path_;
  Tensor output_;
  Tensor grad_input_;
};

// Rows of a table, one a token.
class TokenEmbedding : Module {
 public:
  TokenEmbedding(Context& context, std::string path, int64_t vocabulary, int64_t batch, int64_t seq, int64_t dim);
  Parameter& weight() { return weight_; }
  const Tensor& forward(const TokenTensor& tokens);
  // Adds to the weight's gradient: the tied head has written its part of it.
  void backward(const Tensor& grad_output);

 private:
  Parameter& weight_;
  const TokenTensor* tokens_ = nullptr;
};

class PositionEmbedding : Module {
 public:
  PositionEmbedding(Context& context, std::string path, int64_t batch, int64_t seq, int64_t dim);
  const Tensor& forward(const Tensor& input);
  const Tensor& backward(const Tensor& grad_output);

 private:
  Parameter& weight_;
};

class LayerNorm : Module {
 public:
  LayerNorm(Context& context, std::string path, const std::vector<int64_t>& shape);
  const Tensor& forward(const Tensor& input);
  // grad_residual: of a path around this module, added to grad_input; may be null.
  const Tensor& backward(const Tensor& grad_output, const Tensor* grad_residual = nullptr);

 private:
  Parameter &weight_, &bias_;
  Tensor mean_, rstd_;
  const Tensor* input_ = nullptr;
};

class Linear : Module {
 public:
  Linear(Context& context, std::string path, const std::vector<int64_t>& input_shape, int64_t out);
  // Tied: with another module's weight, without bias. backward() writes that weight's gradient.
  Linear(Context& context, std::string path, const std::vector<int64_t>& input_shape, Parameter& weight);
  const Tensor& forward(const Tensor& input);
  const Tensor& backward(const Tensor& grad_output);

 private:
  LinearShape shape() const { return {grad_input_.rows(), grad_input_.last(), output_.last()}; }
  Parameter& weight_;
  Parameter* bias_;
  const Tensor* input_ = nullptr;
};

class Gelu : Module {
 public:
  Gelu(Context& context, std::string path, const std::vector<int64_t>& shape)
      : Module(context, std::move(path), shape, shape) {}
  const Tensor& forward(const Tensor& input);
  const Tensor& backward(const Tensor& grad_output);

 private:
  const Tensor* input_ = nullptr;
};

// Causal multi-head attention, without its projections: [batch, seq, 3 * dim] to [batch, seq, dim].
class Attention : Module {
 public:
  Attention(Context& context, std::string path, AttentionShape shape);
  const Tensor& forward(const Tensor& qkv);
  const Tensor& backward(const Tensor& grad_output);

 private:
  void record_heads(const char* prefix, int role, const Tensor& qkv) const;
  AttentionShape shape_;
  Tensor probabilities_, grad_scores_;
  const Tensor* qkv_ = nullptr;
};

// residual + dropout(input). The mask is drawn again in the backward pass, not kept.
class DropoutAdd : Module {
 public:
  DropoutAdd(Context& context, std::string path, const std::vector<int64_t>& shape, uint32_t site, float probability)
      : Module(context, std::move(path), shape, shape), site_(site), probability_(probability) {}
  const Tensor& forward(const Tensor& input, const Tensor& residual);
  // The gradient of input; the residual's is grad_output itself.
  const Tensor& backward(const Tensor& grad_output);

 private:
  DropoutKey key() const;
  void record_key() const;
  uint32_t site_;
  float probability_;
};

class CrossEntropy : Module {
 public:
  CrossEntropy(Context& context, std::string path, int64_t batch, int64_t seq, int64_t vocabulary)
      : Module(context, std::move(path), {1}, {batch, seq, vocabulary}), row_losses_(context.backend, {batch, seq}) {}
  // One float: the mean over all tokens.
  const Tensor& forward(const Tensor& logits, const TokenTensor& targets);
  const Tensor& backward();

 private:
  Tensor row_losses_;
};

}  // namespace minigpt
