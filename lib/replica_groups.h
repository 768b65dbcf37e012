// Which ranks of a run hold the same tensors, and how that is known. A rank's place comes from what the program told
// (forkpoint_fact "dp_rank", "tp_rank", "pp_rank", ...), else from the names of communicators; else all ranks are taken
// to hold the same full tensors by name, as far as the values bear it out. Immutable once made. Internal.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "lib/run.h"

namespace forkpoint {

// Of one stream. Ranks of other stages are never compared: they hold other tensors under the same names. Ranks of a
// stage and one group are replicas. Those of a stage and other groups (tensor parallel) share what is not cut.
struct ReplicaPlace {
  int stage = 0;
  int group = 0;
  bool operator==(const ReplicaPlace&) const = default;
};

class ReplicaGroups {
 public:
  explicit ReplicaGroups(const Run& run);

  const std::vector<ReplicaPlace>& places() const { return places_; }  // as Run::streams()
  int stages() const { return stages_; }
  // Groups say who is a replica. Else the ranks of a stage may be anything, and values must show that they are
  // replicas.
  bool known() const { return known_; }
  // No sign of anything but data parallelism: no coordinates, no shards, no communicator of a part of the ranks, no
  // exchange other than all-reduce and broadcast.
  bool plain() const { return plain_; }
  bool has_shards() const { return has_shards_; }  // cut parameters are recorded as such
  // The gradient of this tensor of this layer is reduced over all these ranks (ascending).
  bool reduced_over(const std::string& layer, const std::string& parameter, const std::vector<int>& ranks) const;
  // "dp_rank, tp_rank": how it is known, for the evidence.
  const std::string& source() const { return source_; }
  std::string stage_note() const;  // which coordinates are never compared across; empty: there is one stage

 private:
  void place_by_coordinates(const Run& run);
  void place_by_communicator(const Run& run);
  void read_sites(const Run& run);

  std::vector<ReplicaPlace> places_;
  int stages_ = 1;
  bool known_ = false, plain_ = true, has_shards_ = false;
  std::string source_;
  std::set<std::string> stage_names_;
  std::map<std::pair<std::string, std::string>, std::set<std::vector<int>>> reduced_;  // by layer and tensor
};

// World ranks of a communicator as a stream names it, ascending; empty: not known.
std::vector<int> member_ranks(const Run& run, const HashStreamReader& stream, const std::string& communicator);

// By name: "experts.0.fc1" holds other weights on each expert-parallel rank, a norm's weight is on every
// tensor-parallel one.
bool names_expert(const Site& site);
bool names_norm(const Site& site);
// "weight" of "weight.exp_avg", "weight.grad" and "weight".
std::string parameter_of(const Site& site);

}  // namespace forkpoint
