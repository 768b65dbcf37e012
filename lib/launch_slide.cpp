#include <algorithm>

#include "lib/diff_match.h"
#include "lib/launch_sequence.h"

namespace forkpoint {
namespace {

// One run of elements that only one sequence has, right before pair `next`.
struct Leftover {
  size_t next = 0;  // in the list of pairs
  uint32_t length = 0;
  bool in_b = false;
};

class Slider {
 public:
  Slider(size_t around, const std::function<bool(size_t, size_t)>& may_pair,
         const std::function<int(std::span<const IndexPair>)>& conflicts, std::vector<IndexPair>* pairs)
      : around_(around), may_pair_(may_pair), conflicts_(conflicts), pairs_(*pairs) {}

  void slide(const Leftover& run) {
    const size_t right = reach(run, true), left = reach(run, false);
    if (left == 0 && right == 0) return;
    const size_t first = run.next - std::min(run.next, left + kMargin),
                 end = std::min(pairs_.size(), run.next + right + kMargin);
    const std::span<const IndexPair> window(pairs_.data() + first, end - first);
    const std::vector<IndexPair> before(pairs_.begin(), pairs_.end());
    int least = conflicts_(window);
    std::vector<IndexPair> best = before;
    for (size_t step = 1; step <= right; ++step) {  // to the right: pairs behind the run take what is before them
      move(run, run.next + step - 1, true);
      keep_if_less(window, &least, &best);
    }
    std::copy(before.begin(), before.end(), pairs_.begin());
    for (size_t step = 1; step <= left; ++step) {
      move(run, run.next - step, false);
      keep_if_less(window, &least, &best);
    }
    std::copy(best.begin(), best.end(), pairs_.begin());
  }

 private:
  static constexpr size_t kMargin = 16;

  IndexPair moved(const Leftover& run, size_t pair, bool right) const {
    IndexPair at = pairs_[pair];
    uint32_t& index = run.in_b ? at.second : at.first;
    index = right ? index - run.length : index + run.length;
    return at;
  }
  void move(const Leftover& run, size_t pair, bool right) { pairs_[pair] = moved(run, pair, right); }

  void keep_if_less(std::span<const IndexPair> window, int* least, std::vector<IndexPair>* best) const {
    const int count = conflicts_(window);
    if (count >= *least) return;
    *least = count;
    best->assign(pairs_.begin(), pairs_.end());
  }

  // How many pairs in a row may be moved over the run.
  size_t reach(const Leftover& run, bool right) const {
    size_t count = 0;
    while (count < around_) {
      if (right ? run.next + count >= pairs_.size() : run.next < count + 1) break;
      const size_t pair = right ? run.next + count : run.next - count - 1;
      if (count > 0) {  // nothing else is left over in between
        const IndexPair &one = pairs_[right ? pair - 1 : pair], &other = pairs_[right ? pair : pair + 1];
        if (one.first + 1 != other.first || one.second + 1 != other.second) break;
      }
      const IndexPair at = moved(run, pair, right);
      if (!may_pair_(at.first, at.second)) break;
      ++count;
    }
    return count;
  }

  const size_t around_;
  const std::function<bool(size_t, size_t)>& may_pair_;
  const std::function<int(std::span<const IndexPair>)>& conflicts_;
  std::vector<IndexPair>& pairs_;
};

}  // namespace

void slide_leftovers(size_t size_a, size_t size_b, size_t around, const std::function<bool(size_t, size_t)>& may_pair,
                     const std::function<int(std::span<const IndexPair>)>& conflicts, std::vector<uint32_t>* in_b) {
  constexpr size_t kMostRuns = 64;
  std::vector<IndexPair> pairs;
  for (size_t i = 0; i < size_a; ++i) {
    if ((*in_b)[i] != kNoRow) pairs.push_back({static_cast<uint32_t>(i), (*in_b)[i]});
  }
  Slider slider(around, may_pair, conflicts, &pairs);
  size_t runs = 0;
  for (size_t p = 0; p <= pairs.size() && runs < kMostRuns; ++p) {
    const IndexPair from = p == 0 ? IndexPair{0, 0} : IndexPair{pairs[p - 1].first + 1, pairs[p - 1].second + 1};
    const IndexPair to =
        p == pairs.size() ? IndexPair{static_cast<uint32_t>(size_a), static_cast<uint32_t>(size_b)} : pairs[p];
    const uint32_t left_a = to.first - from.first, left_b = to.second - from.second;
    if ((left_a == 0) == (left_b == 0)) continue;
    ++runs;
    slider.slide({p, std::max(left_a, left_b), left_b != 0});
  }
  std::fill(in_b->begin(), in_b->end(), kNoRow);
  for (const IndexPair& pair : pairs) (*in_b)[pair.first] = pair.second;
}

}  // namespace forkpoint
