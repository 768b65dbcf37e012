#pragma once

#include <limits>

#include "samples/minigpt/tensor.h"

namespace minigpt {

// The element that faults strike: not a corner, so that its index says something about a tool that finds it.
inline int64_t struck_element(const Tensor& tensor) { return tensor.count() / 2 + tensor.count() / 7; }

// Bit 20, in the mantissa: a change of at most an eighth.
inline void flip_bit(Tensor& tensor) {
  float* element = tensor.data() + struck_element(tensor);
  uint32_t bits = 0;
  tensor.backend().copy_out(&bits, element, sizeof(bits));
  bits ^= 1u << 20;
  tensor.backend().copy_in(element, &bits, sizeof(bits));
}

inline void make_nan(Tensor& tensor) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  tensor.backend().copy_in(tensor.data() + struck_element(tensor), &nan, sizeof(nan));
}

inline void make_zero(Tensor& tensor) {
  const std::vector<float> zeros(static_cast<size_t>(tensor.count()));
  tensor.copy_in(zeros.data());
}

}  // namespace minigpt
