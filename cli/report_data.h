// What the HTML report reads from the runs besides the verdict: the records around the fork and the losses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/run.h"
#include "lib/verdict.h"

namespace forkpoint {

struct ForkRow {
  enum class State { equal, differs, only_first, only_second };
  struct Side {
    std::string form;    // "f32[4, 64]"
    std::string value;   // digest in hex, or a scalar
    std::string absmax;  // empty for what has none
    uint64_t nonfinite = 0;
  };
  State state = State::equal;
  bool is_fork = false;
  const Site* site = nullptr;  // lives as long as the runs
  int32_t micro_step = 0;
  uint32_t call = 0;
  std::optional<Side> first, second;
};
struct ForkRecords {
  int rank = 0;
  int64_t step = 0;
  size_t rows_before = 0, rows_after = 0;  // of that step, outside the window
  std::vector<ForkRow> rows;               // in the order of the first run
  std::string problem;                     // why there are none
};
// About `window` records before and after the verdict's first divergence, on its rank. REQUIRES: verdict.first.
ForkRecords records_around_fork(const Run& a, const Run& b, const Verdict& verdict, size_t window = 15);

struct LossPoint {
  int64_t step;
  double value;
};
struct LossSeries {
  std::string name;
  int rank = 0;
  std::vector<LossPoint> a, b;
};
struct Losses {
  std::vector<LossSeries> series;
  std::string note;  // which ranks were left out, or why there are none
};
// Scalars of role loss, the mean over a step's micro-steps; of the rank of the fork and a few others.
Losses read_losses(const Run& a, const Run& b, const Verdict& verdict);

struct ManifestDifference {
  std::string field, a, b;
};
std::vector<ManifestDifference> manifest_differences(const Manifest& a, const Manifest& b);

}  // namespace forkpoint
