// How the statistics see an element: its magnitude as an unsigned integer that grows with |value|, and the magnitude from
// which on it is not finite. Shared by the host digest and by the planner of the device kernels.
#pragma once

#include <cstdint>

#include "lib/dtype.h"

namespace forkpoint {

// masked: magnitude = bits & mask (floats without their sign, unsigned integers); absolute: |signed integer|.
enum class MagnitudeKind : uint8_t { none = 0, masked, absolute };

struct MagnitudeRule {
  MagnitudeKind kind = MagnitudeKind::none;
  uint8_t bytes = 1;                        // of an element, or of a part of a complex one
  uint64_t mask = 0;                        // of one element
  uint64_t nonfinite_from = ~uint64_t{0};   // magnitudes from here on are infinite or NaN; all ones: there are none
};

constexpr MagnitudeRule magnitude_rule(DType dtype) {
  using enum MagnitudeKind;
  constexpr uint64_t kNever = ~uint64_t{0};
  switch (dtype) {
    case DType::u8: case DType::boolean: return {masked, 1, 0xFF, kNever};
    case DType::u16: return {masked, 2, 0xFFFF, kNever};
    case DType::u32: return {masked, 4, 0xFFFFFFFF, kNever};
    case DType::u64: return {masked, 8, kNever, kNever};
    case DType::i8: return {absolute, 1, 0xFF, kNever};
    case DType::i16: return {absolute, 2, 0xFFFF, kNever};
    case DType::i32: return {absolute, 4, 0xFFFFFFFF, kNever};
    case DType::i64: return {absolute, 8, kNever, kNever};
    case DType::f8e4m3: return {masked, 1, 0x7F, 0x7F};
    case DType::f8e5m2: return {masked, 1, 0x7F, 0x7C};
    case DType::f16: return {masked, 2, 0x7FFF, 0x7C00};
    case DType::bf16: return {masked, 2, 0x7FFF, 0x7F80};
    case DType::f32: case DType::c64: return {masked, 4, 0x7FFFFFFF, 0x7F800000};
    case DType::f64: case DType::c128: return {masked, 8, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000};
    case DType::f4x2: case DType::raw: break;
  }
  return {};
}

// The largest finite magnitude as a value: rounded to float, saturated to FLT_MAX. Integer arithmetic wherever the
// floating-point unit's mode could matter: the host process may have set flush-to-zero.
float absmax_from_magnitude(DType dtype, uint64_t magnitude);

// Over count elements of rule.bytes each at data (any alignment).
struct MagnitudeStats {
  uint64_t largest_finite = 0;
  uint64_t nonfinite = 0;
  void merge(const MagnitudeStats& other) {
    if (other.largest_finite > largest_finite) largest_finite = other.largest_finite;
    nonfinite += other.nonfinite;
  }
};

}  // namespace forkpoint
