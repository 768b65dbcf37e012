// What the tool stands on: which changes the digest shows, how parts add up, and how it points at a single word.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "lib/digest.h"
#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes random_bytes(size_t size, uint64_t seed) {
  Bytes bytes(size);
  std::mt19937_64 random(seed);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

}  // namespace

TEST_CASE("a swap, shift, repetition, permutation or transposition shows, and only it changes no word sum") {
  Bytes data = random_bytes(3 * kTileBytes, 6);
  const DigestResult original = digest_bytes(data.data(), data.size());
  std::mt19937_64 random(7);
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
        const DigestResult part = digest_view(data.data() + first, shard_view(dtype, shape, strides, global, offset));
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
    const int64_t delta = n < 32    ? int64_t{1} << n
                          : n < 64  ? -(int64_t{1} << (n - 32))
                          : n == 64 ? 4294967295
                                    : -4294967295;
    const Digest first = {random(), random()};
    const auto change_of = [&](int64_t by) {
      return Digest{first.a + key<1>(word) * static_cast<uint64_t>(by),
                    first.b + key<2>(word) * static_cast<uint64_t>(by)};
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
  std::set<uint64_t> products;
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

}  // namespace forkpoint
