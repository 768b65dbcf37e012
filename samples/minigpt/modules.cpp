#include "samples/minigpt/modules.h"

#include "samples/minigpt/inject.h"
#include "samples/minigpt/recording.h"

namespace minigpt {

Parameter& Module::add_parameter(const char* name, const std::vector<int64_t>& shape) {
  return context_.parameters.emplace_back(context_.backend, path_, name, shape);
}

const Tensor& Module::finish_forward() {
  if (context_.faults.strikes(FaultKind::bitflip_activation, path_)) flip_bit(output_);
  if (context_.faults.strikes(FaultKind::nan, path_)) make_nan(output_);
  record("output", FORKPOINT_ROLE_OUTPUT, output_);
  return output_;
}

void Module::before_use(Parameter& parameter) const {
  if (parameter.name == "weight" && context_.faults.strikes(FaultKind::bitflip_weight, path_))
    flip_bit(parameter.value);
  record(parameter.name.c_str(), FORKPOINT_ROLE_INPUT, parameter.value);
}

void Module::finish_gradient(Parameter& parameter) const {
  if (parameter.name == "weight" && context_.faults.strikes(FaultKind::bitflip_grad, path_)) flip_bit(parameter.grad);
  record((parameter.name + ".grad").c_str(), FORKPOINT_ROLE_GRADIENT, parameter.grad);
}

TokenEmbedding::TokenEmbedding(Context& context, std::string path, int64_t vocabulary, int64_t batch, int64_t seq,
                               int64_t dim)
    : Module(context, std::move(path), {batch, seq, dim}, {0}), weight_(add_parameter("weight", {vocabulary, dim})) {}

const Tensor& TokenEmbedding::forward(const TokenTensor& tokens) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, tokens);
  before_use(weight_);
  context_.backend.embedding_forward(output_.data(), tokens.data(), weight_.value.data(), tokens.count(),
                                     output_.last());
  tokens_ = &tokens;
  return finish_forward();
}

void TokenEmbedding::backward(const Tensor& grad_output) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  record("weight.grad.head", FORKPOINT_ROLE_INPUT, weight_.grad);
  context_.backend.embedding_backward(weight_.grad.data(), tokens_->data(), grad_output.data(), tokens_->count(),
                                      grad_output.last(), weight_.value.shape()[0]);
  finish_gradient(weight_);
}

PositionEmbedding::PositionEmbedding(Context& context, std::string path, int64_t batch, int64_t seq, int64_t dim)
    : Module(context, std::move(path), {batch, seq, dim}, {0}), weight_(add_parameter("weight", {seq, dim})) {}

const Tensor& PositionEmbedding::forward(const Tensor& input) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, input);
  before_use(weight_);
  context_.backend.positions_forward(output_.data(), input.data(), weight_.value.data(), input.shape()[0],
                                     input.shape()[1], input.last());
  return finish_forward();
}

const Tensor& PositionEmbedding::backward(const Tensor& grad_output) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  context_.backend.positions_backward(weight_.grad.data(), grad_output.data(), output_.shape()[0], output_.shape()[1],
                                      output_.last());
  finish_gradient(weight_);
  return grad_output;  // a sum hands its gradient on as it is
}

LayerNorm::LayerNorm(Context& context, std::string path, const std::vector<int64_t>& shape)
    : Module(context, std::move(path), shape, shape),
      weight_(add_parameter("weight", {shape.back()})),
      bias_(add_parameter("bias", {shape.back()})),
      mean_(context.backend, {output_.rows()}),
      rstd_(context.backend, {output_.rows()}) {}

const Tensor& LayerNorm::forward(const Tensor& input) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, input);
  before_use(weight_);
  before_use(bias_);
  context_.backend.layer_norm_forward(output_.data(), mean_.data(), rstd_.data(), input.data(), weight_.value.data(),
                                      bias_.value.data(), input.rows(), input.last());
  input_ = &input;
  return finish_forward();
}

const Tensor& LayerNorm::backward(const Tensor& grad_output, const Tensor* grad_residual) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  if (grad_residual) record("grad_residual", FORKPOINT_ROLE_INPUT, *grad_residual);
  context_.backend.layer_norm_backward(grad_input_.data(), weight_.grad.data(), bias_.grad.data(), grad_output.data(),
                                       grad_residual ? grad_residual->data() : nullptr, input_->data(),
                                       weight_.value.data(), mean_.data(), rstd_.data(), input_->rows(),
                                       input_->last());
  record("grad_input", FORKPOINT_ROLE_OUTPUT, grad_input_);
  finish_gradient(weight_);
  finish_gradient(bias_);
  return grad_input_;
}

namespace {
std::vector<int64_t> with_last(std::vector<int64_t> shape, int64_t last) {
  shape.back() = last;
  return shape;
}
}  // namespace

Linear::Linear(Context& context, std::string path, const std::vector<int64_t>& input_shape, int64_t out)
    : Module(context, std::move(path), with_last(input_shape, out), input_shape),
      weight_(add_parameter("weight", {out, input_shape.back()})),
      bias_(&add_parameter("bias", {out})) {}

Linear::Linear(Context& context, std::string path, const std::vector<int64_t>& input_shape, Parameter& weight)
    : Module(context, std::move(path), with_last(input_shape, weight.value.shape()[0]), input_shape),
      weight_(weight),
      bias_(nullptr) {}

const Tensor& Linear::forward(const Tensor& input) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, input);
  before_use(weight_);
  if (bias_) before_use(*bias_);
  const SumOrder order =
      context_.faults.strikes(FaultKind::reorder_forward, path_) ? SumOrder::reversed : SumOrder::forward;
  context_.backend.linear_forward(output_.data(), input.data(), weight_.value.data(),
                                  bias_ ? bias_->value.data() : nullptr, shape(), order);
  input_ = &input;
  return finish_forward();
}

const Tensor& Linear::backward(const Tensor& grad_output) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  context_.backend.linear_backward_input(grad_input_.data(), grad_output.data(), weight_.value.data(), shape());
  context_.backend.linear_backward_weight(weight_.grad.data(), bias_ ? bias_->grad.data() : nullptr, grad_output.data(),
                                          input_->data(), shape());
  record("grad_input", FORKPOINT_ROLE_OUTPUT, grad_input_);
  finish_gradient(weight_);
  if (bias_) finish_gradient(*bias_);
  return grad_input_;
}

const Tensor& Gelu::forward(const Tensor& input) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, input);
  context_.backend.gelu_forward(output_.data(), input.data(), input.count());
  input_ = &input;
  return finish_forward();
}

const Tensor& Gelu::backward(const Tensor& grad_output) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  context_.backend.gelu_backward(grad_input_.data(), grad_output.data(), input_->data(), input_->count());
  record("grad_input", FORKPOINT_ROLE_OUTPUT, grad_input_);
  return grad_input_;
}

Attention::Attention(Context& context, std::string path, AttentionShape s)
    : Module(context, std::move(path), {s.batch, s.seq, s.dim()}, {s.batch, s.seq, 3 * s.dim()}),
      shape_(s),
      probabilities_(context.backend, {s.batch, s.heads, s.seq, s.seq}),
      grad_scores_(context.backend, {s.batch, s.heads, s.seq, s.seq}) {}

// Queries, keys and values as [batch, heads, seq, head_dim]: views into one tensor.
void Attention::record_heads(const char* prefix, int role, const Tensor& qkv) const {
  if (!forkpoint_active() || forkpoint_level() < 1) return;
  const std::vector<int64_t> shape = {shape_.batch, shape_.heads, shape_.seq, shape_.head_dim};
  const int64_t strides[] = {shape_.seq * 3 * shape_.dim(), shape_.head_dim, 3 * shape_.dim(), 1};
  for (int part = 0; part < 3; ++part)
    record_view((prefix + std::string(1, "qkv"[part])).c_str(), static_cast<forkpoint_role>(role), qkv,
                qkv.data() + part * shape_.dim(), shape, strides);
}

const Tensor& Attention::forward(const Tensor& qkv) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, qkv);
  record_heads("", FORKPOINT_ROLE_INPUT, qkv);
  context_.backend.attention_forward(output_.data(), probabilities_.data(), qkv.data(), shape_);
  qkv_ = &qkv;
  return finish_forward();
}

const Tensor& Attention::backward(const Tensor& grad_output) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  context_.backend.attention_backward(grad_input_.data(), grad_scores_.data(), grad_output.data(), qkv_->data(),
                                      probabilities_.data(), shape_);
  record_heads("grad_", FORKPOINT_ROLE_OUTPUT, grad_input_);
  record("grad_input", FORKPOINT_ROLE_OUTPUT, grad_input_);
  return grad_input_;
}

DropoutKey DropoutAdd::key() const {
  return {context_.dropout_seed, static_cast<uint32_t>(context_.step), static_cast<uint32_t>(context_.rank), site_,
          probability_};
}

// Seed and place in the stream of this one use: equal generator states do not mean equal masks.
void DropoutAdd::record_key() const {
  const uint64_t state[] = {key().seed, key().step, key().rank, key().site};
  forkpoint_state("dropout.key", FORKPOINT_ROLE_RNG, state, sizeof(state));
}

const Tensor& DropoutAdd::forward(const Tensor& input, const Tensor& residual) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, input);
  record("residual", FORKPOINT_ROLE_INPUT, residual);
  record_key();
  context_.backend.dropout_add_forward(output_.data(), input.data(), residual.data(), input.count(), key());
  return finish_forward();
}

const Tensor& DropoutAdd::backward(const Tensor& grad_output) {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_output", FORKPOINT_ROLE_INPUT, grad_output);
  context_.backend.dropout_backward(grad_input_.data(), grad_output.data(), grad_output.count(), key());
  record("grad_input", FORKPOINT_ROLE_OUTPUT, grad_input_);
  return grad_input_;
}

const Tensor& CrossEntropy::forward(const Tensor& logits, const TokenTensor& targets) {
  const Scope scope(FORKPOINT_FORWARD, path_.c_str());
  record("input", FORKPOINT_ROLE_INPUT, logits);
  record("targets", FORKPOINT_ROLE_INPUT, targets);
  context_.backend.cross_entropy(output_.data(), grad_input_.data(), row_losses_.data(), logits.data(), targets.data(),
                                 logits.rows(), logits.last());
  return finish_forward();
}

const Tensor& CrossEntropy::backward() {
  const Scope scope(FORKPOINT_BACKWARD, path_.c_str());
  record("grad_input", FORKPOINT_ROLE_OUTPUT, grad_input_);
  return grad_input_;
}

}  // namespace minigpt
