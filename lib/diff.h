// Compares two runs and names the first divergence: the earliest record, in causal order, whose inputs agree and whose
// output differs. lib/align.h says which steps and ranks are compared and what forbids the word identical.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lib/run.h"
#include "lib/verdict.h"

namespace forkpoint {

struct DiffOptions {
  std::optional<int64_t> first_step, last_step;  // inclusive
  std::vector<int> ranks;                        // empty: all
  int threads = 0;                               // 0: as many as there are cores
  bool full_scan = false;                        // compare records even where the tree says equal
  bool verify_checksums = true;                  // every frame of both runs, before saying identical
  bool want_map = false;
  bool launches = true;                          // compare the launches too, where both runs have them
  bool limits_alike = true;                      // what only one run declares as not seen forbids the word identical
  std::function<void(uint64_t done, uint64_t total)> progress;  // called from one thread at a time
  bool loads = true;                             // hold what was loaded before the first step against the other run's state
  bool is_resume = false;  // the later run is known to have loaded the other's state, whatever it shows
};

// Never throws for damaged input that Run::open accepted: damage becomes a Gap in the verdict.
Verdict diff(const Run& a, const Run& b, const DiffOptions& options = {});

}  // namespace forkpoint
