#include "lib/digest_magnitude.h"

#include <bit>
#include <cfloat>

namespace forkpoint {
namespace {

// Small binary floats: exponent_bits and mantissa_bits as stored, bias 2^(exponent_bits - 1) - 1.
float small_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t exponent = bits >> mantissa_bits;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int unit = 1 - bias - mantissa_bits;  // exponent of the last mantissa bit of a subnormal
  const uint32_t significand = exponent == 0 ? mantissa : mantissa | (1u << mantissa_bits);
  const int scale = unit + (exponent == 0 ? 0 : static_cast<int>(exponent) - 1);
  // Both factors and the product are normal floats: no rounding, no flushing.
  return static_cast<float>(significand) * std::bit_cast<float>(static_cast<uint32_t>(127 + scale) << 23);
}

float narrow_double(uint64_t bits) {
  const double value = std::bit_cast<double>(bits);
  if (value >= static_cast<double>(FLT_MAX)) return FLT_MAX;
  const int exponent = static_cast<int>(bits >> 52) - 1023;
  if (exponent >= -126) {
    const float rounded = static_cast<float>(value);
    return rounded > FLT_MAX ? FLT_MAX : rounded;
  }
  // A subnormal float counts units of 2^-149; round to nearest, ties to even.
  const int shift = 52 - (exponent + 149);
  if (exponent < -150) return 0;
  const uint64_t significand = (bits & ((uint64_t{1} << 52) - 1)) | (uint64_t{1} << 52);
  uint64_t units = significand >> shift;
  const uint64_t rest = significand & ((uint64_t{1} << shift) - 1);
  const uint64_t half = uint64_t{1} << (shift - 1);
  if (rest > half || (rest == half && (units & 1))) ++units;
  return std::bit_cast<float>(static_cast<uint32_t>(units));
}

}  // namespace

float absmax_from_magnitude(DType dtype, uint64_t magnitude) {
  switch (dtype) {
    case DType::boolean:
      return magnitude ? 1.0f : 0.0f;
    case DType::f8e4m3:
      return small_float(static_cast<uint32_t>(magnitude), 4, 3);
    case DType::f8e5m2:
      return small_float(static_cast<uint32_t>(magnitude), 5, 2);
    case DType::f16:
      return small_float(static_cast<uint32_t>(magnitude), 5, 10);
    case DType::bf16:
      return std::bit_cast<float>(static_cast<uint32_t>(magnitude) << 16);
    case DType::f32:
    case DType::c64:
      return std::bit_cast<float>(static_cast<uint32_t>(magnitude));
    case DType::f64:
    case DType::c128:
      return narrow_double(magnitude);
    case DType::f4x2:
    case DType::raw:
      return 0;
    default:
      return static_cast<float>(magnitude);  // integers
  }
}

}  // namespace forkpoint
