#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "probes/forkpoint.h"
#include "samples/minigpt/backend.h"
#include "samples/minigpt/gemm.h"
#include "samples/minigpt/parallel.h"

namespace minigpt {
namespace {

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads) : parallel_(threads) {}

  void* allocate(size_t size_bytes) override {
    void* memory = std::aligned_alloc(64, size_bytes / 64 * 64 + 64);
    if (!memory) throw std::bad_alloc();
    return std::memset(memory, 0, size_bytes);
  }
  void release(void* memory) override { std::free(memory); }
  void copy_in(void* to, const void* host, size_t size_bytes) override { std::memcpy(to, host, size_bytes); }
  void copy_out(void* host, const void* from, size_t size_bytes) override { std::memcpy(host, from, size_bytes); }
  int forkpoint_device() const override { return FORKPOINT_HOST; }
  void* stream() const override { return nullptr; }

  void embedding_forward(float* y, const int32_t* tokens, const float* table, int64_t rows, int64_t dim) override {
    for (int64_t row = 0; row < rows; ++row) std::memcpy(y + row * dim, table + tokens[row] * dim, dim * sizeof(float));
  }

  void embedding_backward(float* dtable, const int32_t* tokens, const float* dy, int64_t rows, int64_t dim,
                          int64_t) override {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < dim; ++c) dtable[tokens[row] * dim + c] += dy[row * dim + c];
  }

  void positions_forward(float* y, const float* x, const float* table, int64_t batch, int64_t seq,
                         int64_t dim) override {
    const int64_t size = seq * dim;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < size; ++i) y[b * size + i] = x[b * size + i] + table[i];
  }

  void positions_backward(float* dtable, const float* dy, int64_t batch, int64_t seq, int64_t dim) override {
    const int64_t size = seq * dim;
    std::memcpy(dtable, dy, size * sizeof(float));
    for (int64_t b = 1; b < batch; ++b)
      for (int64_t i = 0; i < size; ++i) dtable[i] += dy[b * size + i];
  }

  void linear_forward(float* y, const float* x, const float* weight, const float* bias, LinearShape s,
                      SumOrder order) override {
    transposed_.resize(s.in * s.out);  // so that the inner loop runs along memory
    for (int64_t o = 0; o < s.out; ++o)
      for (int64_t i = 0; i < s.in; ++i) transposed_[i * s.out + o] = weight[o * s.in + i];
    const Gemm g = {y, x, s.in, 1, transposed_.data(), bias, s.out, s.in};
    parallel_.ranges(s.rows, [&](int64_t begin, int64_t end) { gemm(g, begin, end, order); });
  }

  void linear_backward_input(float* dx, const float* dy, const float* weight, LinearShape s) override {
    const Gemm g = {dx, dy, s.out, 1, weight, nullptr, s.in, s.out};
    parallel_.ranges(s.rows, [&](int64_t begin, int64_t end) { gemm(g, begin, end, SumOrder::forward); });
  }

  void linear_backward_weight(float* dweight, float* dbias, const float* dy, const float* x, LinearShape s) override {
    const Gemm g = {dweight, dy, 1, s.out, x, nullptr, s.in, s.rows};
    parallel_.ranges(s.out, [&](int64_t begin, int64_t end) { gemm(g, begin, end, SumOrder::forward); });
    if (!dbias) return;
    std::memset(dbias, 0, s.out * sizeof(float));
    for (int64_t row = 0; row < s.rows; ++row)
      for (int64_t o = 0; o < s.out; ++o) dbias[o] += dy[row * s.out + o];
  }

  void layer_norm_forward(float* y, float* mean, float* rstd, const float* x, const float* weight, const float* bias,
                          int64_t rows, int64_t dim) override {
    for (int64_t row = 0; row < rows; ++row, x += dim, y += dim) {
      float sum = 0, squares = 0;
      for (int64_t c = 0; c < dim; ++c) sum += x[c];
      mean[row] = sum / static_cast<float>(dim);
      for (int64_t c = 0; c < dim; ++c) squares += (x[c] - mean[row]) * (x[c] - mean[row]);
      rstd[row] = 1.0f / std::sqrt(squares / static_cast<float>(dim) + kLayerNormEpsilon);
      for (int64_t c = 0; c < dim; ++c) y[c] = (x[c] - mean[row]) * rstd[row] * weight[c] + bias[c];
    }
  }

  void layer_norm_backward(float* dx, float* dweight, float* dbias, const float* dy, const float* dresidual,
                           const float* x, const float* weight, const float* mean, const float* rstd, int64_t rows,
                           int64_t dim) override {
    std::memset(dweight, 0, dim * sizeof(float));
    std::memset(dbias, 0, dim * sizeof(float));
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * dim;
      float sum = 0, sum_normalised = 0;  // of the gradient of the normalised x, plain and times it
      for (int64_t c = 0; c < dim; ++c) {
        const float normalised = (x[at + c] - mean[row]) * rstd[row];
        dweight[c] += dy[at + c] * normalised;
        dbias[c] += dy[at + c];
        sum += dy[at + c] * weight[c];
        sum_normalised += dy[at + c] * weight[c] * normalised;
      }
      sum /= static_cast<float>(dim);
      sum_normalised /= static_cast<float>(dim);
      for (int64_t c = 0; c < dim; ++c) {
        const float normalised = (x[at + c] - mean[row]) * rstd[row];
        const float own = (dy[at + c] * weight[c] - sum - normalised * sum_normalised) * rstd[row];
        dx[at + c] = dresidual ? dresidual[at + c] + own : own;
      }
    }
  }

  void gelu_forward(float* y, const float* x, int64_t count) override {
    parallel_.ranges(count, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] = gelu(x[i]);
    });
  }
  void gelu_backward(float* dx, const float* dy, const float* x, int64_t count) override {
    parallel_.ranges(count, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) dx[i] = dy[i] * gelu_slope(x[i]);
    });
  }

  void attention_forward(float* y, float* probabilities, const float* qkv, AttentionShape s) override {
    parallel_.ranges(s.batch * s.heads, [=, this](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        head_forward(y, probabilities + i * s.seq * s.seq, qkv, s, i / s.heads, i % s.heads);
    });
  }
  void attention_backward(float* dqkv, float* dscores, const float* dy, const float* qkv, const float* probabilities,
                          AttentionShape s) override {
    parallel_.ranges(s.batch * s.heads, [=, this](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        head_backward(dqkv, dscores + i * s.seq * s.seq, dy, qkv, probabilities + i * s.seq * s.seq, s, i / s.heads,
                      i % s.heads);
    });
  }

  void dropout_add_forward(float* y, const float* x, const float* residual, int64_t count, DropoutKey key) override {
    const uint32_t threshold = dropout_threshold(key);
    const float scale = dropout_scale(key);
    for (int64_t group = 0; group * 4 < count; ++group) {
      const PhiloxWords words = dropout_words(key, static_cast<uint32_t>(group));
      for (int64_t i = group * 4; i < std::min(count, group * 4 + 4); ++i)
        y[i] = residual[i] + (words.word[i & 3] >= threshold ? x[i] * scale : 0.0f);
    }
  }
  void dropout_backward(float* dx, const float* dy, int64_t count, DropoutKey key) override {
    const uint32_t threshold = dropout_threshold(key);
    const float scale = dropout_scale(key);
    for (int64_t group = 0; group * 4 < count; ++group) {
      const PhiloxWords words = dropout_words(key, static_cast<uint32_t>(group));
      for (int64_t i = group * 4; i < std::min(count, group * 4 + 4); ++i)
        dx[i] = words.word[i & 3] >= threshold ? dy[i] * scale : 0.0f;
    }
  }

  void cross_entropy(float* loss, float* dlogits, float* row_losses, const float* logits, const int32_t* targets,
                     int64_t rows, int64_t vocabulary) override {
    float total = 0;
    for (int64_t row = 0; row < rows; ++row, logits += vocabulary, dlogits += vocabulary) {
      float largest = logits[0], sum = 0;
      for (int64_t v = 1; v < vocabulary; ++v) largest = std::max(largest, logits[v]);
      for (int64_t v = 0; v < vocabulary; ++v) sum += dlogits[v] = std::exp(logits[v] - largest);
      row_losses[row] = std::log(sum) + largest - logits[targets[row]];
      total += row_losses[row];
      for (int64_t v = 0; v < vocabulary; ++v)
        dlogits[v] = (dlogits[v] / sum - (v == targets[row] ? 1.0f : 0.0f)) / static_cast<float>(rows);
    }
    *loss = total / static_cast<float>(rows);
  }

  void sum_of_squares(double* sum, const float* x, int64_t count) override {
    *sum = 0;
    for (int64_t i = 0; i < count; ++i) *sum += static_cast<double>(x[i]) * x[i];
  }

  void adamw(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient, int64_t count,
             AdamWStep step) override {
    parallel_.ranges(count, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) adamw_element(step, weight[i], exp_avg[i], exp_avg_sq[i], gradient[i]);
    });
  }

 private:
  static void head_forward(float* y, float* probabilities, const float* qkv, const AttentionShape& s, int64_t b,
                           int64_t h) {
    const int64_t stride = 3 * s.dim();
    const float* q = qkv + b * s.seq * stride + h * s.head_dim;
    const float* k = q + s.dim();
    const float* v = k + s.dim();
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    for (int64_t t = 0; t < s.seq; ++t) {
      float* p = probabilities + t * s.seq;
      float largest = -INFINITY, sum = 0;
      for (int64_t u = 0; u <= t; ++u) {
        float dot = 0;
        for (int64_t c = 0; c < s.head_dim; ++c) dot += q[t * stride + c] * k[u * stride + c];
        p[u] = dot * scale;
        largest = std::max(largest, p[u]);
      }
      for (int64_t u = 0; u <= t; ++u) sum += p[u] = std::exp(p[u] - largest);
      float* out = y + (b * s.seq + t) * s.dim() + h * s.head_dim;
      std::memset(out, 0, s.head_dim * sizeof(float));
      for (int64_t u = 0; u <= t; ++u) {
        p[u] /= sum;
        for (int64_t c = 0; c < s.head_dim; ++c) out[c] += p[u] * v[u * stride + c];
      }
    }
  }

  static void head_backward(float* dqkv, float* dscores, const float* dy, const float* qkv, const float* probabilities,
                            const AttentionShape& s, int64_t b, int64_t h) {
    const int64_t stride = 3 * s.dim(), at = b * s.seq * stride + h * s.head_dim;
    const float *q = qkv + at, *k = q + s.dim(), *v = k + s.dim();
    float *dq = dqkv + at, *dk = dq + s.dim(), *dv = dk + s.dim();
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    for (int64_t t = 0; t < s.seq; ++t)
      for (float* row : {dq, dk, dv}) std::memset(row + t * stride, 0, s.head_dim * sizeof(float));
    for (int64_t t = 0; t < s.seq; ++t) {
      const float* p = probabilities + t * s.seq;
      const float* dout = dy + (b * s.seq + t) * s.dim() + h * s.head_dim;
      float* ds = dscores + t * s.seq;
      float mean = 0;  // of the gradient of the probabilities, weighted by them
      for (int64_t u = 0; u <= t; ++u) {
        ds[u] = 0;
        for (int64_t c = 0; c < s.head_dim; ++c) ds[u] += dout[c] * v[u * stride + c];
        mean += p[u] * ds[u];
      }
      for (int64_t u = 0; u <= t; ++u) {
        ds[u] = p[u] * (ds[u] - mean) * scale;
        for (int64_t c = 0; c < s.head_dim; ++c) {
          dq[t * stride + c] += ds[u] * k[u * stride + c];
          dk[u * stride + c] += ds[u] * q[t * stride + c];
          dv[u * stride + c] += p[u] * dout[c];
        }
      }
    }
  }

  Parallel parallel_;
  std::vector<float> transposed_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) { return std::make_unique<CpuBackend>(threads); }

}  // namespace minigpt
