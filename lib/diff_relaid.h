// All-reduces that one run cuts into other messages than the other: DistributedDataParallel lays its buckets out anew after
// a process's first step, in the order in which gradients came, so that a run resumed right at a checkpoint sends the same
// gradients in other messages than the straight one. Internal to diff.
//
// Such messages cannot be compared bit by bit. What is compared is what does not depend on the order of elements: over all
// of them together, of one communicator, micro-step, side and dtype, how many elements there are, the sum of their words
// (of 16-bit elements modulo 2^16 - 1 and of 8-bit ones modulo 2^8 - 1, since a word holds several and pairs others in
// another layout), how many are not finite, and the largest magnitude. It forgives the layout, never a value: equal sums
// are no proof, so the gradients behind them must have been compared bit by bit as well (witnessed_elements).
//
// Only for floating-point all-reduces: those leave every element on every member. The shards that a reduce-scatter leaves
// depend on the layout, and whole numbers are counts and flags. Padding is not known from elements: messages that hold
// other numbers of elements in total stay a difference in structure.
#pragma once

#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/align.h"
#include "lib/diff_match.h"

namespace forkpoint {

// Rows of one step that do not agree as matched call by call. a or b is kNoRow where only the other run has it.
struct Unequal {
  uint32_t a = kNoRow, b = kNoRow;
  Same same = Same::value;
};

// What is independent of the order of elements, over several messages.
struct ElementSums {
  uint64_t elements = 0;
  Digest digest;      // the messages' own, added up: equal only where the layout is
  TensorStats stats;  // word_sum reduced as the dtype asks for
  bool same_elements(const ElementSums& other) const {
    return elements == other.elements && stats.word_sum == other.stats.word_sum &&
           stats.nonfinite == other.stats.nonfinite && stats.absmax == other.stats.absmax;
  }
};

struct RelaidSide {  // what went in, or what came out
  std::vector<uint32_t> rows_a, rows_b;  // none: not recorded, or equal call by call
  ElementSums sums_a, sums_b;
  bool used() const { return !rows_a.empty(); }
  bool same() const { return sums_a.same_elements(sums_b); }
};

// Calls of an op instance are told by their number; those laid out anew are one instance (number 0).
using RelaidFamily = std::tuple<uint64_t, int32_t, uint8_t>;  // op_key, micro-step, class

struct RelaidGroup {  // of one family, one place in the communicator and one dtype
  RelaidFamily family;
  RelaidSide input, output;
};

struct Relaid {
  std::vector<RelaidGroup> groups;
  std::set<RelaidFamily> families;                   // of groups
};

// Takes out of `unequal` what is explained by another layout; what is left keeps its order. Where the two runs cut
// messages of the same sizes, they are only taken to be laid out anew in the first two steps of a run that begins where
// the other goes on (of a static graph, the reducer takes the order of its gradients in the second).
Relaid find_relaid(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                   std::vector<Unequal>* unequal);

// Elements of gradients that the optimizer's update of this step has in both runs, bit by bit the same. Weights that agree
// prove nothing of gradients that no optimizer has used.
uint64_t witnessed_elements(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                            MatchScratch* scratch);

// match_step, with collectives that are laid out anew matched as what they are. Calls on_equal(row_a, row_b), mostly in A's
// order of arrival; what is left stands in `unequal`, by A's rows, then by B's.
template <typename OnEqual>
Relaid match_relaid(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                    MatchScratch* scratch, std::vector<Unequal>* unequal, OnEqual&& on_equal) {
  unequal->clear();
  match_step(
      join, a, b, step.complete, scratch,
      [&](uint32_t i, uint32_t j) {
        if (join.same_layout(a.layout[i], b.layout[j]) && a.digest[i] == b.digest[j]) return on_equal(i, j);
        unequal->push_back({i, j, compare_records(join, a.site[i], a.layout[i], b.layout[j], a.digest[i], b.digest[j])});
      },
      [&](uint32_t i) { unequal->push_back({i, kNoRow}); }, [&](uint32_t j) { unequal->push_back({kNoRow, j}); });
  if (!step.complete || unequal->empty()) return {};
  return find_relaid(join, a, b, step, unequal);
}

}  // namespace forkpoint
