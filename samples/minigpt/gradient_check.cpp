#include "samples/minigpt/gradient_check.h"

#include <fmt/format.h>

#include <cmath>
#include <deque>
#include <functional>

#include "samples/minigpt/model.h"

namespace minigpt {
namespace {

// fp32 and steps of this size leave errors of about 0.1%.
constexpr float kStep = 1e-2f;
constexpr double kTolerance = 2e-2;
constexpr int kElementsTried = 24;

void fill(Tensor& tensor, uint64_t seed, float spread, float centre = 0) {
  std::vector<float> values(static_cast<size_t>(tensor.count()));
  for (size_t i = 0; i < values.size(); ++i) {
    const PhiloxWords words = philox({{static_cast<uint32_t>(i), 0, 0, 0}}, seed);
    values[i] = centre + spread * (static_cast<float>(words.word[0]) / 2147483648.0f - 1.0f);
  }
  tensor.copy_in(values.data());
}

double dot(const Tensor& a, const Tensor& b) {
  const std::vector<float> x = a.copy_out(), y = b.copy_out();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(x[i]) * y[i];
  return sum;
}

class Checker {
 public:
  explicit Checker(Backend& backend) : backend_(backend) {}
  bool all_agree() const { return all_agree_; }

  // objective() as a function of value, against its gradient, at single elements.
  void elements(const std::string& name, Tensor& value, const Tensor& gradient,
                const std::function<double()>& objective) {
    std::vector<float> values = value.copy_out();
    const std::vector<float> expected = gradient.copy_out();
    const double typical = std::sqrt(dot(gradient, gradient) / static_cast<double>(gradient.count()));
    const size_t stride = std::max<size_t>(1, values.size() / kElementsTried);
    double worst = typical > 0 ? 0 : 1;
    for (size_t i = stride / 2; i < values.size(); i += stride) {
      const float kept = values[i];
      const auto at = [&](float x) {
        values[i] = x;
        value.copy_in(values.data());
        return objective();
      };
      const double found = (at(kept + kStep) - at(kept - kStep)) / (2.0 * kStep);
      at(kept);
      worst = std::max(worst, std::abs(found - expected[i]) / std::max<double>(typical, std::abs(expected[i])));
    }
    report(name, worst);
  }

  // As above, along the gradient: a stronger signal for a whole model's loss, which has few digits to spare.
  void along_gradient(const std::string& name, Tensor& value, const Tensor& gradient,
                      const std::function<double()>& objective) {
    const std::vector<float> kept = value.copy_out(), direction = gradient.copy_out();
    const double norm = std::sqrt(dot(gradient, gradient));
    const auto at = [&](double distance) {
      std::vector<float> moved = kept;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += static_cast<float>(distance / norm * direction[i]);
      value.copy_in(moved.data());
      return objective();
    };
    const double found = (at(2 * kStep) - at(-2 * kStep)) / (4.0 * kStep);
    value.copy_in(kept.data());
    report(name, norm > 0 ? std::abs(found - norm) / norm : 1);
  }

  void report(const std::string& name, double error) {
    const bool agrees = error <= kTolerance;
    all_agree_ &= agrees;
    fmt::print("{:32} {:8.1e}  {}\n", name, error, agrees ? "ok" : "WRONG");
  }

  Backend& backend() { return backend_; }

 private:
  Backend& backend_;
  bool all_agree_ = true;
};

struct Bench {
  explicit Bench(Backend& backend) : context{backend, faults, parameters, 1, 3, 7} {}
  FaultPlan faults;
  std::deque<Parameter> parameters;
  Context context;
};

// A module with one input: the input's gradient and each parameter's, for the objective "output . weights".
template <typename M>
void check_module(Checker& checker, const std::string& name, Bench& bench, M& module,
                  const std::vector<int64_t>& input_shape) {
  Tensor input(checker.backend(), input_shape);
  fill(input, 1, 1.5f);
  uint64_t seed = 10;
  for (Parameter& parameter : bench.parameters) fill(parameter.value, seed++, 0.5f, 0.2f);
  Tensor weights(checker.backend(), module.forward(input).shape());
  fill(weights, 2, 1);
  const Tensor& grad_input = module.backward(weights);
  const auto objective = [&] { return dot(module.forward(input), weights); };
  checker.elements(name + " input", input, grad_input, objective);
  for (Parameter& parameter : bench.parameters)
    checker.elements(name + " " + parameter.name, parameter.value, parameter.grad, objective);
}

void check_dropout(Checker& checker) {
  Bench bench(checker.backend());
  DropoutAdd dropout(bench.context, "dropout", {2, 5, 13}, 1, 0.3f);
  Tensor input(checker.backend(), {2, 5, 13}), residual(checker.backend(), {2, 5, 13}),
      weights(checker.backend(), {2, 5, 13});
  fill(input, 1, 1.5f);
  fill(residual, 2, 1.5f);
  fill(weights, 3, 1);
  const Tensor& grad_input = dropout.backward(weights);
  checker.elements("dropout_add input", input, grad_input,
                   [&] { return dot(dropout.forward(input, residual), weights); });
}

void check_cross_entropy(Checker& checker) {
  Bench bench(checker.backend());
  CrossEntropy loss(bench.context, "loss", 2, 3, 37);
  Tensor logits(checker.backend(), {2, 3, 37});
  TokenTensor targets(checker.backend(), {2, 3});
  fill(logits, 1, 2);
  const std::vector<int32_t> wanted = {0, 5, 36, 12, 12, 7};
  targets.copy_in(wanted.data());
  const auto objective = [&] { return 100.0 * loss.forward(logits, targets).copy_out()[0]; };
  objective();
  Tensor gradient(checker.backend(), {2, 3, 37});
  std::vector<float> scaled = loss.backward().copy_out();
  for (float& value : scaled) value *= 100;
  gradient.copy_in(scaled.data());
  checker.elements("cross_entropy logits", logits, gradient, objective);
}

void check_embeddings(Checker& checker) {
  Bench bench(checker.backend());
  TokenEmbedding tokens(bench.context, "wte", 11, 2, 6, 9);
  TokenTensor drawn(checker.backend(), {2, 6});
  const std::vector<int32_t> ids = {0, 3, 3, 10, 7, 0, 1, 2, 4, 5, 6, 8};
  drawn.copy_in(ids.data());
  fill(bench.parameters.front().value, 1, 1);
  Tensor weights(checker.backend(), tokens.forward(drawn).shape());
  fill(weights, 2, 1);
  tokens.backward(weights);  // its gradient was zero before
  checker.elements("embedding weight", bench.parameters.front().value, bench.parameters.front().grad,
                   [&] { return dot(tokens.forward(drawn), weights); });
}

void check_model(Checker& checker) {
  Bench bench(checker.backend());
  ModelConfig config;
  config.layers = 2, config.dim = 24, config.heads = 3, config.seq = 9, config.batch = 2, config.vocabulary = 31;
  Model model(bench.context, config);
  uint64_t seed = 1;
  for (Parameter& parameter : bench.parameters)
    fill(parameter.value, seed++, 0.3f, parameter.layer.find("ln") != std::string::npos ? 1 : 0);
  TokenTensor tokens(checker.backend(), {2, 9}), targets(checker.backend(), {2, 9});
  std::vector<int32_t> ids(18);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 11 % 31);
  tokens.copy_in(ids.data());
  for (int32_t& id : ids) id = (id + 5) % 31;
  targets.copy_in(ids.data());
  const auto objective = [&] { return static_cast<double>(model.forward(tokens, targets).copy_out()[0]); };
  objective();
  model.backward();
  for (Parameter& p : bench.parameters)
    checker.along_gradient("model " + p.layer + "." + p.name, p.value, p.grad, objective);
}

}  // namespace

bool check_gradients(Backend& backend) {
  Checker checker(backend);
  fmt::print("{:32} {}\n", "gradient", "largest relative error");
  {
    Bench bench(backend);
    Linear module(bench.context, "linear", {2, 5, 19}, 23);
    check_module(checker, "linear", bench, module, {2, 5, 19});
  }
  {
    Bench bench(backend);
    LayerNorm module(bench.context, "layer_norm", {2, 5, 21});
    check_module(checker, "layer_norm", bench, module, {2, 5, 21});
  }
  {
    Bench bench(backend);
    Gelu module(bench.context, "gelu", {2, 5, 21});
    check_module(checker, "gelu", bench, module, {2, 5, 21});
  }
  {
    Bench bench(backend);
    Attention module(bench.context, "attention", {2, 7, 3, 5});
    check_module(checker, "attention", bench, module, {2, 7, 45});
  }
  {
    Bench bench(backend);
    PositionEmbedding module(bench.context, "positions", 3, 4, 5);
    check_module(checker, "positions", bench, module, {3, 4, 5});
  }
  check_dropout(checker);
  check_cross_entropy(checker);
  check_embeddings(checker);
  check_model(checker);
  return checker.all_agree();
}

}  // namespace minigpt
