// One rank's stream, read once: which records are anomalous, in order. Internal to find_anomalies.
#pragma once

#include <array>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "lib/anomalies.h"

namespace forkpoint {

// The recent magnitudes of one record: log2(absmax) in 1/128 octaves, as the upper half of the float's bits. 0: none.
class MagnitudeHistory {
 public:
  bool leaves(uint16_t level, bool is_loss);  // does this magnitude leave the history?
  void add(uint16_t level);
  bool judged() const { return judged_; }  // by the last call
  bool beyond_bursts(uint16_t level) const { return level > largest_ + kBeyondBursts; }
  uint16_t median() const;
  int size() const { return count_; }
  static uint16_t level_of(float absmax);  // 0 below 2^-60
  static double magnitude_of(uint16_t level);

  bool ever_finite = false, seen = false, by_design = false;

 private:
  static constexpr int kBeyondBursts = 14 * 128;  // octaves
  std::array<uint16_t, kHistorySteps> levels_{};
  uint16_t largest_ = 0;
  uint8_t count_ = 0, next_ = 0;
  bool judged_ = false;
};

// An anomalous record.
struct Hit {
  uint32_t row = 0, site = 0, layout = 0, call = 0;
  int32_t micro_step = 0;
  uint8_t flags = 0;
  bool is_nonfinite = false;
  bool is_burst = false;  // of a gradient or what follows it: counts only with what comes after
  uint64_t nonfinite = 0;
  double magnitude = 0, usual = 0;
  int history = 0;
};
using CollectiveCall = std::tuple<uint64_t, int32_t, uint32_t>;  // op_key, micro-step, call
struct FirstHit {
  int64_t step = 0;
  size_t order = 0;  // of the step, in the stream
  Hit hit;
  bool received = false;  // a collective's output
  CollectiveCall via;
  std::set<CollectiveCall> given;  // collectives of this step whose input is anomalous on this rank
};
struct RankAnomalies {
  size_t stream = 0;
  std::optional<FirstHit> nonfinite, magnitude, loss, evaluation;
  std::vector<FirstHit> bursts;  // the first of each step that has some
  struct Link {
    uint64_t nonfinite = 0, departed = 0;
    uint32_t first_row = 0, first_site = 0, last_site = 0;
  };
  std::map<std::pair<int64_t, Phase>, Link> links;
  std::optional<double> loss_before;
  bool loss_recorded = false;
  uint64_t looked_at = 0, judged = 0;
  std::set<int64_t> steps;
  std::vector<std::string> damage;
  std::map<std::string, int64_t> by_design;  // place: first step
  std::vector<int64_t> skipped;              // steps of a gradient scaler
};
RankAnomalies scan_rank(const Run& run, size_t stream, const StepWindow& window,
                        const std::function<void()>& after_each_step);

uint64_t statistics_elements(const Layout& layout);  // what a non-finite count counts: parts of complex elements

}  // namespace forkpoint
