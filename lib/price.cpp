#include "lib/price.h"

#include <algorithm>
#include <cmath>

namespace forkpoint {
namespace {

using Set = std::vector<size_t>;

Set joined(Set a, const Set& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  return a;
}

// Divide and conquer (Junker's QuickXplain): of `candidates`, what is needed besides `kept`. `kept_is_new`: it has grown
// since it was last found not to be enough.
class Search {
 public:
  explicit Search(const std::function<bool(const Set&)>& repeats) : repeats_(repeats) {}

  Set needed(const Set& kept, bool kept_is_new, const Set& candidates) {
    if (kept_is_new && ask(kept)) return {};
    if (candidates.size() <= 1) return candidates;
    const auto middle = candidates.begin() + static_cast<std::ptrdiff_t>(candidates.size() / 2);
    const Set preferred(candidates.begin(), middle), rest(middle, candidates.end());
    const Set of_rest = needed(joined(kept, preferred), true, rest);
    const Set of_preferred = needed(joined(kept, of_rest), !of_rest.empty(), preferred);
    return joined(of_preferred, of_rest);
  }

 private:
  bool ask(const Set& kept) {
    const auto known = known_.find(kept);
    if (known != known_.end()) return known->second;
    return known_[kept] = repeats_(kept);
  }

  const std::function<bool(const Set&)>& repeats_;
  std::map<Set, bool> known_;
};

}  // namespace

std::vector<double> step_times_ms(const std::vector<StepBegins>& ranks, int64_t first, int64_t last) {
  std::vector<double> times;
  for (int64_t step = first; step < last; ++step) {
    int64_t slowest_ns = 0;
    bool all = !ranks.empty();
    for (const StepBegins& rank : ranks) {
      const auto begin = rank.find(step), end = rank.find(step + 1);
      all = all && begin != rank.end() && end != rank.end() && end->second > begin->second;
      if (all) slowest_ns = std::max(slowest_ns, end->second - begin->second);
    }
    if (all) times.push_back(static_cast<double>(slowest_ns) / 1e6);
  }
  return times;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

ArmTime arm_time(const std::vector<double>& run_medians_ms) {
  const auto [low, high] = std::minmax_element(run_medians_ms.begin(), run_medians_ms.end());
  return {median(run_medians_ms), *low, *high};
}

bool differ(const ArmTime& a, const ArmTime& b, size_t runs_a, size_t runs_b) {
  if (runs_a < kFewestRuns || runs_b < kFewestRuns) return false;
  const bool apart = a.high_ms < b.low_ms || b.high_ms < a.low_ms;
  return apart && std::abs(a.median_ms - b.median_ms) > std::max(a.spread_ms(), b.spread_ms());
}

std::vector<size_t> minimal_knobs(size_t count, const std::function<bool(const std::vector<size_t>&)>& repeats) {
  Set all(count);
  for (size_t i = 0; i < count; ++i) all[i] = i;
  return Search(repeats).needed({}, false, all);
}

}  // namespace forkpoint
