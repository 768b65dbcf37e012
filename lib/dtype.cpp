#include "lib/dtype.h"

#include <array>

namespace forkpoint {
namespace {

constexpr std::array<std::string_view, kDTypeCount> kNames = {"u8",     "i8",   "u16", "i16",  "u32", "i32", "u64",
                                                              "i64",    "bool", "f16", "bf16", "f32", "f64", "f8e4m3",
                                                              "f8e5m2", "f4x2", "c64", "c128", "raw"};

}  // namespace

std::string_view name(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  return number < kNames.size() ? kNames[number] : std::string_view("unknown");
}

std::optional<DType> dtype_from_name(std::string_view text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace forkpoint
