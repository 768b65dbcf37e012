// From what is known about the first divergence to its cause class. A wrong class is worse than a set of two: where the
// evidence does not decide, the class is the broad one and the candidates say what remains.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lib/align.h"
#include "lib/pointing.h"
#include "lib/record.h"
#include "lib/verdict.h"

namespace forkpoint {

// Plain values, gathered from the runs by lib/cause_facts.h.
struct CauseFacts {
  // The record that differs.
  Divergence first;
  Site site;
  uint8_t flags = 0;
  Layout layout_a, layout_b;
  bool layout_differs = false;
  bool relaid = false;             // messages of a collective, laid out in another way in each run
  Digest digest_a, digest_b;
  TensorStats stats_a, stats_b;
  Level level = Level::layer;
  int world_size = 1;
  bool everyone = false;           // all ranks (or all members) alike
  bool first_compared_step = false;
  int64_t steps_since_begin = 0;   // from the step at which the later run began
  bool start_unseen = false;       // nothing before this step was compared (no initial state, or --steps begins here)
  std::string unseen_steps;        // "steps 11-19": not recorded between the last compared one and this
  bool other_world = false;        // put together from shards of another number of ranks
  bool structure_only = false;     // nothing but records on one side only
  bool permutation_only = false;   // same words in another order and nothing followed from it
  std::vector<int> agreeing_ranks; // that have this record, and equal
  std::vector<int> alike_ranks;    // besides first.rank, that begin to differ at the same record

  // Its op instance.
  std::vector<std::string> inputs_agree, inputs_differ, inputs_one_sided;
  uint64_t inputs_nonfinite_b = 0;
  bool passed_on_a = false, passed_on_b = false;  // the output is, in that run, an input that agrees
  std::string last_seen;           // where the value of an input, or a gradient, was last recorded, and agreed
  bool step_inputs_agree = false;  // batch and parameters of this step were recorded and agree
  bool gradients_recorded = false; // and agree, on this rank in this step
  bool rests = false;              // a parameter or buffer at a step's end of a layer without a gradient in that step
  bool rng_agrees = false;         // generator state of this step was recorded before and agrees

  // A collective's output.
  bool collective_output = false, collective_judged = true, alike = false, keeps_own_input = false;
  bool outputs_agree_a = false, outputs_disagree_b = false;
  bool inputs_relaid = false;  // a member's messages are laid out anew: their elements agree together, not each
  std::vector<int> members, unknown_members;

  // Replicas: ranks that hold this tensor, equal in run A and not in run B.
  int replicas = 0;
  int replica_values_b = 0;        // distinct values in run B; 0: not replicas in A

  // History.
  std::optional<Digest> value_before;  // of this record in the step before, where the runs agree and it is not zero
  bool stale_b = false;            // B's value is that of the step before, though A's has moved on
  bool stale_a = false;            // the same, the runs exchanged
  std::string equals_other;        // a record that agrees in both runs and whose value this one holds in run B
  std::string batch_found;         // where B's batch occurs in A
  bool batch_searched = false;
  std::string equals_rank;         // "rank 0": run B holds what run A has there
  bool recompute_parts = false;    // B's recomputation is not what its own forward gave, A's is
  std::vector<std::string> also_differ;  // sources that differ in this step besides

  Loaded loaded = Loaded::no;
  bool rng_agreed_at_load = false;
  std::vector<std::string> environment;  // differences of the numeric environment
  std::vector<std::string> structure;    // sentences
  std::string structure_before;          // what only one run records right before it, in this step; empty: nothing
  bool collective_in_one_run = false;    // a collective of this layer was called in one run only
  bool collectives_recorded = false;
  bool messages_differ = false;          // collectives of other sizes, or in one run only, up to this step
  std::string run_b;                     // folder
  std::string command;                   // of run B, quoted for a shell
  std::optional<Pointing> pointing;
  bool pointing_skipped = false;
};

Cause decide_cause(const CauseFacts& facts);

}  // namespace forkpoint
