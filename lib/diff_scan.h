// Reads what the digest trees say is not equal, and counts. Internal to diff.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lib/align.h"
#include "lib/diff_relaid.h"
#include "lib/diff_set_up.h"

namespace forkpoint {

// The joins of all rank pairs, each made when it is first asked for. Thread-safe.
class Joins {
 public:
  Joins(const std::vector<RankPair>& pairs, Level level) : pairs_(pairs), level_(level), slots_(pairs.size()) {}
  const StreamJoin& of(size_t pair);

 private:
  struct Slot {
    std::once_flag once;
    std::unique_ptr<StreamJoin> join;
  };
  const std::vector<RankPair>& pairs_;
  const Level level_;
  std::vector<Slot> slots_;
};

struct StepCounts {
  uint64_t matched = 0;          // records compared
  uint64_t differing = 0;        // of training
  uint64_t differing_eval = 0;
  uint64_t resharded = 0;        // to be put together first; not in `matched`
  SetUpRecords set_up;           // of one run, and compared with nothing
  bool unread = false;           // a frame of it is damaged
};

// A site that only one run has, over a rank's steps that are whole in both; or that has another form in each, of the
// same bytes (relabelled) or of a collective's message (regrouped).
struct OneSided {
  enum Side : uint8_t { only_a, only_b, relabelled, regrouped };
  size_t pair = 0;
  uint32_t site = 0;             // joint id
  Side side = only_a;
  bool eval = false;
  bool has_forms() const { return side == relabelled || side == regrouped; }
  uint32_t layout_a = 0, layout_b = 0;  // of the last one, where it has forms
  int64_t first_step = 0;
  uint32_t first_row = 0;
  int32_t micro_step = 0;
  uint64_t records = 0;
};

// All-reduces of one step of a rank that the runs lay out differently: of one op instance and dtype.
struct RelaidCalls {
  size_t pair = 0;
  uint32_t site = 0;               // joint id
  int64_t step = 0;
  uint64_t elements = 0;
  std::vector<uint32_t> layouts_a, layouts_b;  // of the messages, ids in their own streams
  bool inputs_same = true, outputs_same = true;  // by their sums
  bool outputs_seen = false;
  bool witnessed = false;          // as many elements of gradients behind them agree bit by bit
};

class MapBuilder;  // lib/diff_map.h

struct Scan {
  std::vector<std::vector<StepCounts>> steps;  // as Alignment::ranks[].steps
  std::vector<OneSided> one_sided;
  std::vector<RelaidCalls> relaid;             // by step, then rank
  std::vector<std::string> gaps;               // damage found while reading
  std::vector<int64_t> gap_steps;
};

// map may be null.
Scan scan_runs(const Alignment& alignment, const DiffOptions& options, Joins* joins, MapBuilder* map);

}  // namespace forkpoint
