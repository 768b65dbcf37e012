#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "cli/report_data.h"
#include "cli/show.h"

namespace forkpoint {
namespace {

using Key = std::tuple<uint64_t, uint64_t, int32_t, uint32_t>;  // site, micro-step, call

// One run's records of one step.
struct Side {
  const HashStreamReader* stream = nullptr;
  StepColumns columns;

  const Site& site(size_t i) const { return stream->sites()[columns.site[i]]; }
  Key key(size_t i) const {
    const Digest& site_key = stream->site_keys()[columns.site[i]];
    return {site_key.a, site_key.b, columns.micro_step[i], columns.call[i]};
  }
  uint64_t layout_key(size_t i) const { return stream->layout_keys()[columns.layout[i]]; }
};

Side read_side(const Run& run, int rank, int64_t step) {
  Side side;
  side.stream = run.stream_of(rank);
  if (!side.stream) throw Error(fmt::format("{} has no rank {}.", run.directory(), rank));
  const auto steps = side.stream->steps();
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].step != step) continue;
    side.stream->read_step(i, &side.columns);
    return side;
  }
  throw Error(fmt::format("{}, rank {} has no step {}.", run.directory(), rank, step));
}

ForkRow::Side row_side(const Side& side, size_t i) {
  ForkRow::Side row;
  const Record record = side.columns.row(i);
  const Site& site = side.site(i);
  const bool is_scalar = site.kind == Kind::scalar;
  const bool is_tensor = !is_scalar && site.kind != Kind::state;
  row.form = is_tensor ? to_string(side.stream->layouts()[record.layout]) : std::string(name(site.kind));
  row.value = is_scalar ? fmt::format("{}", scalar_value(record.digest)) : hex(record.digest);
  if (is_tensor) row.absmax = fmt::format("{:.6g}", record.stats.absmax);
  row.nonfinite = is_tensor ? record.stats.nonfinite : 0;
  return row;
}

// All rows of the step: the first run's in its order, what only the second has after the record that it follows there.
class Alignment {
 public:
  Alignment(const Side& a, const Side& b) : a_(a), b_(b) {
    for (size_t i = 0; i < a.columns.size(); ++i) place_in_a_.emplace(a.key(i), i);
    partner_.assign(a.columns.size(), kNone);
    size_t anchor = kNone;
    for (size_t j = 0; j < b.columns.size(); ++j) {
      const auto found = place_in_a_.find(b.key(j));
      if (found == place_in_a_.end()) {
        only_b_[anchor].push_back(j);
      } else {
        partner_[found->second] = j;
        anchor = found->second;
      }
    }
  }

  std::vector<std::pair<size_t, size_t>> pairs() const {
    std::vector<std::pair<size_t, size_t>> result;
    append_only_b(kNone, &result);
    for (size_t i = 0; i < partner_.size(); ++i) {
      result.emplace_back(i, partner_[i]);
      append_only_b(i, &result);
    }
    return result;
  }

  ForkRow row(size_t i, size_t j) const {
    ForkRow row;
    const Side& side = i != kNone ? a_ : b_;
    const size_t index = i != kNone ? i : j;
    row.site = &side.site(index);
    row.micro_step = side.columns.micro_step[index];
    row.call = side.columns.call[index];
    if (i != kNone) row.first = row_side(a_, i);
    if (j != kNone) row.second = row_side(b_, j);
    row.state = state(i, j);
    return row;
  }

  ForkRow::State state(size_t i, size_t j) const {
    if (j == kNone) return ForkRow::State::only_first;
    if (i == kNone) return ForkRow::State::only_second;
    const bool equal = a_.columns.digest[i] == b_.columns.digest[j] && a_.layout_key(i) == b_.layout_key(j);
    return equal ? ForkRow::State::equal : ForkRow::State::differs;
  }

  const Site& site(size_t i, size_t j) const { return i != kNone ? a_.site(i) : b_.site(j); }
  int32_t micro_step(size_t i, size_t j) const {
    return i != kNone ? a_.columns.micro_step[i] : b_.columns.micro_step[j];
  }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  void append_only_b(size_t anchor, std::vector<std::pair<size_t, size_t>>* result) const {
    const auto found = only_b_.find(anchor);
    if (found == only_b_.end()) return;
    for (const size_t j : found->second) result->emplace_back(kNone, j);
  }

  const Side& a_;
  const Side& b_;
  std::map<Key, size_t> place_in_a_;
  std::vector<size_t> partner_;
  std::map<size_t, std::vector<size_t>> only_b_;
};

bool is_about(const Divergence& first, const Site& site, int32_t micro_step) {
  return (!first.phase || site.phase == *first.phase) && site.layer == first.layer && site.op == first.op &&
         (first.tensor.empty() || site.tensor == first.tensor) && micro_step == first.micro_step;
}

// The record that the verdict names, else the first that differs.
size_t fork_index(const Alignment& alignment, const std::vector<std::pair<size_t, size_t>>& pairs,
                  const Divergence& first) {
  size_t any = pairs.size();
  for (size_t k = 0; k < pairs.size(); ++k) {
    const auto [i, j] = pairs[k];
    if (alignment.state(i, j) == ForkRow::State::equal) continue;
    if (is_about(first, alignment.site(i, j), alignment.micro_step(i, j))) return k;
    any = std::min(any, k);
  }
  return any;
}

int rank_to_show(const Verdict& verdict) {
  if (verdict.first->rank >= 0) return verdict.first->rank;
  return verdict.ranks_diverged.empty() ? 0 : verdict.ranks_diverged.front();
}

}  // namespace

ForkRecords records_around_fork(const Run& a, const Run& b, const Verdict& verdict, size_t window) {
  ForkRecords result;
  result.rank = rank_to_show(verdict);
  result.step = verdict.first->in_prologue ? kPrologueStep : verdict.first->step;
  try {
    const Side side_a = read_side(a, result.rank, result.step), side_b = read_side(b, result.rank, result.step);
    const Alignment alignment(side_a, side_b);
    const auto pairs = alignment.pairs();
    const size_t fork = fork_index(alignment, pairs, *verdict.first);
    const size_t begin = fork > window ? fork - window : 0;
    const size_t end = std::min(pairs.size(), fork + window + 1);
    for (size_t k = begin; k < end; ++k) {
      result.rows.push_back(alignment.row(pairs[k].first, pairs[k].second));
      result.rows.back().is_fork = k == fork;
    }
    result.rows_before = begin;
    result.rows_after = pairs.size() - end;
  } catch (const Error& error) {
    result.problem = error.what();
  }
  return result;
}

}  // namespace forkpoint
