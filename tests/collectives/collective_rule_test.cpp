// The rule of the deterministic collectives against arithmetic that shares nothing with it: values of the formats by
// their definition, roundings by search among all values, sums in long double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "kernels/collective_vectors.h"
#include "kernels/deterministic_collective.h"

namespace forkpoint::collective {
namespace {

// ---- Formats by their definition.
struct Format {
  DType dtype;
  int bits, fraction, bias;
  uint32_t largest, infinity;       // codes; infinity 0: saturates
  std::vector<long double> values;  // of the codes 0 .. largest

  Format(DType dtype, int bits, int fraction, int bias, uint32_t largest, uint32_t infinity)
      : dtype(dtype), bits(bits), fraction(fraction), bias(bias), largest(largest), infinity(infinity) {
    for (uint32_t code = 0; code <= largest; ++code) {
      const uint32_t exponent = code >> fraction, rest = code & ((1u << fraction) - 1);
      values.push_back(exponent ? std::ldexp(static_cast<long double>((1u << fraction) + rest),
                                             static_cast<int>(exponent) - bias - fraction)
                                : std::ldexp(static_cast<long double>(rest), 1 - bias - fraction));
    }
  }
  uint32_t sign_bit() const { return 1u << (bits - 1); }
  // Nearest code, ties to the even one.
  uint32_t round(long double value) const {
    if (std::isnan(value)) return sign_bit() - 1;
    const uint32_t sign = std::signbit(value) ? sign_bit() : 0;
    const long double magnitude = std::fabs(value);
    const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
    if (above == values.end()) {
      const long double last_step = values.back() - values[values.size() - 2];
      const bool overflows = magnitude >= values.back() + last_step / 2;
      return sign | (overflows && infinity ? infinity : largest);
    }
    auto code = static_cast<uint32_t>(above - values.begin());
    if (code > 0 && *above != magnitude) {
      const long double down = magnitude - values[code - 1], up = *above - magnitude;
      if (down < up || (down == up && (code - 1) % 2 == 0)) --code;
    }
    return sign | code;
  }
  bool is_finite(uint32_t code) const { return (code & (sign_bit() - 1)) <= largest; }
  long double value(uint32_t code) const {
    const long double magnitude = values[code & (sign_bit() - 1)];
    return code & sign_bit() ? -magnitude : magnitude;
  }
};
const Format& half() {
  static const Format f(DType::f16, 16, 10, 15, 0x7bff, 0x7c00);
  return f;
}
const Format& brain() {
  static const Format f(DType::bf16, 16, 7, 127, 0x7f7f, 0x7f80);
  return f;
}
const Format& e4m3() {
  static const Format f(DType::f8e4m3, 8, 3, 7, 0x7e, 0);
  return f;
}
const Format& e5m2() {
  static const Format f(DType::f8e5m2, 8, 2, 15, 0x7b, 0);
  return f;
}

template <typename Coded>
void check_format(const Format& format) {
  for (uint32_t code = 0; code < 2 * format.sign_bit(); ++code) {
    const float decoded = Coded::decode(static_cast<typename Coded::Stored>(code));
    const uint32_t magnitude = code & (format.sign_bit() - 1);
    CAPTURE(code);
    if (format.is_finite(code))
      REQUIRE(static_cast<long double>(decoded) == format.value(code));
    else if (magnitude == (format.dtype == DType::f8e5m2 ? 0x7cu : format.infinity))
      REQUIRE(std::isinf(decoded));
    else
      REQUIRE(std::isnan(decoded));
    if (format.is_finite(code)) REQUIRE(std::signbit(decoded) == ((code & format.sign_bit()) != 0));
  }
  // Each value, each middle between two, and their neighbours in fp32.
  for (uint32_t code = 0; code + 1 <= format.largest; ++code) {
    const auto low = static_cast<float>(format.values[code]), high = static_cast<float>(format.values[code + 1]);
    const auto middle = static_cast<float>((format.values[code] + format.values[code + 1]) / 2);
    for (const float base : {low, middle, high}) {
      for (const float value : {base, std::nextafter(base, 0.f), std::nextafter(base, INFINITY)}) {
        REQUIRE(Coded::encode(value) == format.round(value));
        REQUIRE(Coded::encode(-value) == format.round(-value));
      }
    }
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float value = bits_as<float>(static_cast<uint32_t>(random()));
    REQUIRE(Coded::encode(value) == format.round(value));
  }
}

// ---- Collectives of one element.
template <typename Stored>
Stored reduced(CollectiveSpec spec, const std::vector<Stored>& inputs) {
  std::vector<const void*> addresses;
  for (const Stored& input : inputs) addresses.push_back(&input);
  spec.count = 1;
  Stored result{};
  collect_on_host(spec, addresses.data(), static_cast<uint32_t>(inputs.size()), 0, &result);
  return result;
}
uint32_t code(float value) { return bits_as<uint32_t>(value); }

std::vector<uint32_t> random_codes(const Format& format, size_t count, std::mt19937_64& random, bool moderate) {
  std::vector<uint32_t> codes;
  while (codes.size() < count) {
    const auto one = static_cast<uint32_t>(random()) & (2 * format.sign_bit() - 1);
    if (format.is_finite(one) && (!moderate || std::fabs(format.value(one)) < 200)) codes.push_back(one);
  }
  return codes;
}

template <typename Stored>
void check_narrow_sums(const Format& format) {
  std::mt19937_64 random(2);
  int order_shows = 0, width_shows = 0;
  for (int i = 0; i < 3000; ++i) {
    const auto codes = random_codes(format, 1 + i % 9, random, i % 2 == 0);
    long double native = format.value(codes[0]);
    float wide = static_cast<float>(native);
    bool finite = true;
    for (size_t rank = 1; rank < codes.size() && finite; ++rank) {
      const uint32_t sum = format.round(native + format.value(codes[rank]));
      finite = format.is_finite(sum);
      if (finite) native = format.value(sum);
      wide = static_cast<float>(static_cast<long double>(wide) + format.value(codes[rank]));
    }
    if (!finite) continue;
    std::vector<Stored> inputs(codes.begin(), codes.end());
    const Stored result = reduced<Stored>({.dtype = format.dtype}, inputs);
    REQUIRE(format.value(result) == native);
    const Stored wide_result = reduced<Stored>({.dtype = format.dtype, .wide = true}, inputs);
    REQUIRE(wide_result == format.round(wide));
    width_shows += wide_result != result;
    std::reverse(inputs.begin(), inputs.end());
    order_shows += reduced<Stored>({.dtype = format.dtype}, inputs) != result;
  }
  CHECK(order_shows > 20);  // so the checks above could have failed
  CHECK(width_shows > 20);
}

long double tree_sum(const std::vector<float>& values, size_t begin, size_t end) {
  if (end - begin == 1) return values[begin];
  size_t half = 1;
  while (2 * half < end - begin) half *= 2;
  return static_cast<float>(tree_sum(values, begin, begin + half) + tree_sum(values, begin + half, end));
}

std::vector<float> sensitive_floats(size_t count, std::mt19937_64& random) {
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) {
    const float size = std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
    values.push_back((static_cast<float>(random() % 2000000) / 1e6f - 1) * size);
  }
  return values;
}

std::vector<uint32_t> codes_of(const std::vector<float>& values) {
  std::vector<uint32_t> codes;
  for (const float value : values) codes.push_back(code(value));
  return codes;
}

}  // namespace

TEST_CASE("16- and 8-bit floats are read and rounded as their definitions say") {
  check_format<Half>(half());
  check_format<Brain16>(brain());
  check_format<E4m3>(e4m3());
  check_format<E5m2>(e5m2());
}

TEST_CASE("sums of 16- and 8-bit floats are rounded at each addition, or once when they are wide") {
  check_narrow_sums<uint16_t>(half());
  check_narrow_sums<uint16_t>(brain());
  check_narrow_sums<uint8_t>(e4m3());
  check_narrow_sums<uint8_t>(e5m2());
}

TEST_CASE("sums of fp32 are in rank order, and another order gives something else") {
  std::mt19937_64 random(3);
  int order_shows = 0;
  for (int i = 0; i < 2000; ++i) {
    auto values = sensitive_floats(2 + i % 15, random);
    long double sum = values[0];
    for (size_t rank = 1; rank < values.size(); ++rank) sum = static_cast<float>(sum + values[rank]);
    const uint32_t result = reduced<uint32_t>({}, codes_of(values));
    REQUIRE(result == code(static_cast<float>(sum)));
    std::reverse(values.begin(), values.end());
    order_shows += reduced<uint32_t>({}, codes_of(values)) != result;
  }
  CHECK(order_shows > 500);
  CHECK(reduced<uint32_t>({}, codes_of({16777216.f, 1.f, 1.f})) == code(16777216.f));
  CHECK(reduced<uint32_t>({}, codes_of({1.f, 1.f, 16777216.f})) == code(16777218.f));
}

TEST_CASE("sums of fp64 are in rank order") {
  const auto sum = [](std::vector<double> values) {
    std::vector<uint64_t> codes;
    for (const double value : values) codes.push_back(bits_as<uint64_t>(value));
    return bits_as<double>(reduced<uint64_t>({.dtype = DType::f64}, codes));
  };
  CHECK(sum({9007199254740992., 1., 1.}) == 9007199254740992.);
  CHECK(sum({1., 1., 9007199254740992.}) == 9007199254740994.);
  CHECK(sum({1e300, 1e300, -1e300}) == 1e300);
  CHECK(std::isinf(sum({1.7e308, 1.7e308, -1.7e308})));
  CHECK(sum({0.1, 0.2, 0.3}) == 0.6000000000000001);
  CHECK(sum({0.3, 0.2, 0.1}) == 0.6);
}

TEST_CASE("as a tree, pairs are added first; fewer ranks that hold sums of subtrees give the same bits") {
  std::mt19937_64 random(4);
  int tree_shows = 0, sequence_differs = 0;
  for (int i = 0; i < 600; ++i) {
    const auto values = sensitive_floats(2 + i % 40, random);
    const uint32_t result = reduced<uint32_t>({.tree = true}, codes_of(values));
    REQUIRE(result == code(static_cast<float>(tree_sum(values, 0, values.size()))));
    tree_shows += result != reduced<uint32_t>({}, codes_of(values));
    const auto eight = sensitive_floats(8, random);
    std::vector<float> four, two;
    for (size_t k = 0; k < 8; k += 2) four.push_back(eight[k] + eight[k + 1]);
    for (size_t k = 0; k < 4; k += 2) two.push_back(four[k] + four[k + 1]);
    const uint32_t of_eight = reduced<uint32_t>({.tree = true}, codes_of(eight));
    REQUIRE(of_eight == reduced<uint32_t>({.tree = true}, codes_of(four)));
    REQUIRE(of_eight == reduced<uint32_t>({.tree = true}, codes_of(two)));
    sequence_differs += reduced<uint32_t>({}, codes_of(eight)) != reduced<uint32_t>({}, codes_of(four));
  }
  CHECK(tree_shows > 100);
  CHECK(sequence_differs > 100);
}

TEST_CASE("an average of floats scales each input by 1/n first, so it overflows only where it must") {
  const std::vector<uint16_t> large(4, 0x7bff);  // 65504
  const uint16_t average = reduced<uint16_t>({.op = Op::average, .dtype = DType::f16}, large);
  CHECK(average == 0x7bff);
  CHECK(reduced<uint16_t>({.dtype = DType::f16}, large) == 0x7c00);
  std::mt19937_64 random(5);
  for (int i = 0; i < 500; ++i) {
    const auto values = sensitive_floats(2 + i % 9, random);
    const float factor = 1.0f / static_cast<float>(values.size());
    long double sum = static_cast<float>(static_cast<long double>(values[0]) * factor);
    for (size_t rank = 1; rank < values.size(); ++rank) {
      sum = static_cast<float>(sum + static_cast<float>(static_cast<long double>(values[rank]) * factor));
    }
    REQUIRE(reduced<uint32_t>({.op = Op::average}, codes_of(values)) == code(static_cast<float>(sum)));
    REQUIRE(reduced<uint32_t>({.op = Op::scaled_sum, .factor = code(factor)}, codes_of(values)) ==
            code(static_cast<float>(sum)));
  }
  const uint16_t two = 0x4000;  // 2 in fp16, on the device
  const CollectiveSpec scaled{.op = Op::scaled_sum, .dtype = DType::f16, .factor_at = &two};
  CHECK(reduced<uint16_t>(scaled, {0x3c00, 0x3c00}) == 0x4400);
}

TEST_CASE("minimum and maximum prefer numbers to NaNs and tell the zeros apart, in any order") {
  const uint32_t nan = 0xffc12345, plus = 0, minus = 0x80000000;
  const CollectiveSpec lowest{.op = Op::minimum}, highest{.op = Op::maximum};
  for (const auto& [a, b] : {std::pair{plus, minus}, std::pair{minus, plus}}) {
    CHECK(reduced<uint32_t>(lowest, {a, b}) == minus);
    CHECK(reduced<uint32_t>(highest, {a, b}) == plus);
  }
  for (const CollectiveSpec& spec : {lowest, highest}) {
    CHECK(reduced<uint32_t>(spec, {nan, code(-3.f)}) == code(-3.f));
    CHECK(reduced<uint32_t>(spec, {code(-3.f), nan}) == code(-3.f));
    CHECK(reduced<uint32_t>(spec, {nan, nan}) == 0x7fffffff);
  }
  CHECK(reduced<uint32_t>(lowest, codes_of({-1.f, -2.f, 5.f})) == code(-2.f));
  CHECK(reduced<uint32_t>(highest, codes_of({-1.f, -2.f, -5.f})) == code(-1.f));
  CHECK(reduced<int8_t>({.op = Op::minimum, .dtype = DType::i8}, {3, -128, 127}) == -128);
  CHECK(reduced<uint64_t>({.op = Op::maximum, .dtype = DType::u64}, {3, ~0ull, 1}) == ~0ull);
}

TEST_CASE("every NaN that comes out is the same one") {
  CHECK(reduced<uint32_t>({}, {0xff800001, code(1.f)}) == 0x7fffffff);
  CHECK(reduced<uint32_t>({}, {code(INFINITY), code(-INFINITY)}) == 0x7fffffff);
  CHECK(reduced<uint32_t>({}, {0xffffffff}) == 0x7fffffff);  // of one rank too
  CHECK(reduced<uint64_t>({.dtype = DType::f64}, {0xfff0000000000001, 0}) == 0x7fffffffffffffff);
  CHECK(reduced<uint16_t>({.dtype = DType::bf16}, {0xffc1, 0x3f80}) == 0x7fff);
  CHECK(reduced<uint16_t>({.dtype = DType::f16}, {0x7c00, 0xfc00}) == 0x7fff);
  CHECK(reduced<uint8_t>({.dtype = DType::f8e4m3}, {0xff, 0x08}) == 0x7f);
  CHECK(reduced<uint8_t>({.dtype = DType::f8e5m2}, {0xfe, 0x08}) == 0x7f);
}

TEST_CASE("integers wrap; their average is divided towards zero; a product is one") {
  CHECK(reduced<int8_t>({.dtype = DType::i8}, {127, 1}) == -128);
  CHECK(reduced<uint8_t>({.dtype = DType::u8}, {200, 100}) == 44);
  CHECK(reduced<int64_t>({.dtype = DType::i64}, {INT64_MAX, 1}) == INT64_MIN);
  CHECK(reduced<int32_t>({.op = Op::average, .dtype = DType::i32}, {-7, 0}) == -3);
  CHECK(reduced<uint32_t>({.op = Op::average, .dtype = DType::u32}, {7, 0, 1}) == 2);
  CHECK(reduced<int32_t>({.op = Op::product, .dtype = DType::i32}, {65536, 65536}) == 0);
  CHECK(reduced<uint32_t>({.op = Op::product}, codes_of({1.5f, 2.f, -3.f})) == code(-9.f));
  CHECK(reduced<int32_t>({.op = Op::scaled_sum, .dtype = DType::i32, .factor = 3}, {5, 7}) == 36);
}

TEST_CASE("every type of NCCL has a kernel of its own, and others have none") {
  std::vector<std::string> names(kCollectiveKernelNames, kCollectiveKernelNames + kCollectiveKernelCount);
  std::sort(names.begin(), names.end());
  CHECK(std::unique(names.begin(), names.end()) == names.end());
  for (const DType dtype : {DType::c64, DType::boolean, DType::i16, DType::raw}) CHECK_FALSE(has_collective(dtype));
  void* staging[2] = {};
  const CollectivePlace place{{.ranks = 2}, 0, staging, nullptr, nullptr, nullptr};
  const auto kernel = [&](DType dtype, bool wide, bool tree) {
    CollectiveLaunch launch;
    REQUIRE(plan_collective({.dtype = dtype, .wide = wide, .tree = tree, .count = 1}, place, &launch));
    return std::string(kCollectiveKernelNames[launch.kernel]).substr(strlen("forkpoint_collective_"));
  };
  CHECK(kernel(DType::bf16, false, false) == "bf16");
  CHECK(kernel(DType::bf16, true, false) == "bf16_wide");
  CHECK(kernel(DType::f8e5m2, true, false) == "f8e5m2_wide");
  CHECK(kernel(DType::f8e4m3, false, false) == "f8e4m3");
  CHECK(kernel(DType::f16, true, true) == "f16_wide_tree");
  CHECK_FALSE(has_collective(DType::f8e4m3, true));
  CHECK(kernel(DType::f64, true, true) == "f64_tree");
  CHECK(kernel(DType::u64, true, true) == "u64");
  CHECK(kernel(DType::i8, false, false) == "i8");
}

}  // namespace forkpoint::collective
