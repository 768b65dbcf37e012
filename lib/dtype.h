// Element types of recorded tensors. The numbers are part of the hash stream format (FORMAT.md) and of the C API
// (probes/forkpoint.h repeats them as FORKPOINT_F32 and so on): append, never renumber.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace forkpoint {

enum class DType : uint8_t {
  u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, u64 = 6, i64 = 7,
  boolean = 8,
  f16 = 9, bf16 = 10, f32 = 11, f64 = 12,
  f8e4m3 = 13,   // OCP FN variant: no infinity, NaN is S.1111.111
  f8e5m2 = 14,
  f4x2 = 15,     // two e2m1 values in a byte; an element is the byte
  c64 = 16, c128 = 17,
  raw = 18,      // bytes without a type: an element is one byte, no statistics but the word sum
};
inline constexpr int kDTypeCount = 19;

constexpr int size_bytes(DType dtype) {
  switch (dtype) {
    case DType::u16: case DType::i16: case DType::f16: case DType::bf16: return 2;
    case DType::u32: case DType::i32: case DType::f32: return 4;
    case DType::u64: case DType::i64: case DType::f64: case DType::c64: return 8;
    case DType::c128: return 16;
    default: return 1;
  }
}

// "f32", "bf16", ...: the names used in every output.
std::string_view name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view text);

}  // namespace forkpoint
