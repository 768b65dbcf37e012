#pragma once

#include <deque>

#include "samples/minigpt/modules.h"
#include "samples/minigpt/options.h"

namespace minigpt {

// One transformer block: pre-norm attention and MLP, each added to the residual stream through dropout.
class Block {
 public:
  Block(Context& context, int index, const ModelConfig& config);
  const Tensor& forward(const Tensor& input);
  const Tensor& backward(const Tensor& grad_output);

 private:
  LayerNorm ln1_;
  Linear qkv_;
  Attention attention_;
  Linear proj_;
  DropoutAdd attention_dropout_;
  LayerNorm ln2_;
  Linear fc1_;
  Gelu gelu_;
  Linear fc2_;
  DropoutAdd mlp_dropout_;
};

// GPT-2's architecture, with the output head tied to the token embedding.
class Model {
 public:
  Model(Context& context, const ModelConfig& config);
  // The loss, one float in the backend's memory. The token tensors must live until backward() returns.
  const Tensor& forward(const TokenTensor& tokens, const TokenTensor& targets);
  void backward();

 private:
  TokenEmbedding wte_;
  PositionEmbedding wpe_;
  std::deque<Block> blocks_;
  LayerNorm ln_f_;
  Linear head_;
  CrossEntropy loss_;
};

// Draws GPT-2's initial weights: the same on every rank and device.
void initialize(std::deque<Parameter>& parameters, int layers, uint64_t seed);

}  // namespace minigpt
