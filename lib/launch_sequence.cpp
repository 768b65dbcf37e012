#include "lib/launch_sequence.h"

#include <algorithm>
#include <unordered_map>

#include "lib/diff_match.h"

namespace forkpoint {
namespace {

// The furthest x on every diagonal k (x - y), for each number of edits d; diagonals -d, -d + 2, ..., d.
class EditPaths {
 public:
  int64_t& at(int64_t d, int64_t k) { return x_[static_cast<size_t>(d)][static_cast<size_t>((k + d) / 2)]; }
  void add_row() { x_.emplace_back(x_.size() + 1, 0); }
  // Where a path of d edits comes to diagonal k from its predecessor, before it follows equal elements.
  int64_t enter(int64_t d, int64_t k) {
    if (d == 0) return 0;
    const bool down = k == -d || (k != d && at(d - 1, k - 1) < at(d - 1, k + 1));
    return down ? at(d - 1, k + 1) : at(d - 1, k - 1) + 1;
  }
  int64_t previous(int64_t d, int64_t k) {
    const bool down = k == -d || (k != d && at(d - 1, k - 1) < at(d - 1, k + 1));
    return down ? k + 1 : k - 1;
  }

 private:
  std::vector<std::vector<int64_t>> x_;
};

// A stretch of both sequences that is aligned anew.
struct Window {
  size_t begin_a = 0, end_a = 0, begin_b = 0, end_b = 0;
};

// Everything that is left over, with `around` pairs before and after it; windows that touch are one.
std::vector<Window> windows_of(size_t size_a, size_t size_b, size_t around, const std::vector<uint32_t>& in_b) {
  std::vector<std::pair<size_t, size_t>> pairs;
  for (size_t i = 0; i < size_a; ++i) {
    if (in_b[i] != kNoRow) pairs.push_back({i, in_b[i]});
  }
  const auto edge = [&](size_t pair, bool begin) {  // of a window that begins behind, or ends before, a pair
    if (begin)
      return pair == 0 ? std::pair<size_t, size_t>(0, 0)
                       : std::pair(pairs[pair - 1].first + 1, pairs[pair - 1].second + 1);
    return pair == pairs.size() ? std::pair(size_a, size_b) : pairs[pair];
  };
  std::vector<Window> windows;
  size_t last_end = 0;  // in pairs
  for (size_t p = 0; p <= pairs.size(); ++p) {
    const auto from = edge(p, true), to = edge(p, false);
    if (from == to) continue;  // nothing is left over before this pair
    const size_t first = p > around ? p - around : 0, end = std::min(pairs.size(), p + around);
    const auto [end_a, end_b] = edge(end, false);
    if (!windows.empty() && first <= last_end) {
      windows.back().end_a = end_a, windows.back().end_b = end_b;
    } else {
      const auto [begin_a, begin_b] = edge(first, true);
      windows.push_back({begin_a, end_a, begin_b, end_b});
    }
    last_end = end;
  }
  return windows;
}

void align_window(const Window& w, const std::function<int(size_t, size_t)>& score, std::vector<uint32_t>* in_b) {
  const size_t rows = w.end_a - w.begin_a, columns = w.end_b - w.begin_b;
  std::vector<int> scores(rows * columns), best((rows + 1) * (columns + 1), 0);
  const auto at = [&](size_t i, size_t j) -> int& { return best[i * (columns + 1) + j]; };
  for (size_t i = rows; i-- > 0;) {
    for (size_t j = columns; j-- > 0;) {
      const int pair = scores[i * columns + j] = score(w.begin_a + i, w.begin_b + j);
      at(i, j) = std::max({at(i + 1, j), at(i, j + 1), pair > 0 ? pair + at(i + 1, j + 1) : 0});
    }
  }
  std::fill(in_b->begin() + static_cast<std::ptrdiff_t>(w.begin_a),
            in_b->begin() + static_cast<std::ptrdiff_t>(w.end_a), kNoRow);
  for (size_t i = 0, j = 0; i < rows && j < columns;) {
    const int pair = scores[i * columns + j];
    if (pair > 0 && at(i, j) == pair + at(i + 1, j + 1)) {
      (*in_b)[w.begin_a + i++] = static_cast<uint32_t>(w.begin_b + j++);
    } else if (at(i, j) == at(i, j + 1)) {
      ++j;
    } else {
      ++i;
    }
  }
}

}  // namespace

bool add_common(std::span<const uint64_t> a, std::span<const uint64_t> b, size_t most_edits, std::span<uint32_t> in_b,
                uint32_t first_b) {
  const int64_t size_a = static_cast<int64_t>(a.size()), size_b = static_cast<int64_t>(b.size());
  const int64_t limit = std::min<int64_t>(static_cast<int64_t>(most_edits), size_a + size_b);
  EditPaths paths;
  for (int64_t d = 0; d <= limit; ++d) {
    paths.add_row();
    for (int64_t k = -d; k <= d; k += 2) {
      int64_t x = paths.enter(d, k);
      while (x < size_a && x - k < size_b && x >= 0 && x - k >= 0 &&
             a[static_cast<size_t>(x)] == b[static_cast<size_t>(x - k)])
        ++x;
      paths.at(d, k) = x;
      if (x < size_a || x - k < size_b) continue;
      for (int64_t e = d; e >= 0; --e) {  // back along the path
        const int64_t entry = paths.enter(e, k);
        for (int64_t i = std::min(paths.at(e, k), size_a); i-- > entry;)
          in_b[static_cast<size_t>(i)] = first_b + static_cast<uint32_t>(i - k);
        if (e > 0) k = paths.previous(e, k);
      }
      return true;
    }
  }
  return false;
}

void add_unique(std::span<const uint64_t> a, std::span<const uint64_t> b, std::span<uint32_t> in_b, uint32_t first_b) {
  struct Place {
    size_t a = 0, b = 0;
    int count_a = 0, count_b = 0;
  };
  std::unordered_map<uint64_t, Place> places;
  for (size_t i = 0; i < a.size(); ++i) places[a[i]].a = i, ++places[a[i]].count_a;
  for (size_t j = 0; j < b.size(); ++j) places[b[j]].b = j, ++places[b[j]].count_b;
  std::vector<std::pair<size_t, size_t>> pairs;
  for (const auto& [token, place] : places) {
    if (place.count_a == 1 && place.count_b == 1) pairs.push_back({place.a, place.b});
  }
  std::sort(pairs.begin(), pairs.end());
  // Longest increasing subsequence of B's places: the smallest end of a chain of each length, and what comes before it.
  std::vector<size_t> ends, before(pairs.size(), pairs.size());
  for (size_t p = 0; p < pairs.size(); ++p) {
    const auto at = std::lower_bound(ends.begin(), ends.end(), pairs[p].second,
                                     [&](size_t end, size_t value) { return pairs[end].second < value; });
    if (at != ends.begin()) before[p] = *(at - 1);
    if (at == ends.end())
      ends.push_back(p);
    else
      *at = p;
  }
  for (size_t p = ends.empty() ? pairs.size() : ends.back(); p < pairs.size(); p = before[p]) {
    in_b[pairs[p].first] = first_b + static_cast<uint32_t>(pairs[p].second);
  }
}

void refine_alignment(size_t size_a, size_t size_b, size_t around, const std::function<int(size_t, size_t)>& score,
                      std::vector<uint32_t>* in_b) {
  constexpr size_t kMostCells = 1 << 20;
  for (const Window& window : windows_of(size_a, size_b, around, *in_b)) {
    const size_t cells = (window.end_a - window.begin_a) * (window.end_b - window.begin_b);
    if (cells > 0 && cells <= kMostCells) align_window(window, score, in_b);
  }
}

}  // namespace forkpoint
