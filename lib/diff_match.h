// Matches the records of one step of one rank in two runs by (site, micro-step, call). Internal to diff.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

inline constexpr uint32_t kNoRow = 0xFFFFFFFFu;
inline constexpr uint8_t kClassFlags = kRecordEval | kRecordRecompute;  // records are matched within their class
inline constexpr uint8_t kRecordSetUp = 0x80;  // in memory only: the row is matched with nothing (lib/diff_set_up.h)

// The sites and layouts of two streams in one numbering ("joint"): A's ids are kept, what only B has follows.
// REQUIRES: the streams outlive it. Immutable, so any thread may use it.
class StreamJoin {
 public:
  StreamJoin(const HashStreamReader& a, const HashStreamReader& b, Level level);

  const HashStreamReader& a() const { return a_; }
  const HashStreamReader& b() const { return b_; }
  size_t size() const { return keys_.size(); }
  uint32_t site_of_b(uint32_t id) const { return site_of_b_[id]; }
  const Site& site(uint32_t joint) const;
  const Digest& key(uint32_t joint) const { return keys_[joint]; }
  uint64_t op(uint32_t joint) const { return ops_[joint]; }       // op_key
  // By key, not by id: layouts that differ only in their strides have an id each.
  bool same_layout(uint32_t layout_a, uint32_t layout_b) const { return layout_keys_a_[layout_a] == layout_keys_b_[layout_b]; }
  // False for records finer than the level at which the runs are compared.
  bool wanted(uint32_t joint) const { return wanted_[joint] != 0; }
  bool all_wanted() const { return all_wanted_; }
  // One stream is at level step and the other is not, and they do not have the same collectives: at level step only the
  // outermost layer is known that one is called in. None is wanted then.
  bool collectives_apart() const { return collectives_apart_; }
  // Some records of gradients in backward passes are left out, as only the finer of the streams is recorded in a way
  // that has them.
  bool gradients_left_out() const { return gradients_left_out_; }

 private:
  bool find_collectives_apart() const;
  bool is_apart(uint32_t joint) const;

  const HashStreamReader& a_;
  const HashStreamReader& b_;
  std::vector<uint32_t> site_of_b_, only_b_;
  std::span<const uint64_t> layout_keys_a_, layout_keys_b_;
  std::vector<Digest> keys_;
  std::vector<uint64_t> ops_;
  std::vector<uint8_t> wanted_;
  bool all_wanted_ = true, collectives_apart_ = false;
  // One stream is at level step and has no gradient of a backward pass: what records a job from outside takes those at
  // the optimizer's step then, and from level layer on as they accumulate as well.
  bool gradients_apart_ = false, gradients_left_out_ = false;
};

bool is_at_level(const Site& site, Level level);  // recorded at this level, or at a coarser one

// Buffers reused between steps; one a thread.
struct MatchScratch {
  std::vector<uint32_t> rows_a, rows_b;  // rows that count, when some do not
  std::vector<uint32_t> ordinal_a, ordinal_b, table, partner;
  std::vector<uint8_t> taken;
  bool set_up = false;  // some rows are out of it (lib/diff_set_up.h)
};

// For reading and matching a step of two runs; one a thread.
struct StepBuffers {
  StepColumns a, b;
  MatchScratch scratch;
  uint64_t unsure_ahead = 0;  // see lib/diff_set_up.h
  uint32_t unsure_site = 0;
};

// After the streams part at position `from` of rows_a/rows_b (or of the rows themselves where those are empty): fills
// scratch.partner (B's row of each of A's rows from there on, or kNoRow) and scratch.taken (for B's). In whole steps
// with recomputations, records of a class are counted in order of arrival, because an extra recomputation shifts
// `call`. In steps that lost records, a loss may have shifted `call`: sites that do not come equally often are left
// unmatched.
void match_rest(const StreamJoin& join, const StepColumns& a, const StepColumns& b, size_t from, bool complete,
                MatchScratch* scratch);
// Fills scratch.rows_a and rows_b.
void select_rows(const StreamJoin& join, const StepColumns& a, const StepColumns& b, MatchScratch* scratch);

// Calls on_match(row_a, row_b) and on_only_a(row_a) in A's order of arrival, then on_only_b(row_b) in B's.
// Two runs that did the same thing mostly arrive in the same order: they are walked in step, and hashed where they
// part.
template <typename OnMatch, typename OnOnlyA, typename OnOnlyB>
void match_step(const StreamJoin& join, const StepColumns& a, const StepColumns& b, bool complete,
                MatchScratch* scratch, OnMatch&& on_match, OnOnlyA&& on_only_a, OnOnlyB&& on_only_b) {
  const bool selected = !join.all_wanted() || scratch->set_up;
  if (selected) select_rows(join, a, b, scratch);
  const size_t count_a = selected ? scratch->rows_a.size() : a.size();
  const size_t count_b = selected ? scratch->rows_b.size() : b.size();
  const auto row_a = [&](size_t i) { return selected ? scratch->rows_a[i] : static_cast<uint32_t>(i); };
  const auto row_b = [&](size_t i) { return selected ? scratch->rows_b[i] : static_cast<uint32_t>(i); };

  size_t at = 0;
  const size_t in_step = complete ? std::min(count_a, count_b) : 0;
  for (; at < in_step; ++at) {
    const uint32_t i = row_a(at), j = row_b(at);
    if (a.site[i] != join.site_of_b(b.site[j]) || a.micro_step[i] != b.micro_step[j] || a.call[i] != b.call[j] ||
        ((a.flags[i] ^ b.flags[j]) & kClassFlags) != 0) {
      break;
    }
    on_match(i, j);
  }
  if (at == count_a && at == count_b) return;

  match_rest(join, a, b, at, complete, scratch);
  for (size_t i = at; i < count_a; ++i) {
    const uint32_t partner = scratch->partner[i - at];
    if (partner == kNoRow) on_only_a(row_a(i));
    else on_match(row_a(i), partner);
  }
  for (size_t j = at; j < count_b; ++j) {
    if (scratch->taken[j - at] == 0) on_only_b(row_b(j));
  }
}

// What a pair of matched records amounts to.
enum class Same : uint8_t {
  equal,
  relabelled,  // the same bytes under another shape: no value difference
  regrouped,   // a collective's message of another size: other messages carry the rest
  resharded,   // shards of one tensor, cut differently: to be put together before they can be compared
  layout,      // another dtype, shape or size: cannot be equal
  value,
  other_elements,  // messages of a collective that are laid out anew (lib/diff_relaid.h) and hold other values together
};
// site: joint id.
Same compare_records(const StreamJoin& join, uint32_t site, uint32_t layout_a, uint32_t layout_b, const Digest& a,
                     const Digest& b);

inline bool is_difference(Same same) {
  return same == Same::layout || same == Same::value || same == Same::other_elements;
}

}  // namespace forkpoint
