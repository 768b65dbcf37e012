// Which allocation of run B is which of run A: the one that stands, most often, where the other stands. By vote, since
// a number in a parameter block may look like a pointer to any buffer. Internal to diff.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace forkpoint {

class Counterparts {
 public:
  // An allocation's counterpart is the same for all of its life.
  void vote(uint64_t a, uint64_t b, uint32_t weight) {
    add(&in_b_[a], b, weight);
    add(&in_a_[b], a, weight);
  }
  // 0: not known.
  uint64_t of(bool of_b, uint64_t allocation) const {
    const auto& known = of_b ? in_a_ : in_b_;
    const auto at = known.find(allocation);
    return at == known.end() ? 0 : at->second[0].first;
  }
  // False where one of the two is known to be another's.
  bool may_be(uint64_t a, uint64_t b) const {
    const uint64_t known_b = of(false, a), known_a = of(true, b);
    return (known_b == 0 || known_b == b) && (known_a == 0 || known_a == a);
  }

 private:
  using Votes = std::vector<std::pair<uint64_t, uint32_t>>;  // the most first
  static void add(Votes* votes, uint64_t other, uint32_t weight) {
    constexpr size_t kMost = 4;
    for (size_t k = 0; k < votes->size(); ++k) {
      if ((*votes)[k].first != other) continue;
      (*votes)[k].second += weight;
      if ((*votes)[k].second > (*votes)[0].second) std::swap((*votes)[k], (*votes)[0]);
      return;
    }
    if (votes->size() < kMost) votes->push_back({other, weight});
  }
  std::unordered_map<uint64_t, Votes> in_b_, in_a_;
};

}  // namespace forkpoint
