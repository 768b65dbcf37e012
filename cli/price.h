// forkpoint price: a job fast, with all knobs of deterministic mode, with each alone; then the cheapest set that repeats.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cli/recording.h"
#include "lib/knobs.h"
#include "lib/price.h"

namespace forkpoint {

struct PriceRequest {
  std::string folder;  // made: the runs lie in it
  std::vector<std::string> command;
  Knobs knobs;                        // to be priced
  std::optional<std::string> step_on;
  int64_t first = 5, last = 25;       // steps before `first` are warm-up; `last` is hashed
  int64_t rounds = 3;                 // runs of each arm
  bool alone = true;                  // arms of one knob each
  std::chrono::seconds patience{1800};
  bool show_output = false;
};

struct PriceArm {
  enum class Kind { fast, full, alone, cheapest, candidate };
  Kind kind = Kind::fast;
  std::string name;                    // "fast", "cublas"; of folders too
  Knobs knobs;                         // in force
  std::vector<std::string> runs;       // folders of runs that got to their end
  std::vector<double> run_medians_ms;  // one each
  std::string failure;                 // why there are not as many as were wanted; empty: there are
  std::string difference;              // between the first run and a later one, or why they cannot be compared; empty: none
  bool incomparable = false;           // `difference` says why
  bool repeats() const { return runs.size() >= 2 && difference.empty() && failure.empty(); }
  std::optional<ArmTime> time() const { return run_medians_ms.empty() ? std::nullopt : std::optional(arm_time(run_medians_ms)); }
};

struct PriceResult {
  std::vector<PriceArm> arms;        // fast, full, each alone
  std::vector<PriceArm> candidates;  // sets that the search tried, in order
  std::optional<PriceArm> cheapest;  // nothing: the job repeats without, or not with all
  std::vector<std::string> not_in_force, not_deterministic;  // sentences
  size_t jobs = 0;
  double seconds = 0;
  const PriceArm& fast() const { return arms[0]; }
  const PriceArm& full() const { return arms[1]; }
};

// Runs the jobs. Throws Error when the job does not run without any knob. Ends this process after Ctrl-C. REQUIRES: a single
// thread.
PriceResult run_price(const PriceRequest& request);

// How an arm compares with `fast`: nothing where no difference was measured, or there is nothing to compare.
std::optional<double> measured_ratio(const PriceArm& arm, const PriceArm& fast);
// "1.12x", "no difference measured", or that it was not measured, and why.
std::string cost_words(const PriceArm& arm, const PriceArm& fast);
std::string price_headline(const PriceResult& result);
std::string price_text(const PriceRequest& request, const PriceResult& result);
std::string price_json(const PriceRequest& request, const PriceResult& result);
std::string price_html(const PriceRequest& request, const PriceResult& result);
int price_status(const PriceResult& result);  // 0: it repeats with some set of the knobs, 1: with none, 2: nobody can tell

}  // namespace forkpoint
