// Looks for values that become non-finite in one rank's stream, while it is written. Internal to Watch; lib/watch.h has
// the rule.
#pragma once

#include <vector>

#include "lib/anomaly_rule.h"
#include "lib/hash_stream_tail.h"

namespace forkpoint {

struct NonfiniteHit {
  int64_t step = 0;
  uint32_t row = 0, site = 0, layout = 0;
  int32_t micro_step = 0;
  uint64_t nonfinite = 0;
  bool received = false;  // it may have come from another rank: a reduction lies before it
};

class NonfiniteWatch {
 public:
  // Rows [first, end) of the tail's step have come. What is certain before the step ends goes to *out.
  void rows(const StreamTail& tail, size_t step_index, size_t first, size_t end, std::vector<NonfiniteHit>* out);
  // The step has ended: was it one that a gradient scaler skips? clean: nothing in it was a hit.
  void step_end(const StreamTail& tail, size_t step_index, std::vector<NonfiniteHit>* out, bool* clean);
  // No row will follow, and the open step did not end.
  void stream_end(std::vector<NonfiniteHit>* out);

  uint64_t looked_at() const { return looked_at_; }  // records
  uint64_t skipped_steps() const { return skipped_steps_; }

 private:
  struct Known {
    ValueRole role;
    uint32_t finite_calls = 0;  // bit n: call n was finite once; the last bit stands for all further ones
  };
  void learn_sites(const StreamTail& tail);
  void look(const StreamTail& tail, size_t step_index, uint32_t row, std::vector<NonfiniteHit>* out);

  std::vector<Known> sites_;
  std::vector<NonfiniteHit> waiting_;  // may be a scaler's business
  bool any_ = false;                   // a hit in the open step that was passed on
  bool skipped_ = false;
  bool unexplained_ = false;  // non-finite, and no scaler explains it
  bool has_scaler_ = false;   // the job has one
  uint64_t looked_at_ = 0, skipped_steps_ = 0, skipped_in_a_row_ = 0;
};

}  // namespace forkpoint
