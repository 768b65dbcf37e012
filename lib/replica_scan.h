// Reads a run once and holds its ranks against each other, step by step. What may differ is decided later, by what the
// whole run shows (lib/replica_judge.h). Internal to diff_replicas.
#pragma once

#include <map>
#include <tuple>

#include "lib/diff.h"
#include "lib/recompute.h"
#include "lib/replica_groups.h"

namespace forkpoint {

struct ReplicaPiece {
  size_t stream = 0;
  int rank = 0;
  uint32_t row = 0, layout = 0;
  int32_t micro_step = 0;
  uint32_t call = 0;
  Digest digest;
  TensorStats stats;
};

// The sites that are held against each other, over all ranks: equal sites have one number.
struct ReplicaSites {
  struct Entry {
    const Site* site = nullptr;
    Digest key;
    bool collective = false;  // an output that is the same on every member
    uint32_t name = 0;        // of its layer and tensor, whatever the phase
    uint32_t parameter = 0;   // of the parameter that it belongs to; its own for a parameter
  };
  std::vector<Entry> entries;
  std::vector<std::vector<uint32_t>> of_stream;        // by site id; kNoRow: not compared
  std::vector<std::vector<std::vector<int>>> members;  // by entry (collectives only) and stream: ranks
  uint32_t names = 0;
  bool masked = false;  // names say nothing, and no parameter is known to belong to its gradient or state
};
ReplicaSites replica_sites(const Run& run);

// Why these pieces were held against each other.
enum class Compared : uint8_t { group, stage, box, collective };

// The earliest disagreement of one site among some ranks.
struct Disagreement {
  uint32_t entry = 0;
  Compared how = Compared::group;
  int place = 0;    // group or stage
  size_t step = 0;  // index into ReplicaScan::steps
  bool forms_differ = false;
  std::vector<ReplicaPiece> pieces;
  uint64_t records = 0;       // in how many steps and calls they disagree, from `step` on
  std::vector<int> outliers;  // over all of those, ascending
};

struct ReplicaScan {
  std::vector<RunStep> steps;
  std::vector<Disagreement> disagreements;  // by step
  // Earliest step (index) in which a name was recorded, equal and not zero, on at least two ranks of the place;
  // kNoStep: never.
  std::vector<size_t> equal_in_group, equal_in_stage;  // name * places + place
  std::vector<uint8_t> equal_when_loaded;              // name * stages + stage
  std::vector<uint8_t> group_agrees;                   // something ever did
  std::vector<uint32_t> names_equal;                   // by step: of parameters and state, on all ranks
  std::vector<uint32_t> names_seen;
  size_t groups = 1, stages = 1;
  uint64_t compared = 0, bytes = 0, whole_steps = 0;
  RecomputeCheck recompute;
  std::vector<std::string> damage;
};
ReplicaScan scan_replicas(const Run& run, const ReplicaGroups& groups, const ReplicaSites& sites,
                          const StepWindow& window, const DiffOptions& options);

// The ranks that are not of the largest class of equal values; all of them where there is no largest one.
std::vector<int> outliers_of(const std::vector<ReplicaPiece>& pieces, bool* majority = nullptr);

}  // namespace forkpoint
