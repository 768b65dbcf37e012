// Short names for tests about verdicts.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "lib/diff.h"
#include "tests/support/run_generator.h"
#include "tests/support/small_training.h"

namespace forkpoint {

inline Verdict diff_folders(const std::string& a, const std::string& b, const DiffOptions& options = {}) {
  const Run run_a = Run::open(a), run_b = Run::open(b);
  return diff(run_a, run_b, options);
}

// Writes both trainings and compares them.
struct Pair {
  explicit Pair(const SmallTraining& a, const SmallTraining& b) : a(a.ranks, a.level), b(b.ranks, b.level) {
    plant(&this->a, a);
    plant(&this->b, b);
  }
  Verdict diff(const DiffOptions& options = {}) {
    const TemporaryFolder folder;
    return diff_folders(a.write(folder / "a"), b.write(folder / "b"), options);
  }
  RunBuilder a, b;
};

inline Verdict diff_with(const SmallTraining& base, const Hook& hook, const DiffOptions& options = {}) {
  SmallTraining faulty = base;
  faulty.hook = hook;
  return Pair(base, faulty).diff(options);
}

inline bool holds(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(), [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

inline std::string dump(const Verdict& verdict) { return headline(verdict) + "\n" + to_json(verdict).dump(1); }

inline bool is_at(const Divergence& at, int64_t step, int rank, Phase phase, const std::string& layer, const std::string& tensor) {
  return at.step == step && at.rank == rank && at.phase == phase && at.layer == layer && at.tensor == tensor;
}

}  // namespace forkpoint
