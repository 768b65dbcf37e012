#include "lib/watch_nonfinite.h"

#include <algorithm>
#include <cmath>

namespace forkpoint {
namespace {

// From 2^16 on, halved with each step that is skipped, a scale is below 2^-8 by then: it is not the scale.
constexpr uint64_t kMostSkippedInARow = 24;
constexpr uint32_t kLastCall = 31;

}  // namespace

void NonfiniteWatch::learn_sites(const StreamTail& tail) {
  const auto sites = tail.sites();
  for (size_t id = sites_.size(); id < sites.size(); ++id) {
    sites_.push_back({value_role(sites[id])});
    has_scaler_ |= sites_.back().role.skipped;
  }
}

void NonfiniteWatch::rows(const StreamTail& tail, size_t step_index, size_t first, size_t end,
                          std::vector<NonfiniteHit>* out) {
  learn_sites(tail);
  for (size_t row = first; row < end; ++row) look(tail, step_index, static_cast<uint32_t>(row), out);
}

void NonfiniteWatch::look(const StreamTail& tail, size_t step_index, uint32_t row, std::vector<NonfiniteHit>* out) {
  const StepColumns& columns = tail.columns(step_index);
  Known& known = sites_[columns.site[row]];
  const ValueRole& role = known.role;
  if (!role.looked_at || (columns.flags[row] & kRecordEval) != 0) return;
  const DType dtype = tail.layouts()[columns.layout[row]].dtype;
  uint64_t nonfinite = columns.nonfinite[row];
  if (role.number) {
    const double number = scalar_value(columns.digest[row]);
    nonfinite = std::isfinite(number) ? 0 : 1;
    skipped_ |= role.skipped && number != 0;
  } else if (!is_float(dtype)) {
    return;
  } else {
    skipped_ |= role.skipped && columns.absmax[row] != 0;
  }
  ++looked_at_;
  const uint32_t call = 1u << std::min(columns.call[row], kLastCall);
  if (nonfinite == 0) {
    known.finite_calls |= call;
    return;
  }
  // What was never finite is as it is meant to be, unless the training lives on it.
  const bool was_finite = (known.finite_calls & call) != 0;
  if (!role.sink && (!was_finite || role.mask)) return;
  const StepSummary& step = tail.steps()[step_index];
  const Phase phase = tail.sites()[columns.site[row]].phase;
  const NonfiniteHit hit{step.step,
                         row,
                         columns.site[row],
                         columns.layout[row],
                         columns.micro_step[row],
                         nonfinite,
                         role.collective_output || phase == Phase::optimizer};
  if (scaler_explains(role, dtype) && step.step != kPrologueStep) return waiting_.push_back(hit);
  unexplained_ = any_ = true;
  out->push_back(hit);
}

void NonfiniteWatch::step_end(const StreamTail&, size_t, std::vector<NonfiniteHit>* out, bool* clean) {
  const bool by_scaler = skipped_ && !unexplained_ && !waiting_.empty();
  skipped_in_a_row_ = by_scaler ? skipped_in_a_row_ + 1 : 0;
  skipped_steps_ += by_scaler ? 1 : 0;
  if (!by_scaler || skipped_in_a_row_ >= kMostSkippedInARow) {
    any_ |= !waiting_.empty();
    out->insert(out->end(), waiting_.begin(), waiting_.end());
  }
  *clean = !any_;
  waiting_.clear();
  any_ = skipped_ = unexplained_ = false;
}

void NonfiniteWatch::stream_end(std::vector<NonfiniteHit>* out) {
  if (!has_scaler_) out->insert(out->end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
}

}  // namespace forkpoint
