#include "lib/launch_params.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr int64_t kLargestChange = (int64_t{1} << 32) - 1;

// Of an odd number, modulo 2^64: each round of Newton's iteration doubles the number of right bits, 3 to begin with.
uint64_t inverse(uint64_t odd) {
  uint64_t x = odd;
  for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
  return x;
}

bool is_change(int64_t delta) { return delta != 0 && delta >= -kLargestChange && delta <= kLargestChange; }

// Solves K1(i) x + K1(j) y = d.a, K2(i) x + K2(j) y = d.b for changes of 32-bit words. The determinant of odd keys is
// even, so y is known modulo 2^(64 - v) only, which is enough for a number of 33 bits.
bool solve_two(const Digest& d, uint64_t i, uint64_t j, std::vector<WordChange>* out) {
  const uint64_t ratio = key<2>(i) * inverse(key<1>(i));
  const uint64_t determinant = key<2>(j) - ratio * key<1>(j), right = d.b - ratio * d.a;
  const int v = determinant == 0 ? 64 : std::countr_zero(determinant);
  if (v > 30 || (v > 0 && (right & ((uint64_t{1} << v) - 1)) != 0)) return false;
  const uint64_t low = (right >> v) * inverse(determinant >> v);
  const int64_t y = static_cast<int64_t>(low << v) >> v;
  const int64_t x = static_cast<int64_t>((d.a - key<1>(j) * static_cast<uint64_t>(y)) * inverse(key<1>(i)));
  if (!is_change(x) || !is_change(y)) return false;
  *out = {{i, x}, {j, y}};
  return true;
}

struct Pointer {
  const BufferRow* a = nullptr;
  const BufferRow* b = nullptr;
};

std::map<uint32_t, Pointer> pointers_of(std::span<const BufferRow> a, std::span<const BufferRow> b) {
  std::map<uint32_t, Pointer> out;
  for (const BufferRow& buffer : a) {
    if (buffer.place < kPlaceSpecial) out[buffer.place].a = &buffer;
  }
  for (const BufferRow& buffer : b) {
    if (buffer.place < kPlaceSpecial) out[buffer.place].b = &buffer;
  }
  return out;
}

bool is_exact(const BufferRow& buffer) { return (buffer.flags & kBufferWindow) == 0; }

// A number that happens to lie in some allocation of each run.
bool looks_like_number(const Pointer& at) {
  return at.a->address == at.b->address && (at.a->allocation != at.b->allocation || at.a->offset != at.b->offset);
}

void compare_pointers(const std::map<uint32_t, Pointer>& pointers, const std::function<bool(uint32_t)>& is_pointer,
                      ParameterCheck* out) {
  std::vector<std::pair<uint32_t, Pointer>> both;
  for (const auto& [place, at] : pointers) {
    if (is_pointer && !is_pointer(place)) continue;
    if (at.a == nullptr || at.b == nullptr || looks_like_number(at) || !is_exact(*at.a) || !is_exact(*at.b)) continue;
    both.push_back({place, at});
    if (at.a->offset == at.b->offset) continue;
    out->pointers.push_back(
        fmt::format("the pointer at parameter byte {} leads {} bytes into its buffer in run A, {} in run B", place,
                    at.a->offset, at.b->offset));
  }
  for (size_t i = 0; i < both.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const bool one_a = both[i].second.a->allocation == both[j].second.a->allocation;
      const bool one_b = both[i].second.b->allocation == both[j].second.b->allocation;
      if (one_a == one_b) continue;
      out->pointers.push_back(
          fmt::format("the pointers at parameter bytes {} and {} lead to one buffer in run {}, to two in run {}",
                      both[j].first, both[i].first, one_a ? 'A' : 'B', one_a ? 'B' : 'A'));
    }
  }
}

Digest word_put_back(const BufferRow& buffer) {
  return digest_only(&buffer.address, sizeof buffer.address, buffer.place);
}

}  // namespace

std::vector<WordChange> find_changed_words(const Digest& a, const Digest& b, uint64_t n_words, bool any_two) {
  constexpr uint64_t kMostWords = 1024;
  WordChange one;
  if (find_single_word_change(a, b, n_words, &one)) return {one};
  const Digest difference = b - a;
  std::vector<WordChange> found, pair;
  int ways = 0;
  const uint64_t words = std::min(n_words, kMostWords);
  for (uint64_t i = 0; i + 1 < words; ++i) {
    const uint64_t end = any_two ? words : i + 2;
    for (uint64_t j = i + 1; j < end; ++j) {
      if (solve_two(difference, i, j, &pair)) found = pair, ++ways;
    }
  }
  return ways == 1 ? found : std::vector<WordChange>();
}

ParameterCheck compare_parameters(const LaunchRow& a, std::span<const BufferRow> buffers_a, const LaunchRow& b,
                                  std::span<const BufferRow> buffers_b, bool thorough,
                                  const std::function<bool(uint32_t place)>& is_pointer) {
  ParameterCheck out;
  out.unread = ((a.flags | b.flags) & kLaunchParamsUnread) != 0;
  if (out.unread) return out;
  out.size_differs = a.param_bytes != b.param_bytes;
  Digest in_a = a.params, in_b = b.params;
  const auto pointers = pointers_of(buffers_a, buffers_b);
  for (const auto& [place, at] : pointers) {
    if (at.b == nullptr) in_a += word_put_back(*at.a);
    if (at.a == nullptr) in_b += word_put_back(*at.b);
  }
  compare_pointers(pointers, is_pointer, &out);
  out.values_differ = !(in_a == in_b);
  if (!out.values_differ || out.size_differs) return out;
  out.words = find_changed_words(in_a, in_b, (uint64_t{a.param_bytes} + 3) / 4, thorough);
  // What looks like a pointer in one run only and differs: an address of memory that is not known in the other.
  for (const auto& [place, at] : pointers) {
    if (at.a != nullptr && at.b != nullptr) continue;
    const bool there = std::any_of(out.words.begin(), out.words.end(), [place = place](const WordChange& change) {
      return change.word == place / 4 || change.word == place / 4 + 1;
    });
    if (there || out.words.empty()) {
      out.one_sided.push_back(fmt::format("parameter bytes {}..{} hold a pointer that is known in run {} only", place,
                                          place + 7, at.b == nullptr ? 'A' : 'B'));
    }
  }
  return out;
}

std::string to_sentence(const std::vector<WordChange>& words) {
  std::string text;
  for (const WordChange& change : words) {
    text += fmt::format("{}parameter bytes {}..{} differ by {:+}", text.empty() ? "" : ", ", change.word * 4,
                        change.word * 4 + 3, change.delta);
  }
  return text;
}

void FreeWords::learn(const std::string& kernel, const ParameterCheck& check) {
  if (!check.values_differ || check.size_differs || check.unread) return;
  Words& at = kernels_[kernel];
  ++at.launches;
  for (const WordChange& change : check.words) at.words.insert(change.word);
}

void FreeWords::add(const FreeWords& other) {
  for (const auto& [kernel, words] : other.kernels_) {
    Words& at = kernels_[kernel];
    at.launches += words.launches;
    at.words.insert(words.words.begin(), words.words.end());
  }
}

bool FreeWords::explain(const std::string& kernel, const ParameterCheck& check) const {
  const auto at = kernels_.find(kernel);
  if (at == kernels_.end() || !check.values_differ || check.words.empty() || check.size_differs ||
      !check.pointers.empty())
    return false;
  return std::all_of(check.words.begin(), check.words.end(),
                     [&](const WordChange& change) { return at->second.words.count(change.word) != 0; });
}

uint64_t FreeWords::seen(const std::string& kernel) const {
  const auto at = kernels_.find(kernel);
  return at == kernels_.end() ? 0 : at->second.launches;
}

}  // namespace forkpoint
