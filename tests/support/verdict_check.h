// Short names for tests about verdicts.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "lib/diff.h"
#include "tests/support/small_training.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {

Verdict diff_folders(const std::string& a, const std::string& b, const DiffOptions& options = {});

// Two trainings, to be written and compared.
struct Pair {
  Pair(const SmallTraining& a, const SmallTraining& b);
  Verdict diff(const DiffOptions& options = {});
  RunBuilder a, b;
};
// `base` clean against `base` with the hook.
Verdict diff_with(const SmallTraining& base, const Hook& hook, const DiffOptions& options = {});

bool holds(const std::vector<std::string>& texts, const std::string& part);
std::string dump(const Verdict& verdict);
// The first divergence, or one that is nowhere.
const Divergence& first_of(const Verdict& verdict);
bool is_at(const Divergence& at, int64_t step, int rank, Phase phase, const std::string& layer,
           const std::string& tensor);

}  // namespace forkpoint
