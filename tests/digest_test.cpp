// The digest's definition: the fast paths against a byte-by-byte reference, and the properties that the tool stands on.
#include "lib/digest.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "lib/digest_kernels.h"
#include "lib/digest_mix.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes random_bytes(size_t size, uint64_t seed) {
  Bytes bytes(size);
  std::mt19937_64 random(seed);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

struct Reference {
  Digest digest;
  uint64_t word_sum = 0;
};

void add_byte(Reference& reference, uint64_t position, unsigned char byte) {
  const uint64_t word = uint64_t{byte} << (8 * (position & 3));
  reference.digest += {key<1>(position >> 2) * word, key<2>(position >> 2) * word};
  reference.word_sum += word;
}

Reference reference_of(const unsigned char* data, size_t size, uint64_t first_byte) {
  Reference reference;
  for (size_t i = 0; i < size; ++i) add_byte(reference, first_byte + i, data[i]);
  return reference;
}

void check_bytes(const Bytes& data, size_t start, size_t size, uint64_t first_byte) {
  CAPTURE(start);
  CAPTURE(size);
  CAPTURE(first_byte);
  const Reference expected = reference_of(data.data() + start, size, first_byte);
  const DigestResult found = digest_bytes(data.data() + start, size, DType::raw, first_byte);
  REQUIRE(found.digest == expected.digest);
  REQUIRE(found.stats.word_sum == fold_word_sum(expected.word_sum));
  REQUIRE(digest_only(data.data() + start, size, first_byte) == expected.digest);
}

double value_of_f16(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits);
  const double mantissa = bits & ((1u << mantissa_bits) - 1);
  const double scale = std::ldexp(1.0, std::max(exponent, 1) - bias - mantissa_bits);
  return (exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits)) * scale;
}

template <typename T>
T read_as(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

constexpr double kNonfinite = -1;

// |element| or kNonfinite, by other means than the code under test.
double magnitude_at(DType dtype, const unsigned char* at) {
  const auto finite = [](double value) { return std::isfinite(value) ? std::fabs(value) : kNonfinite; };
  switch (dtype) {
    case DType::u8:
      return *at;
    case DType::boolean:
      return *at != 0;
    case DType::i8:
      return std::abs(static_cast<int>(read_as<int8_t>(at)));
    case DType::u16:
      return read_as<uint16_t>(at);
    case DType::i16:
      return std::abs(static_cast<int>(read_as<int16_t>(at)));
    case DType::u32:
      return read_as<uint32_t>(at);
    case DType::i32:
      return std::fabs(static_cast<double>(read_as<int32_t>(at)));
    case DType::u64:
      return static_cast<double>(static_cast<float>(read_as<uint64_t>(at)));
    case DType::i64:
      return static_cast<double>(std::fabs(static_cast<float>(read_as<int64_t>(at))));
    case DType::f32:
    case DType::c64:
      return finite(read_as<float>(at));
    case DType::f64:
    case DType::c128:
      return finite(read_as<double>(at));
    case DType::bf16: {
      const uint32_t bits = uint32_t{read_as<uint16_t>(at)} << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return finite(value);
    }
    case DType::f16: {
      const uint32_t bits = read_as<uint16_t>(at) & 0x7FFF;
      return bits >= 0x7C00 ? kNonfinite : value_of_f16(bits, 5, 10);
    }
    case DType::f8e4m3:
      return (*at & 0x7F) == 0x7F ? kNonfinite : value_of_f16(*at & 0x7F, 4, 3);
    case DType::f8e5m2:
      return (*at & 0x7F) >= 0x7C ? kNonfinite : value_of_f16(*at & 0x7F, 5, 2);
    case DType::f4x2:
    case DType::raw:
      return 0;
  }
  return 0;
}

int part_bytes(DType dtype) { return dtype == DType::c64 ? 4 : dtype == DType::c128 ? 8 : size_bytes(dtype); }

float to_float(double value) { return value > static_cast<double>(FLT_MAX) ? FLT_MAX : static_cast<float>(value); }

void check_stats(const Bytes& data, size_t size, DType dtype) {
  double largest = 0;
  uint64_t nonfinite = 0;
  for (size_t i = 0; i < size; i += static_cast<size_t>(part_bytes(dtype))) {
    const double magnitude = magnitude_at(dtype, &data[i]);
    if (magnitude == kNonfinite) ++nonfinite;
    largest = std::max(largest, magnitude);
  }
  const TensorStats stats = digest_bytes(data.data(), size, dtype).stats;
  CAPTURE(name(dtype));
  CAPTURE(size);
  CHECK(stats.absmax == to_float(largest));
  CHECK(stats.nonfinite == nonfinite);
}

// The bytes of a view in logical order, by element index, and the digest formed of them one by one.
Reference reference_of(const unsigned char* base, const TensorView& view) {
  Reference reference;
  const int64_t size = size_bytes(view.dtype);
  int64_t elements = 1;
  for (int d = 0; d < view.dims; ++d) elements *= view.shape[d];
  for (int64_t i = 0; i < elements; ++i) {
    int64_t rest = i, offset = 0, position = view.first_position;
    for (int d = view.dims - 1; d >= 0; --d) {
      offset += rest % view.shape[d] * view.strides[d];
      position += rest % view.shape[d] * view.positions[d];
      rest /= view.shape[d];
    }
    for (int64_t b = 0; b < size; ++b) {
      add_byte(reference, static_cast<uint64_t>(position * size + b), base[offset * size + b]);
    }
  }
  return reference;
}

constexpr DType dtype_at(int i) { return static_cast<DType>(i); }

}  // namespace

TEST_CASE("every size up to several tiles, at every start and place in a word, equals the byte-by-byte reference") {
  const Bytes data = random_bytes(4 * kTileBytes + 64, 1);
  for (size_t size = 0; size <= 3 * kTileBytes + 40; size += size < 200 ? 1 : 37) {
    const size_t start = size % 19;
    for (const uint64_t first_byte : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{2043}}) {
      check_bytes(data, start, size, first_byte);
    }
  }
  for (size_t start = 0; start < 33; ++start) {
    for (uint64_t first_byte = 0; first_byte < 9; ++first_byte)
      check_bytes(data, start, 2 * kTileBytes + 5, first_byte);
  }
}

TEST_CASE("places far into a tensor of many terabytes keep their full position") {
  const Bytes data = random_bytes(2 * kTileBytes, 2);
  for (const uint64_t first_byte : {(uint64_t{1} << 32) - 3, (uint64_t{1} << 44) + 6, ~uint64_t{0} - 4 * kTileBytes}) {
    check_bytes(data, 1, kTileBytes + 77, first_byte);
  }
  CHECK(digest_only(data.data(), 64, 0) != digest_only(data.data(), 64, uint64_t{1} << 32));
  CHECK(digest_only(data.data(), 64, 0) != digest_only(data.data(), 64, uint64_t{1} << 34));
}

TEST_CASE("every instruction set that this machine has gives the same sums and statistics") {
  const Bytes data = random_bytes(2 * kTileBytes, 3);
  for (const digest_kernels::Kernels* kernels : digest_kernels::available()) {
    CAPTURE(kernels->name);
    for (uint32_t first = 0; first < kTileWords; first += 13) {
      for (uint32_t count = 0; first + count <= kTileWords; count += count < 40 ? 1 : 61) {
        const auto found = kernels->sum_words(&data[first % 7], first, count, count % 2);
        const auto expected = digest_kernels::kPortable.sum_words(&data[first % 7], first, count, false);
        REQUIRE(found.a == expected.a);
        REQUIRE(found.b == expected.b);
        REQUIRE(found.plain == expected.plain);
      }
    }
    for (int d = 0; d < kDTypeCount; ++d) {
      const MagnitudeRule rule = magnitude_rule(dtype_at(d));
      if (rule.kind == MagnitudeKind::none) continue;
      for (size_t count = 0; count * rule.bytes < kTileBytes; count += count < 70 ? 1 : 97) {
        const auto found = kernels->scan_magnitudes(&data[count % 5], count, rule);
        const auto expected = digest_kernels::kPortable.scan_magnitudes(&data[count % 5], count, rule);
        REQUIRE(found.largest_finite == expected.largest_finite);
        REQUIRE(found.nonfinite == expected.nonfinite);
      }
    }
  }
}

TEST_CASE("statistics of every dtype: absmax over the finite elements, and the number of the others") {
  for (int d = 0; d < kDTypeCount; ++d) {
    const DType dtype = dtype_at(d);
    const auto size = static_cast<size_t>(size_bytes(dtype));
    for (const size_t count : {0, 1, 2, 7, 33, 1000, 5000})
      check_stats(random_bytes(count * size, 4 + count), count * size, dtype);
    // None that is not finite: an exponent bit of each is cleared.
    Bytes finite = random_bytes(5000 * size, 5);
    for (unsigned char& byte : finite) byte &= 0xBF;
    check_stats(finite, finite.size(), dtype);
  }
}

TEST_CASE("absmax at the edges: infinities, NaN, subnormal numbers, the smallest integers, doubles beyond float") {
  const auto stats = [](DType dtype, auto value) { return digest_bytes(&value, sizeof(value), dtype).stats; };
  CHECK(stats(DType::f32, std::numeric_limits<float>::infinity()).nonfinite == 1);
  CHECK(stats(DType::f32, -std::numeric_limits<float>::quiet_NaN()).nonfinite == 1);
  CHECK(stats(DType::f32, std::numeric_limits<float>::infinity()).absmax == 0);
  CHECK(stats(DType::f32, -FLT_MAX).absmax == FLT_MAX);
  CHECK(stats(DType::f32, -std::numeric_limits<float>::denorm_min()).absmax ==
        std::numeric_limits<float>::denorm_min());
  CHECK(stats(DType::f64, 1e300).absmax == FLT_MAX);
  CHECK(stats(DType::f64, 1e300).nonfinite == 0);
  CHECK(stats(DType::f64, 3.4028235677973366e38).absmax == FLT_MAX);  // rounds to 2^128
  CHECK(stats(DType::f64, 1e-310).absmax == 0);
  for (const double small :
       {1e-38, 1.5e-45, 0.7e-45, 0.70064923216240855e-45, 2.1e-45, 1.1754943508222875e-38, 3e-46}) {
    CHECK(stats(DType::f64, small).absmax == static_cast<float>(small));
  }
  CHECK(stats(DType::i8, int8_t{-128}).absmax == 128);
  CHECK(stats(DType::i16, int16_t{-32768}).absmax == 32768);
  CHECK(stats(DType::i32, std::numeric_limits<int32_t>::min()).absmax == 2147483648.0f);
  CHECK(stats(DType::i64, std::numeric_limits<int64_t>::min()).absmax == 9223372036854775808.0f);
  CHECK(stats(DType::u64, ~uint64_t{0}).absmax == 18446744073709551616.0f);
  CHECK(stats(DType::boolean, uint8_t{7}).absmax == 1);
  CHECK(stats(DType::f8e4m3, uint8_t{0xFE}).absmax == 448);
  CHECK(stats(DType::f8e4m3, uint8_t{0xFF}).nonfinite == 1);
  CHECK(stats(DType::f8e5m2, uint8_t{0x7C}).nonfinite == 1);
  CHECK(stats(DType::f8e5m2, uint8_t{0xFB}).absmax == 57344);
  CHECK(stats(DType::f16, uint16_t{1}).absmax == std::ldexp(1.0f, -24));
  CHECK(stats(DType::f4x2, uint8_t{0xFF}).absmax == 0);
  CHECK(stats(DType::raw, uint8_t{0xFF}).absmax == 0);
}

TEST_CASE("strided, transposed, broadcast and reversed views are hashed in logical order") {
  const Bytes data = random_bytes(1 << 16, 14);
  std::mt19937_64 random(15);
  const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % (high - low + 1)); };
  for (int n = 0; n < 1500; ++n) {
    const auto dims = static_cast<size_t>(pick(0, 4));
    std::vector<int64_t> shape(dims), strides(dims);
    std::vector<size_t> order(dims);
    for (size_t d = 0; d < dims; ++d) shape[d] = pick(0, 40) == 0 ? 0 : pick(1, 6), order[d] = d;
    std::shuffle(order.begin(), order.end(), random);
    int64_t step = 1, low = 0;
    for (const size_t d : order) {
      strides[d] = step;
      step *= std::max<int64_t>(shape[d], 1) + pick(0, 1);
      const int64_t kind = pick(0, 9);
      if (kind == 0) strides[d] = 0;
      if (kind == 1) strides[d] = -strides[d], low += strides[d] * (shape[d] - 1);
    }
    const TensorView view = whole_view(dtype_at(static_cast<int>(pick(0, kDTypeCount - 1))), shape, strides);
    REQUIRE(step * size_bytes(view.dtype) <= static_cast<int64_t>(data.size()));
    const unsigned char* base = data.data() - (shape.empty() ? 0 : std::min<int64_t>(low, 0)) * size_bytes(view.dtype);
    const Reference expected = reference_of(base, view);
    const DigestResult found = digest_view(base, view);
    REQUIRE(found.digest == expected.digest);
    REQUIRE(found.stats.word_sum == fold_word_sum(expected.word_sum));
  }
}

TEST_CASE("a contiguous copy of a view has the view's digest and statistics") {
  const Bytes data = random_bytes(1 << 16, 16);
  const int64_t shape[] = {40, 30}, strides[] = {1, 50};
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto size = static_cast<size_t>(size_bytes(dtype_at(d)));
    Bytes copy;
    for (size_t i = 0; i < 40; ++i) {
      for (size_t j = 0; j < 30; ++j)
        copy.insert(copy.end(), &data[(i + 50 * j) * size], &data[(i + 50 * j) * size] + size);
    }
    const DigestResult expected = digest_bytes(copy.data(), copy.size(), dtype_at(d));
    const DigestResult found = digest_view(data.data(), whole_view(dtype_at(d), shape, strides));
    CHECK(found.digest == expected.digest);
    CHECK(found.stats.absmax == expected.stats.absmax);
    CHECK(found.stats.nonfinite == expected.stats.nonfinite);
    CHECK(found.stats.word_sum == expected.stats.word_sum);
  }
}

TEST_CASE("a view that does not hold together is refused") {
  const int64_t shape[] = {4, 4}, one[] = {1}, negative[] = {4, -1}, offset[] = {1, 0}, global[] = {4, 4};
  CHECK_THROWS_AS(whole_view(DType::f32, shape, one), Error);
  CHECK_THROWS_AS(whole_view(DType::f32, negative), Error);
  CHECK_THROWS_AS(whole_view(DType::f32, std::vector<int64_t>(17, 1)), Error);
  CHECK_THROWS_AS(shard_view(DType::f32, shape, {}, global, offset), Error);
  CHECK_THROWS_AS(shard_view(DType::f32, shape, {}, one, one), Error);
  CHECK_NOTHROW(whole_view(DType::f32, std::vector<int64_t>(16, 1)));
}

TEST_CASE("the folded word sum is the plain sum modulo 2^32 - 1") {
  CHECK(fold_word_sum(0) == 0);
  CHECK(fold_word_sum(0xFFFFFFFFull) == 0);
  CHECK(fold_word_sum(0x1FFFFFFFEull) == 0);
  CHECK(fold_word_sum(0x100000000ull) == 1);
  CHECK(fold_word_sum(~uint64_t{0}) == 0);
  std::mt19937_64 random(20);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t sum = random();
    CHECK(fold_word_sum(sum) == sum % 0xFFFFFFFFull);
  }
}

TEST_CASE("dtype names lead back to the dtype") {
  for (int i = 0; i < kDTypeCount; ++i) {
    REQUIRE(dtype_from_name(name(dtype_at(i))).has_value());
    CHECK(*dtype_from_name(name(dtype_at(i))) == dtype_at(i));
  }
  CHECK(name(DType::boolean) == "bool");
  CHECK(name(DType::bf16) == "bf16");
  CHECK_FALSE(dtype_from_name("float").has_value());
  CHECK(name(static_cast<DType>(200)) == "unknown");
}

}  // namespace forkpoint
