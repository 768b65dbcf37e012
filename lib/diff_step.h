// What differs in one step of one rank, and what of it may be an origin as far as this rank alone can tell. Internal to
// diff.
#pragma once

#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "lib/diff_relaid.h"

namespace forkpoint {

// A matched pair of records that differ. site is a joint id (StreamJoin); rows are places in the order of arrival.
struct Difference {
  uint32_t row_a = 0, row_b = 0;
  uint32_t site = 0;
  int32_t micro_step = 0;
  uint32_t call = 0;
  uint8_t flags = 0;
  Same same = Same::value;
  uint32_t layout_a = 0, layout_b = 0;  // ids in their own streams
  Digest digest_a, digest_b;
  TensorStats stats_a, stats_b;
};

// One collective as this rank took part in it. All of a family that is laid out anew (lib/diff_relaid.h) are one, of call 0.
struct CollectiveUse {
  uint64_t op = 0;
  int32_t micro_step = 0;
  uint32_t call = 0;
  uint32_t site = 0;          // joint id of one of its records
  uint32_t first_row = 0;
  bool has_input = false, input_differs = false;
  bool has_output = false, output_differs = false;
  bool one_sided = false;     // a record of it is in one run only
  struct Part {
    uint32_t site = 0;
    bool differs = false;
    Digest a, b;
  };
  std::vector<Part> inputs, outputs;  // matched ones
  bool same_instance(const CollectiveUse& other) const {
    return op == other.op && micro_step == other.micro_step && call == other.call;
  }
};

struct RankStep {
  std::optional<Difference> first;       // earliest difference in training, in causal order; evaluation never counts
  std::optional<Difference> first_eval;
  std::optional<Difference> permuted;  // skipped before `first`: same words in another order, and what follows is equal
  std::vector<Difference> later;         // further ops whose recorded inputs all agree, where that is certain
  std::vector<Difference> sources;       // batches, generators, hyperparameters that differ besides `first`
  std::vector<CollectiveUse> collectives;
};

// Resharded records of a step that differ when put together.
using RecordKey = std::tuple<uint64_t, uint64_t, int32_t, uint32_t>;  // site key (a, b), micro-step, call
using RecordKeys = std::set<RecordKey>;

RankStep analyse_step(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                      const RecordKeys& differing_when_assembled, MatchScratch* scratch);

// Records of the op instance that a difference belongs to, other than itself.
struct OpInputs {
  std::vector<std::string> agree, differ, one_sided;  // tensor names
  uint64_t nonfinite_b = 0;                           // over the inputs in run B
  bool passed_on_a = false, passed_on_b = false;      // what differs is, in that run, an input that agrees
};
OpInputs inputs_of(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                   const Difference& difference, MatchScratch* scratch);

bool is_op_input(const Site& site);   // what the op reads
bool is_op_output(const Site& site);  // what it writes
bool is_hyperparameter(const Site& site);
bool contains_layer(const std::string& outer, const std::string& inner);  // "blocks.3": "blocks.3.mlp"; "": all others
// One of the two is the other or contains it: "blocks.3.mlp" and "blocks.3.mlp.fc1".
bool related_layers(const std::string& left, const std::string& right);

}  // namespace forkpoint
