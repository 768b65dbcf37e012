// Spikes and NaN in one run, from the statistics that its hash streams hold (largest magnitude and non-finite count of
// every record): the first value that became non-finite, the first whose magnitude left its own history, and what
// followed up to the loss. Each rank's stream is read once, ranks in parallel.
//
// The rule for magnitudes. log2(absmax) of a record is held against the last 64 recorded steps of the same rank, site,
// micro-step and call (at least 8 of them, zeros and non-finite values aside). It left its history when it is
//   above the median by more than max(6 MAD, 4 octaves), and above the largest of them by more than 1 octave;
// a loss, which moves little, when above the median by more than max(6 MAD, 1 octave) and the largest by more than 1/2
// octave. Gradients, what comes before them in the backward pass, and optimizer state burst: of these a departure
// counts only when, on any rank, a loss, an activation or a parameter leaves its history or something becomes
// non-finite within 8 steps (or when it is more than 14 octaves above the largest). Measured: in three trainings of 400
// steps that went well (minigpt, batch 2, one with each of 1, 20 and 60 warm-up steps) gradients rose up to 11 octaves
// above all of 64 steps, and activations 0.7. Why: values are heavy-tailed, so a bound in MADs alone gives false
// alarms, and a constant (MAD 0) needs a bound in octaves; loss scaling changes gradients by one octave at once; Adam's
// moments start from zero and grow, but after 8 steps by less than an octave a step; a value that grows slowly takes
// its history along. A tensor that has been as large before did not leave anything. Weights that decay, gradients that
// vanish: getting smaller is no anomaly. Integers, scalars other than losses (learning rates jump by design) and what
// is loaded before the first step are not judged by magnitude.
//
// Non-finite and no anomaly: what was never finite and reaches no loss, gradient, parameter or state (an attention mask
// of -infinity); gradients in a step that a gradient scaler skipped (scalar "skipped"). Both are said.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>

#include "lib/run_steps.h"
#include "lib/verdict.h"

namespace forkpoint {

inline constexpr int kHistorySteps = 64;
inline constexpr int kFewestSteps = 8;
inline constexpr int kBurstSteps = 8;

struct AnomalyOptions {
  StepWindow window;
  int threads = 0;  // 0: as many as there are cores
  std::function<void(uint64_t done, uint64_t total)> progress;
};

struct Anomaly {
  Divergence at;           // rank -1: all ranks alike; before, after: in words
  std::vector<int> ranks;  // at this place in this step
  bool is_nonfinite = false;
  uint64_t nonfinite = 0, elements = 0;
  double magnitude = 0;  // absmax; of a loss that is a number, the number
  double usual = 0;      // median of its history
  int history = 0;       // steps
};
// What else became anomalous, by step and phase.
struct AnomalyLink {
  int64_t step = 0;
  Phase phase = Phase::forward;
  std::vector<int> ranks;
  uint64_t nonfinite = 0, departed = 0;  // records
  std::string first, last;               // places, in order of arrival
};
struct Anomalies {
  std::optional<Anomaly> nonfinite, magnitude, loss;  // of training; loss: the first, not before the others
  std::optional<Anomaly> evaluation;                  // the first of evaluation
  std::vector<AnomalyLink> chain;                     // from the first to the loss
  bool loss_recorded = false;
  std::optional<double> loss_before;   // the last one that was in order, on that rank
  uint64_t looked_at = 0, judged = 0;  // records of training; those whose magnitude had enough history
  uint64_t steps = 0;
  int ranks = 0;
  std::vector<std::string> lost;      // what should be there and is not
  std::vector<std::string> left_out;  // not recorded on purpose
  std::vector<std::string> notes;     // non-finite, and no anomaly
  bool found() const { return nonfinite || magnitude; }
};

Anomalies find_anomalies(const Run& run, const AnomalyOptions& options = {});

// `first non-finite value at step 12, rank 1, backward, blocks.3.mlp.fc1: grad_input (2 of 4,096 elements)`
std::string headline(const Anomalies& anomalies);
std::string describe(const Anomaly& anomaly);  // "first magnitude out of its own history at ...", without "first"
std::string describe(const AnomalyLink& link);
// 0 nothing; 1 found; 2 nothing found, but a part of the run is lost.
int exit_code(const Anomalies& anomalies);
nlohmann::ordered_json to_json(const Anomalies& anomalies);
// The rule in one sentence, for reports.
std::string anomaly_rule();

}  // namespace forkpoint
