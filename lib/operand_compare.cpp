#include "lib/operand_compare.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <type_traits>

#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// A value of one element: its number, and its place in the order of all values of its type.
struct Value {
  double number = 0;
  int64_t place = 0;
  bool is_number = true;  // false: NaN
};

// Sign and magnitude, so that neighbours in value are neighbours in place, through zero: -0.0 and 0.0 share theirs.
template <typename Bits>
int64_t place_of_float(Bits bits) {
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  const auto magnitude = static_cast<int64_t>(bits & static_cast<Bits>(kSign - 1));
  return bits & kSign ? -magnitude : magnitude;
}

template <typename Bits>
Value float_value(Bits bits, double number) {
  return {number, place_of_float(bits), !std::isnan(number)};
}

template <typename Type>
Type load(const std::byte* at) {
  Type value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// An IEEE-like format of few bits. REQUIRES: bits has 1 + exponent_bits + mantissa_bits of them.
double small_float_value(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int most = (1 << exponent_bits) - 1, bias = most / 2;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & most;
  double magnitude = std::ldexp(mantissa + (exponent ? 1u << mantissa_bits : 0u), std::max(exponent, 1) - bias - mantissa_bits);
  if (exponent == most) magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

// OCP's FN variant: the largest exponent holds numbers too, and no infinity.
double f8e4m3_value(uint8_t bits) {
  if ((bits & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  if ((bits & 0x78) != 0x78) return small_float_value(bits, 4, 3);
  const double magnitude = std::ldexp(8 + (bits & 7), 15 - 7 - 3);
  return bits & 0x80 ? -magnitude : magnitude;
}

template <typename Integer>
Value integer_value(const std::byte* at) {
  const auto value = load<Integer>(at);
  const bool is_wide = std::is_same_v<Integer, uint64_t>;  // then its order begins at the least int64
  return {static_cast<double>(value), static_cast<int64_t>(is_wide ? static_cast<uint64_t>(value) ^ 1ull << 63 : static_cast<uint64_t>(value)), true};
}

Value value_at(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::i8: return integer_value<int8_t>(at);
    case DType::u16: return integer_value<uint16_t>(at);
    case DType::i16: return integer_value<int16_t>(at);
    case DType::u32: return integer_value<uint32_t>(at);
    case DType::i32: return integer_value<int32_t>(at);
    case DType::u64: return integer_value<uint64_t>(at);
    case DType::i64: return integer_value<int64_t>(at);
    case DType::f16: return float_value(load<uint16_t>(at), small_float_value(load<uint16_t>(at), 5, 10));
    case DType::bf16: return float_value(load<uint16_t>(at), std::bit_cast<float>(uint32_t{load<uint16_t>(at)} << 16));
    case DType::f32:
    case DType::c64: return float_value(load<uint32_t>(at), load<float>(at));
    case DType::f64:
    case DType::c128: return float_value(load<uint64_t>(at), load<double>(at));
    case DType::f8e4m3: return float_value(load<uint8_t>(at), f8e4m3_value(load<uint8_t>(at)));
    case DType::f8e5m2: return float_value(load<uint8_t>(at), small_float_value(load<uint8_t>(at), 5, 2));
    default: return integer_value<uint8_t>(at);
  }
}

size_t part_bytes(DType dtype) {  // a complex number is two parts
  const bool is_complex = dtype == DType::c64 || dtype == DType::c128;
  return static_cast<size_t>(size_bytes(dtype)) / (is_complex ? 2 : 1);
}

void take(const Value& value, ValueRange* range) {
  if (!value.is_number) {
    ++range->nan;
  } else if (std::isinf(value.number)) {
    ++range->infinite;
  } else {
    range->least = range->finite ? std::min(range->least, value.number) : value.number;
    range->greatest = range->finite ? std::max(range->greatest, value.number) : value.number;
    ++range->finite;
  }
}

// Never overflows: places of one type lie less than 2^64 apart.
uint64_t distance(int64_t a, int64_t b) {
  return a > b ? static_cast<uint64_t>(a) - static_cast<uint64_t>(b) : static_cast<uint64_t>(b) - static_cast<uint64_t>(a);
}

int ulp_class(uint64_t ulp) { return ulp <= 1 ? 0 : ulp <= 3 ? 1 : ulp <= 15 ? 2 : ulp <= 255 ? 3 : 4; }

void take_difference(const Value& a, const Value& b, ElementReport* report) {
  if (!a.is_number && !b.is_number) {
    ++report->payload_only;
    return;
  }
  if (a.is_number != b.is_number) {
    ++report->nan_moved;
    return;
  }
  const uint64_t ulp = distance(a.place, b.place);
  if (ulp == 0) {
    ++report->sign_of_zero_only;
    return;
  }
  ++report->ulp[static_cast<size_t>(ulp_class(ulp))];
  report->most_ulp = std::max(report->most_ulp, ulp);
  if (std::isfinite(a.number) && std::isfinite(b.number)) {
    report->most_difference = std::max(report->most_difference, std::abs(a.number - b.number));
  }
}

template <typename Bits>
bool is_permutation(std::span<const std::byte> a, std::span<const std::byte> b) {
  const auto sorted = [](std::span<const std::byte> bytes) {
    std::vector<Bits> values(bytes.size() / sizeof(Bits));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    std::sort(values.begin(), values.end());
    return values;
  };
  return sorted(a) == sorted(b);
}

bool are_permuted(size_t element_bytes, std::span<const std::byte> a, std::span<const std::byte> b) {
  switch (element_bytes) {
    case 1: return is_permutation<uint8_t>(a, b);
    case 2: return is_permutation<uint16_t>(a, b);
    case 4: return is_permutation<uint32_t>(a, b);
    default: return is_permutation<uint64_t>(a, b);
  }
}

std::string range_text(const ValueRange& range) {
  std::vector<std::string> parts;
  if (range.finite) parts.push_back(fmt::format("{:.6g} to {:.6g}", range.least, range.greatest));
  if (range.nan) parts.push_back(fmt::format("{} NaN", grouped(range.nan)));
  if (range.infinite) parts.push_back(fmt::format("{} infinite", grouped(range.infinite)));
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

// "36 by 1 ulp, 1 by 2 to 3"
std::string differences_text(const ElementReport& report) {
  static constexpr const char* kClasses[] = {"1", "2 to 3", "4 to 15", "16 to 255", "256 or more"};
  const bool is_float = report.dtype >= DType::f16 && report.dtype <= DType::c128 && report.dtype != DType::f4x2;
  std::vector<std::string> parts;
  for (int i = 0; i < ElementReport::kUlpClasses; ++i) {
    const uint64_t count = report.ulp[static_cast<size_t>(i)];
    const char* unit = parts.empty() && is_float ? " ulp" : "";
    if (count) parts.push_back(fmt::format("{} by {}{}", grouped(count), kClasses[i], unit));
  }
  if (report.nan_moved) parts.push_back(fmt::format("{} NaN in one run alone", grouped(report.nan_moved)));
  if (report.payload_only) parts.push_back(fmt::format("{} NaN of other bits", grouped(report.payload_only)));
  if (report.sign_of_zero_only) parts.push_back(fmt::format("{} in the sign of zero", grouped(report.sign_of_zero_only)));
  return fmt::format("{}", fmt::join(parts, ", "));
}

using Instance = std::pair<OperandKey, uint32_t>;

OperandPair pair_of(const Operand& a, const Operand* b, DType untyped) {
  OperandPair pair{a.key, a.call, a.shape, std::nullopt, ""};
  if (!b) {
    pair.why_not = "only run A saved it";
  } else if (a.dtype != b->dtype || a.shape != b->shape || a.global_offset != b->global_offset) {
    const auto form = [](const Operand& o) { return to_string(Layout{o.dtype, o.shape, {}, o.global_shape, o.global_offset}); };
    pair.why_not = fmt::format("it is {} in run A and {} in run B", form(a), form(*b));
  } else {
    DType dtype = a.dtype == DType::raw ? untyped : a.dtype;
    if (a.size_bytes % static_cast<uint64_t>(size_bytes(dtype)) != 0) dtype = DType::raw;
    if (dtype != a.dtype) pair.shape = {static_cast<int64_t>(a.size_bytes) / size_bytes(dtype)};
    pair.report = compare_elements(dtype, load_operand(a), load_operand(*b));
  }
  return pair;
}

}  // namespace

ElementReport compare_elements(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  const size_t step = part_bytes(dtype);
  if (a.size() != b.size() || a.size() % step != 0) {
    throw Error(fmt::format("{} and {} bytes of {} were to be compared, expected two of one size.", a.size(), b.size(), name(dtype)));
  }
  ElementReport report;
  report.dtype = dtype;
  report.elements = a.size() / step;
  for (uint64_t i = 0; i < report.elements; ++i) {
    const std::byte *left = a.data() + i * step, *right = b.data() + i * step;
    const Value value_a = value_at(dtype, left), value_b = value_at(dtype, right);
    take(value_a, &report.a);
    take(value_b, &report.b);
    if (std::memcmp(left, right, step) == 0) continue;
    if (report.differing++ == 0) report.first = i;
    if (report.differing == 1 || report.last + 1 != i) ++report.runs;
    report.last = i;
    take_difference(value_a, value_b, &report);
  }
  // One element alone cannot have moved.
  report.same_values_other_order = report.differing > 1 && are_permuted(step, a, b);
  return report;
}

std::vector<int64_t> position_of(uint64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> position(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    const auto extent = static_cast<uint64_t>(std::max<int64_t>(shape[d], 1));
    position[d] = static_cast<int64_t>(index % extent);
    index /= extent;
  }
  return position;
}

std::string sentence(const ElementReport& report, const std::vector<int64_t>& shape) {
  if (report.differing == 0) {
    return fmt::format("all {} are equal; values {}", counted(report.elements, report.dtype == DType::raw ? "byte" : "element"),
                       range_text(report.a));
  }
  const bool is_complex = report.dtype == DType::c64 || report.dtype == DType::c128;
  const auto place = [&](uint64_t index) { return fmt::format("[{}]", fmt::join(position_of(is_complex ? index / 2 : index, shape), ", ")); };
  std::string text = fmt::format("{} of {} {} differ", grouped(report.differing), grouped(report.elements),
                                 is_complex                     ? "parts of complex numbers"
                                 : report.dtype == DType::raw ? "bytes"
                                                              : "elements");
  text += report.first == report.last ? fmt::format(", at {}", place(report.first))
                                      : fmt::format(", from {} to {}", place(report.first), place(report.last));
  if (report.same_values_other_order) text += " (the same values in another order)";
  text += ": " + differences_text(report);
  const std::string a = range_text(report.a), b = range_text(report.b);
  text += a == b ? fmt::format("; values {} in both runs", a) : fmt::format("; values {} in run A, {} in run B", a, b);
  return text;
}

std::vector<OperandPair> compare_operands(const std::filesystem::path& run_a, const std::filesystem::path& run_b, DType untyped) {
  const std::vector<Operand> a = list_operands(run_a), b = list_operands(run_b);
  std::map<Instance, const Operand*> others;
  for (const Operand& operand : b) others[{operand.key, operand.call}] = &operand;
  std::vector<OperandPair> pairs;
  for (const Operand& operand : a) {
    const auto found = others.find({operand.key, operand.call});
    pairs.push_back(pair_of(operand, found == others.end() ? nullptr : found->second, untyped));
    if (found != others.end()) others.erase(found);
  }
  for (const Operand& operand : b) {  // what is left, in its own order
    if (others.contains({operand.key, operand.call})) {
      pairs.push_back({operand.key, operand.call, operand.shape, std::nullopt, "only run B saved it"});
    }
  }
  return pairs;
}

}  // namespace forkpoint
