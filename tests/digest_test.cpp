// The digest's definition: the fast paths against a byte-by-byte reference, and the properties that the tool stands on.
#include "lib/digest.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
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
    case DType::u8: return *at;
    case DType::boolean: return *at != 0;
    case DType::i8: return std::abs(static_cast<int>(read_as<int8_t>(at)));
    case DType::u16: return read_as<uint16_t>(at);
    case DType::i16: return std::abs(static_cast<int>(read_as<int16_t>(at)));
    case DType::u32: return read_as<uint32_t>(at);
    case DType::i32: return std::fabs(static_cast<double>(read_as<int32_t>(at)));
    case DType::u64: return static_cast<double>(static_cast<float>(read_as<uint64_t>(at)));
    case DType::i64: return static_cast<double>(std::fabs(static_cast<float>(read_as<int64_t>(at))));
    case DType::f32: case DType::c64: return finite(read_as<float>(at));
    case DType::f64: case DType::c128: return finite(read_as<double>(at));
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
    case DType::f8e4m3: return (*at & 0x7F) == 0x7F ? kNonfinite : value_of_f16(*at & 0x7F, 4, 3);
    case DType::f8e5m2: return (*at & 0x7F) >= 0x7C ? kNonfinite : value_of_f16(*at & 0x7F, 5, 2);
    case DType::f4x2: case DType::raw: return 0;
  }
  return 0;
}

int part_bytes(DType dtype) {
  return dtype == DType::c64 ? 4 : dtype == DType::c128 ? 8 : size_bytes(dtype);
}

float to_float(double value) {
  return value > static_cast<double>(FLT_MAX) ? FLT_MAX : static_cast<float>(value);
}

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
    for (uint64_t first_byte = 0; first_byte < 9; ++first_byte) check_bytes(data, start, 2 * kTileBytes + 5, first_byte);
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
        const auto found = kernels->sum_words(&data[first % 7], first, count);
        const auto expected = digest_kernels::kPortable.sum_words(&data[first % 7], first, count);
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
    for (const size_t count : {0, 1, 2, 7, 33, 1000, 5000}) check_stats(random_bytes(count * size, 4 + count), count * size, dtype);
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
  CHECK(stats(DType::f32, -std::numeric_limits<float>::denorm_min()).absmax == std::numeric_limits<float>::denorm_min());
  CHECK(stats(DType::f64, 1e300).absmax == FLT_MAX);
  CHECK(stats(DType::f64, 1e300).nonfinite == 0);
  CHECK(stats(DType::f64, 3.4028235677973366e38).absmax == FLT_MAX);  // rounds to 2^128
  CHECK(stats(DType::f64, 1e-310).absmax == 0);
  for (const double small : {1e-38, 1.5e-45, 0.7e-45, 0.70064923216240855e-45, 2.1e-45, 1.1754943508222875e-38, 3e-46}) {
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

TEST_CASE("a swap, shift, repetition, permutation or transposition shows, and only it changes no word sum") {
  Bytes data = random_bytes(3 * kTileBytes, 6);
  const DigestResult original = digest_bytes(data.data(), data.size());
  std::mt19937_64 random(7);
  std::set<uint64_t> seen = {original.digest.a};
  for (int i = 0; i < 2000; ++i) {
    Bytes changed = data;
    const size_t left = random() % (data.size() / 4), right = random() % (data.size() / 4);
    if (left == right) continue;
    std::swap_ranges(&changed[4 * left], &changed[4 * left] + 4, &changed[4 * right]);
    const DigestResult found = digest_bytes(changed.data(), changed.size());
    CHECK(found.digest.a != original.digest.a);
    CHECK(found.digest.b != original.digest.b);
    CHECK(found.stats.word_sum == original.stats.word_sum);
  }
  Bytes shifted = data;
  std::rotate(shifted.begin(), shifted.begin() + 4, shifted.end());
  CHECK(digest_only(shifted.data(), shifted.size()) != original.digest);
  std::rotate(shifted.begin(), shifted.begin() + kTileBytes - 4, shifted.end());
  CHECK(digest_only(shifted.data(), shifted.size()) != original.digest);
  // Tiles exchanged: the same words at the same places within a tile.
  Bytes tiles = data;
  std::swap_ranges(tiles.begin(), tiles.begin() + kTileBytes, tiles.begin() + 2 * kTileBytes);
  CHECK(digest_only(tiles.data(), tiles.size()) != original.digest);
  Bytes repeated = data;
  std::copy_n(repeated.begin(), kTileBytes, repeated.begin() + kTileBytes);
  CHECK(digest_only(repeated.data(), repeated.size()) != original.digest);
  const int64_t shape[] = {32, 48}, transposed[] = {48, 32}, strides[] = {1, 48};
  CHECK(digest_view(data.data(), whole_view(DType::f32, shape)).digest !=
        digest_view(data.data(), whole_view(DType::f32, transposed, strides)).digest);
}

TEST_CASE("an exchange of two rectangles' corners shows: tables combined by a sum would miss it") {
  // w(a,i) and w(b,j) grow by 1, w(a,j) and w(b,i) shrink by 1.
  std::vector<uint32_t> words(8 * kTileWords, 10);
  const Digest original = digest_only(words.data(), 4 * words.size());
  std::mt19937_64 random(8);
  for (int n = 0; n < 2000; ++n) {
    const size_t a = random() % 8, b = random() % 8, i = random() % kTileWords, j = random() % kTileWords;
    if (a == b || i == j) continue;
    std::vector<uint32_t> changed = words;
    ++changed[a * kTileWords + i], ++changed[b * kTileWords + j];
    --changed[a * kTileWords + j], --changed[b * kTileWords + i];
    const Digest found = digest_only(changed.data(), 4 * changed.size());
    CHECK(found.a != original.a);
    CHECK(found.b != original.b);
  }
}

TEST_CASE("sign flips of pairs of doubles and of floats do not cancel") {
  std::vector<double> doubles(1500, 1.25);
  const Digest original = digest_only(doubles.data(), 8 * doubles.size());
  const std::vector<float> floats(1500, 0.5f);
  const Digest original_floats = digest_only(floats.data(), 4 * floats.size());
  std::mt19937_64 random(9);
  std::set<std::pair<uint64_t, uint64_t>> seen;
  for (int n = 0; n < 4000; ++n) {
    const size_t i = random() % doubles.size(), j = random() % doubles.size();
    if (i == j) continue;
    std::vector<double> changed = doubles;
    changed[i] = -changed[i], changed[j] = -changed[j];
    CHECK(digest_only(changed.data(), 8 * changed.size()) != original);
    std::vector<float> changed_floats = floats;
    changed_floats[i] = -changed_floats[i], changed_floats[j] = -changed_floats[j];
    CHECK(digest_only(changed_floats.data(), 4 * changed_floats.size()) != original_floats);
  }
}

TEST_CASE("zeros hash to zero whatever their number: length and shape are compared beside the digest") {
  const Bytes zeros(5000);
  CHECK(digest_only(zeros.data(), 5000) == Digest{});
  CHECK(digest_only(zeros.data(), 17) == digest_only(zeros.data(), 4000));
  CHECK(digest_bytes(nullptr, 0, DType::f32).digest == Digest{});
  CHECK(digest_bytes(nullptr, 0, DType::f32).stats.absmax == 0);
}

TEST_CASE("the digest and the word sum add up over any split of the bytes") {
  const Bytes data = random_bytes(5 * kTileBytes + 3, 10);
  const DigestResult whole = digest_bytes(data.data(), data.size());
  std::mt19937_64 random(11);
  for (int n = 0; n < 300; ++n) {
    std::vector<size_t> cuts = {0, data.size()};
    for (size_t k = random() % 9; k > 0; --k) cuts.push_back(random() % data.size());
    std::sort(cuts.begin(), cuts.end());
    std::vector<size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    Digest sum;
    uint64_t word_sum = 0;
    for (const size_t k : order) {
      const DigestResult part = digest_bytes(&data[cuts[k]], cuts[k + 1] - cuts[k], DType::raw, cuts[k]);
      sum += part.digest;
      word_sum += part.stats.word_sum;
    }
    CHECK(sum == whole.digest);
    CHECK(fold_word_sum(word_sum) == whole.stats.word_sum);
  }
}

TEST_CASE("shards of a two- or three-dimensional tensor add up, also at odd offsets of 8- and 16-bit elements") {
  const int64_t global[] = {7, 9, 11};
  std::mt19937_64 random(12);
  for (const DType dtype : {DType::u8, DType::f8e4m3, DType::bf16, DType::f32, DType::f64, DType::c128}) {
    const auto size = static_cast<int64_t>(size_bytes(dtype));
    const Bytes data = random_bytes(static_cast<size_t>(7 * 9 * 11 * size), 13);
    const DigestResult whole = digest_bytes(data.data(), data.size(), dtype);
    const int64_t strides[] = {99, 11, 1};
    for (int n = 0; n < 60; ++n) {
      const int64_t cut[] = {static_cast<int64_t>(random() % 8), static_cast<int64_t>(random() % 10),
                             static_cast<int64_t>(random() % 12)};
      DigestResult sum;
      uint64_t word_sum = 0;
      for (int box = 0; box < 8; ++box) {
        int64_t shape[3], offset[3];
        for (int d = 0; d < 3; ++d) {
          offset[d] = (box >> d & 1) ? cut[d] : 0;
          shape[d] = (box >> d & 1) ? global[d] - cut[d] : cut[d];
        }
        const int64_t first = (offset[0] * 99 + offset[1] * 11 + offset[2]) * size;
        const DigestResult part =
            digest_view(data.data() + first, shard_view(dtype, shape, strides, global, offset));
        sum.digest += part.digest;
        sum.stats.nonfinite += part.stats.nonfinite;
        sum.stats.absmax = std::max(sum.stats.absmax, part.stats.absmax);
        word_sum += part.stats.word_sum;
      }
      REQUIRE(sum.digest == whole.digest);
      REQUIRE(sum.stats.nonfinite == whole.stats.nonfinite);
      REQUIRE(sum.stats.absmax == whole.stats.absmax);
      REQUIRE(fold_word_sum(word_sum) == whole.stats.word_sum);
    }
  }
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
      for (size_t j = 0; j < 30; ++j) copy.insert(copy.end(), &data[(i + 50 * j) * size], &data[(i + 50 * j) * size] + size);
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

TEST_CASE("a single changed word is found, with its arithmetic change, from the digests alone") {
  std::mt19937_64 random(17);
  for (int n = 0; n < 3000; ++n) {
    const size_t size = 1 + random() % 20000;
    Bytes data(size);
    const uint64_t words = (size + 3) / 4;
    const uint64_t word = n % 5 == 0 ? words - 1 : random() % words;
    const size_t bytes = std::min<size_t>(4, size - 4 * word);
    uint32_t before = 0, after = 0;
    const uint32_t mask = bytes == 4 ? ~0u : (1u << (8 * bytes)) - 1;
    before = static_cast<uint32_t>(random()) & mask;
    after = n % 3 == 0 ? before ^ (1u << random() % (8 * bytes)) : static_cast<uint32_t>(random()) & mask;
    if (before == after) continue;
    std::memcpy(&data[4 * word], &before, bytes);
    const Digest first = digest_only(data.data(), size);
    std::memcpy(&data[4 * word], &after, bytes);
    const Digest second = digest_only(data.data(), size);
    WordChange change;
    REQUIRE(find_single_word_change(first, second, words, &change));
    CHECK(change.word == word);
    CHECK(change.delta == static_cast<int64_t>(after) - static_cast<int64_t>(before));
  }
}

TEST_CASE("a single changed word is found in tensors of many gigabytes, whatever the power of two it changes by") {
  std::mt19937_64 random(18);
  for (int n = 0; n < 66; ++n) {
    const uint64_t words = uint64_t{1} << 25;
    const uint64_t word = n % 3 == 0 ? words - 1 : random() % words;
    const int64_t delta = n < 32 ? int64_t{1} << n : n < 64 ? -(int64_t{1} << (n - 32)) : n == 64 ? 4294967295 : -4294967295;
    const Digest first = {random(), random()};
    const auto change_of = [&](int64_t by) {
      return Digest{first.a + key<1>(word) * static_cast<uint64_t>(by), first.b + key<2>(word) * static_cast<uint64_t>(by)};
    };
    WordChange change;
    REQUIRE(find_single_word_change(first, change_of(delta), words, &change));
    CHECK(change.word == word);
    CHECK(change.delta == delta);
    CHECK_FALSE(find_single_word_change(first, change_of(delta), word, &change));
  }
}

TEST_CASE("no single word is named when none or two or more words changed") {
  std::mt19937_64 random(19);
  const uint64_t words = 100000;
  WordChange change;
  CHECK_FALSE(find_single_word_change({5, 6}, {5, 6}, words, &change));
  CHECK_FALSE(find_single_word_change({5, 6}, {5, 7}, words, &change));
  CHECK_FALSE(find_single_word_change({5, 6}, {8, 6}, words, &change));
  CHECK_FALSE(find_single_word_change({5, 6}, {8, 9}, 0, &change));
  for (int n = 0; n < 1500; ++n) {
    Digest second = {1, 2};
    uint64_t last = words;
    for (int k = 0; k < 2 + n % 3; ++k) {
      const uint64_t word = random() % words;
      if (word == last) continue;
      last = word;
      // Sign flips too: they leave 33 bits of a lane.
      const uint64_t delta = n % 2 ? uint64_t{1} << 31 : uint64_t{1} + static_cast<uint32_t>(random()) % 1000000;
      second += {key<1>(word) * delta, key<2>(word) * delta};
    }
    if (second == Digest{1, 2}) continue;
    if (!find_single_word_change({1, 2}, second, words, &change)) continue;
    // Only if the words drawn were in truth one.
    CHECK(second == Digest{1 + key<1>(change.word) * static_cast<uint64_t>(change.delta),
                           2 + key<2>(change.word) * static_cast<uint64_t>(change.delta)});
    CHECK(change.word == last);
  }
}

TEST_CASE("keys are odd, distinct and independent of each other in the two lanes") {
  std::set<uint32_t> first, second;
  std::set<uint64_t> ratios, products;
  for (uint32_t i = 0; i < kTileWords; ++i) {
    CHECK((word_key<1>(i) & 1) == 1);
    CHECK((word_key<2>(i) & 1) == 1);
    first.insert(word_key<1>(i));
    second.insert(word_key<2>(i));
    // K2 / K1 by cross multiplication: a constant ratio would make the second lane a multiple of the first.
    products.insert(uint64_t{word_key<1>(i)} * word_key<2>((i + 1) % kTileWords) -
                    uint64_t{word_key<2>(i)} * word_key<1>((i + 1) % kTileWords));
  }
  CHECK(first.size() == kTileWords);
  CHECK(second.size() == kTileWords);
  CHECK(products.size() == kTileWords);
  CHECK(products.count(0) == 0);
  for (const uint32_t word : first) CHECK(second.count(word) == 0);
  std::set<uint64_t> tiles;
  for (uint64_t t = 0; t < 20000; ++t) {
    CHECK((tile_key<1>(t) & 1) == 1);
    CHECK((tile_key<2>(t) & 1) == 1);
    tiles.insert(tile_key<1>(t));
    tiles.insert(tile_key<2>(t));
  }
  CHECK(tiles.size() == 40000);
  std::set<uint64_t> keys;
  for (uint64_t i = 0; i < 200000; ++i) keys.insert(key<1>(i)), keys.insert(key<2>(i));
  CHECK(keys.size() == 400000);
}

TEST_CASE("the definition does not drift: digests of known bytes") {
  Bytes data(3000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7 + 1);
  CHECK(key<1>(0) == 0x3E6C5C8D84965305);
  CHECK(key<2>(513) == 0x60300ACFF24EEEDD);
  CHECK(digest_only(data.data(), data.size(), 5) == Digest{0x4DC81D09CC19F5A4, 0xFF20C804843F2940});
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
