#include "tests/support/verdict_check.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace forkpoint {

Verdict diff_folders(const std::string& a, const std::string& b, const DiffOptions& options) {
  const Run run_a = Run::open(a), run_b = Run::open(b);
  return diff(run_a, run_b, options);
}

Pair::Pair(const SmallTraining& a, const SmallTraining& b) : a(a.ranks, a.level), b(b.ranks, b.level) {
  plant(&this->a, a);
  plant(&this->b, b);
}

Verdict Pair::diff(const DiffOptions& options) {
  const TemporaryFolder folder;
  return diff_folders(a.write(folder / "a"), b.write(folder / "b"), options);
}

Verdict diff_with(const SmallTraining& base, const Hook& hook, const DiffOptions& options) {
  SmallTraining faulty = base;
  faulty.hook = hook;
  return Pair(base, faulty).diff(options);
}

bool holds(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

std::string dump(const Verdict& verdict) { return headline(verdict) + "\n" + to_json(verdict).dump(1); }

const Divergence& first_of(const Verdict& verdict) {
  static const Divergence kNowhere = [] {
    Divergence at;
    at.step = at.rank = -99;
    return at;
  }();
  return verdict.first ? *verdict.first : kNowhere;
}

bool is_at(const Divergence& at, int64_t step, int rank, Phase phase, const std::string& layer,
           const std::string& tensor) {
  return at.step == step && at.rank == rank && at.phase == phase && at.layer == layer && at.tensor == tensor;
}

}  // namespace forkpoint
