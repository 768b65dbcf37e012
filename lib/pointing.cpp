#include "lib/pointing.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>

namespace forkpoint {
namespace {

const std::vector<int64_t>& whole_shape(const Layout& layout) {
  return layout.is_shard() ? layout.global_shape : layout.shape;
}

std::vector<int64_t> unravel(uint64_t element, const std::vector<int64_t>& shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    const uint64_t extent = static_cast<uint64_t>(shape[d]);
    if (extent == 0) return {};
    index[d] = static_cast<int64_t>(element % extent);
    element /= extent;
  }
  return index;
}

bool in_box(const std::vector<int64_t>& index, const Layout& layout) {
  if (!layout.is_shard()) return true;
  for (size_t d = 0; d < index.size(); ++d) {
    const int64_t local = index[d] - layout.global_offset[d];
    if (local < 0 || local >= layout.shape[d]) return false;
  }
  return true;
}

uint64_t whole_elements(const Layout& layout) {
  uint64_t count = 1;
  for (const int64_t extent : whole_shape(layout)) {
    if (extent <= 0) return 0;
    if (count > UINT64_MAX / 16 / static_cast<uint64_t>(extent))
      return UINT64_MAX / 16;  // absurd shape in a damaged file
    count *= static_cast<uint64_t>(extent);
  }
  return count;
}

int flipped_bit(int64_t delta) {
  const uint64_t magnitude = delta < 0 ? 0 - static_cast<uint64_t>(delta) : static_cast<uint64_t>(delta);
  return std::has_single_bit(magnitude) ? std::countr_zero(magnitude) : -1;
}

std::string element_text(const std::vector<int64_t>& index) { return fmt::format("[{}]", fmt::join(index, ", ")); }

}  // namespace

uint64_t word_count(const Layout& layout) {
  return (whole_elements(layout) * static_cast<uint64_t>(size_bytes(layout.dtype)) + 3) / 4;
}

std::optional<Pointing> point(const Digest& first, const Digest& second, const Layout& layout) {
  const uint64_t words = word_count(layout);
  WordChange change;
  if (words == 0 || words > kMaxPointingWords || !find_single_word_change(first, second, words, &change)) return {};

  const uint64_t element_bytes = static_cast<uint64_t>(size_bytes(layout.dtype));
  const uint64_t begin = change.word * 4 / element_bytes;
  const uint64_t per_word = element_bytes < 4 ? 4 / element_bytes : 1;
  const uint64_t end = std::min(begin + per_word, whole_elements(layout));
  Pointing pointing;
  pointing.word = change.word;
  pointing.delta = change.delta;
  pointing.bit = flipped_bit(change.delta);
  pointing.elements = 0;
  for (uint64_t element = begin; element < end; ++element) {
    auto index = unravel(element, whole_shape(layout));
    if (!in_box(index, layout)) continue;  // a word that straddles the edge of a shard
    if (pointing.elements++ == 0) pointing.tensor_index = std::move(index);
  }
  if (pointing.elements == 0) return {};  // a word of the global tensor that this shard does not hold
  return pointing;
}

std::string to_sentence(const Pointing& pointing, const Layout& layout) {
  std::string place = fmt::format("word {}", pointing.word);
  if (!pointing.tensor_index.empty()) place += fmt::format(", element {}", element_text(pointing.tensor_index));
  if (pointing.elements > 1) place += fmt::format(" or one of the {} after it in that word", pointing.elements - 1);
  std::string text = fmt::format("one 32-bit word differs ({}), by {:+}", place, pointing.delta);
  if (pointing.bit < 0) return text;

  const int element_bits = size_bytes(layout.dtype) * 8;
  std::string where = fmt::format("bit {} of the word", pointing.bit);
  int bit = pointing.bit;
  if (element_bits == 32) {
    where = fmt::format("bit {} of the element", bit);
  } else if (element_bits < 32) {
    where = fmt::format("bit {} of the element at byte {} of the word", bit % element_bits,
                        bit / element_bits * element_bits / 8);
    bit %= element_bits;
  }
  const std::string ulp = bit == 0 ? "1 ulp looks the same" : fmt::format("a change of 2^{} ulp looks the same", bit);
  return text + fmt::format(": one word, consistent with a flipped bit ({}; {})", where, ulp);
}

}  // namespace forkpoint
