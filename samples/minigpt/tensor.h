#pragma once

#include <utility>
#include <vector>

#include "samples/minigpt/backend.h"

namespace minigpt {

// A contiguous array in a backend's memory, zero at first. Each is an allocation of its own.
template <typename T>
class Array {
 public:
  Array(Backend& backend, std::vector<int64_t> shape) : backend_(&backend), shape_(std::move(shape)) {
    for (const int64_t size : shape_) count_ *= size;
    data_ = static_cast<T*>(backend.allocate(size_bytes()));
  }
  ~Array() {
    if (data_) backend_->release(data_);
  }
  Array(Array&& other) noexcept
      : backend_(other.backend_),
        shape_(std::move(other.shape_)),
        count_(other.count_),
        data_(std::exchange(other.data_, nullptr)) {}
  Array& operator=(Array&&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t count() const { return count_; }
  int64_t last() const { return shape_.back(); }
  int64_t rows() const { return count_ / last(); }
  size_t size_bytes() const { return static_cast<size_t>(count_) * sizeof(T); }
  Backend& backend() const { return *backend_; }

  void copy_in(const T* host) { backend_->copy_in(data_, host, size_bytes()); }
  std::vector<T> copy_out() const {
    std::vector<T> host(static_cast<size_t>(count_));
    backend_->copy_out(host.data(), data_, size_bytes());
    return host;
  }

 private:
  Backend* backend_;
  std::vector<int64_t> shape_;
  int64_t count_ = 1;
  T* data_ = nullptr;
};

using Tensor = Array<float>;
using TokenTensor = Array<int32_t>;

// A trained tensor with what the optimizer keeps for it. Every backward pass overwrites grad.
struct Parameter {
  Parameter(Backend& backend, std::string layer, std::string name, const std::vector<int64_t>& shape)
      : layer(std::move(layer)),
        name(std::move(name)),
        value(backend, shape),
        grad(backend, shape),
        exp_avg(backend, shape),
        exp_avg_sq(backend, shape) {}
  std::string layer;  // dotted path of its module
  std::string name;   // "weight" or "bias"
  Tensor value, grad, exp_avg, exp_avg_sq;
};

}  // namespace minigpt
