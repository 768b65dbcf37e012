// Joins the ranks: which of their first differences are origins, and which came to them through a collective. Internal
// to diff.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lib/diff_scan.h"
#include "lib/diff_step.h"

namespace forkpoint {

// A place where a divergence began, on one rank or on several alike.
struct Origin {
  int64_t step = 0;             // as reported: the first step where it lies in the prologue
  bool in_prologue = false;
  bool everyone = false;        // all members (or all ranks) alike: reported without a rank
  std::vector<int> ranks;       // ascending
  size_t pair = 0;              // of ranks[0], in Alignment::ranks
  size_t step_index = kNoStep;  // in RankPair::steps; kNoStep: the load of a resumed run
  Difference difference;        // as rank ranks[0] has it
  bool later = false;           // a further origin on a rank that has one before
  bool permuted = false;        // only words in another order, and nothing followed from it
  std::optional<Difference> skipped_permutation;
  std::vector<Difference> sources;  // also differ in this step on this rank

  // Where the difference is a collective's output:
  bool collective_output = false;
  bool judged = true;                // false: not every member's input is known
  std::vector<int> members;
  std::vector<int> unknown_members;  // whose input is not known
  bool alike = false;                // every member's output differs, and they agree with each other as in run A
  bool outputs_agree_a = false;      // members hold the same output in run A ...
  bool outputs_disagree_b = false;   // ... and not in run B
  bool keeps_own_input = false;      // run B's output on this rank is its own input
  Digest instance;                   // equal on all members that took part in this call; zero: the site and place tell them
};

// Ranks that were reached through a collective.
struct Infection {
  int64_t step = 0;
  std::string via;            // "blocks.3.mlp.fc1 (all_reduce)"
  std::vector<int> ranks, sources;
  std::vector<std::string> second_causes;  // batches, generators, hyperparameters that differ on the reached ranks: no consequence
};

struct Origins {
  std::vector<Origin> list;         // first one first
  std::vector<Infection> infections;
  std::vector<int> uncertain;       // ranks that differ too, and nothing recorded says through what
  std::optional<Origin> evaluation; // the earliest difference in an evaluation
  std::optional<Origin> permutation;  // the earliest one that made no difference
};

// Differences between what a resumed run loaded and the other run's state before: by index in Alignment::ranks.
using LoadDifferences = std::vector<std::vector<Difference>>;
// Resharded records that differ when put together, by A's step number and occurrence.
using AssembledDifferences = std::map<std::pair<int64_t, int>, RecordKeys>;

struct OriginInput {
  const Run& run_a;
  const Run& run_b;
  const Alignment& alignment;
  const Scan& scan;
  Joins& joins;
  const LoadDifferences& loads;
  const AssembledDifferences& assembled;
  int threads;
  Loaded loaded = Loaded::no;
};

Origins find_origins(const OriginInput& input);

// True when the streams of a rank hold any collective, so that what other ranks did to it was seen.
bool records_collectives(const StreamJoin& join);

}  // namespace forkpoint
