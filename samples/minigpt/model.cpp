#include "samples/minigpt/model.h"

#include <cmath>
#include <numbers>

namespace minigpt {
namespace {

std::string block_path(int index, const char* module) { return "blocks." + std::to_string(index) + "." + module; }

// Two standard normal numbers a call of the generator (Box and Muller).
float normal(uint64_t seed, uint32_t parameter, int64_t element) {
  const PhiloxWords words = philox({{static_cast<uint32_t>(element >> 1), static_cast<uint32_t>(element >> 33),
                                     static_cast<uint32_t>(RandomUse::weights) | parameter, 0}},
                                   seed);
  const double radius = std::sqrt(-2 * std::log((words.word[0] + 1.0) / 4294967296.0));
  const double angle = 2 * std::numbers::pi * words.word[1] / 4294967296.0;
  return static_cast<float>(radius * ((element & 1) ? std::sin(angle) : std::cos(angle)));
}

}  // namespace

Block::Block(Context& context, int index, const ModelConfig& c)
    : ln1_(context, block_path(index, "ln1"), {c.batch, c.seq, c.dim}),
      qkv_(context, block_path(index, "attn.qkv"), {c.batch, c.seq, c.dim}, 3 * c.dim),
      attention_(context, block_path(index, "attn"), {c.batch, c.seq, c.heads, c.dim / c.heads}),
      proj_(context, block_path(index, "attn.proj"), {c.batch, c.seq, c.dim}, c.dim),
      attention_dropout_(context, block_path(index, "attn.dropout"), {c.batch, c.seq, c.dim}, 2 * index, c.dropout),
      ln2_(context, block_path(index, "ln2"), {c.batch, c.seq, c.dim}),
      fc1_(context, block_path(index, "mlp.fc1"), {c.batch, c.seq, c.dim}, 4 * c.dim),
      gelu_(context, block_path(index, "mlp.gelu"), {c.batch, c.seq, 4 * c.dim}),
      fc2_(context, block_path(index, "mlp.fc2"), {c.batch, c.seq, 4 * c.dim}, c.dim),
      mlp_dropout_(context, block_path(index, "mlp.dropout"), {c.batch, c.seq, c.dim}, 2 * index + 1, c.dropout) {}

const Tensor& Block::forward(const Tensor& input) {
  const Tensor& attended = proj_.forward(attention_.forward(qkv_.forward(ln1_.forward(input))));
  const Tensor& middle = attention_dropout_.forward(attended, input);
  const Tensor& thought = fc2_.forward(gelu_.forward(fc1_.forward(ln2_.forward(middle))));
  return mlp_dropout_.forward(thought, middle);
}

const Tensor& Block::backward(const Tensor& grad_output) {
  const Tensor& grad_mlp = fc1_.backward(gelu_.backward(fc2_.backward(mlp_dropout_.backward(grad_output))));
  const Tensor& grad_middle = ln2_.backward(grad_mlp, &grad_output);
  const Tensor& grad_attention =
      qkv_.backward(attention_.backward(proj_.backward(attention_dropout_.backward(grad_middle))));
  return ln1_.backward(grad_attention, &grad_middle);
}

Model::Model(Context& context, const ModelConfig& c)
    : wte_(context, "wte", c.vocabulary, c.batch, c.seq, c.dim),
      wpe_(context, "wpe", c.batch, c.seq, c.dim),
      blocks_([&] {
        std::deque<Block> blocks;
        for (int index = 0; index < c.layers; ++index) blocks.emplace_back(context, index, c);
        return blocks;
      }()),
      ln_f_(context, "ln_f", {c.batch, c.seq, c.dim}),
      head_(context, "head", {c.batch, c.seq, c.dim}, wte_.weight()),
      loss_(context, "loss", c.batch, c.seq, c.vocabulary) {}

const Tensor& Model::forward(const TokenTensor& tokens, const TokenTensor& targets) {
  const Tensor* stream = &wpe_.forward(wte_.forward(tokens));
  for (Block& block : blocks_) stream = &block.forward(*stream);
  return loss_.forward(head_.forward(ln_f_.forward(*stream)), targets);
}

void Model::backward() {
  const Tensor* gradient = &ln_f_.backward(head_.backward(loss_.backward()));
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) gradient = &block->backward(*gradient);
  wte_.backward(wpe_.backward(*gradient));
}

void initialize(std::deque<Parameter>& parameters, int layers, uint64_t seed) {
  const float residual_scale =
      1.0f / std::sqrt(2.0f * static_cast<float>(layers));  // of what adds to the residual stream
  uint32_t index = 0;
  for (Parameter& parameter : parameters) {
    std::vector<float> values(static_cast<size_t>(parameter.value.count()));
    const bool is_norm =
        parameter.layer.ends_with("ln1") || parameter.layer.ends_with("ln2") || parameter.layer == "ln_f";
    const bool adds = parameter.layer.ends_with("attn.proj") || parameter.layer.ends_with("mlp.fc2");
    if (parameter.name == "weight")
      for (size_t i = 0; i < values.size(); ++i)
        values[i] =
            is_norm ? 1.0f : 0.02f * (adds ? residual_scale : 1.0f) * normal(seed, index, static_cast<int64_t>(i));
    parameter.value.copy_in(values.data());
    ++index;
  }
}

}  // namespace minigpt
