#include "lib/diff_set_up.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "lib/anomaly_rule.h"
#include "lib/diff_collective.h"

namespace forkpoint {
namespace {

bool is_ahead(const StepColumns& columns, size_t row) {
  return (columns.flags[row] & kRecordAhead) != 0 && (columns.flags[row] & kRecordEval) == 0;
}

// In the numbering of `join`, of one side.
struct Side {
  const StreamJoin* join;
  const HashStreamReader* stream;
  StepColumns* columns;
  bool in_b;
  uint32_t site(size_t row) const { return in_b ? join->site_of_b(columns->site[row]) : columns->site[row]; }
};

using SitePlace = std::pair<uint32_t, int32_t>;                // joint site, micro-step
using RowsAhead = std::map<SitePlace, std::vector<uint32_t>>;  // by call

RowsAhead rows_ahead(const Side& side) {
  RowsAhead rows;
  const StepColumns& columns = *side.columns;
  for (uint32_t row = 0; row < columns.size(); ++row) {
    if (is_ahead(columns, row)) rows[{side.site(row), columns.micro_step[row]}].push_back(row);
  }
  for (auto& [place, list] : rows) {
    std::ranges::stable_sort(list, {}, [&](uint32_t row) { return columns.call[row]; });
  }
  return rows;
}

// How many of the last calls of a site are the same, bit by bit.
size_t same_last(const Side& a, const std::vector<uint32_t>& rows_a, const Side& b,
                 const std::vector<uint32_t>& rows_b) {
  const size_t most = std::min(rows_a.size(), rows_b.size());
  size_t same = 0;
  for (; same < most; ++same) {
    const uint32_t i = rows_a[rows_a.size() - 1 - same], j = rows_b[rows_b.size() - 1 - same];
    if (!a.join->same_layout(a.columns->layout[i], b.columns->layout[j])) break;
    if (!(a.columns->digest[i] == b.columns->digest[j])) break;
  }
  return same;
}

// Takes the first calls of each site out; what is behind them is counted from there.
bool set_aside(const Side& side, const std::map<SitePlace, uint32_t>& first_calls) {
  StepColumns& columns = *side.columns;
  for (size_t row = 0; row < columns.size(); ++row) {
    const auto found = first_calls.find({side.site(row), columns.micro_step[row]});
    if (found == first_calls.end() || (columns.flags[row] & kClassFlags) != 0) continue;
    if (columns.call[row] >= found->second)
      columns.call[row] -= found->second;
    else
      columns.flags[row] |= kRecordSetUp;
  }
  return !first_calls.empty();
}

// Calls of an op are the same where all of their parts are: so many of the last ones, for each op and micro-step.
using OpPlace = std::pair<uint64_t, int32_t>;
std::map<OpPlace, size_t> same_calls(const Side& a, const RowsAhead& ahead_a, const Side& b, const RowsAhead& ahead_b) {
  std::map<OpPlace, size_t> same;
  for (const auto& [place, rows] : ahead_a) {
    const auto in_b = ahead_b.find(place);
    const size_t here = in_b == ahead_b.end() ? 0 : same_last(a, rows, b, in_b->second);
    const auto [known, fresh] = same.try_emplace({a.join->op(place.first), place.second}, here);
    if (!fresh) known->second = std::min(known->second, here);
  }
  return same;
}

void set_aside_ahead(const Side& a, const Side& b, StepBuffers* buffers) {
  const RowsAhead ahead_a = rows_ahead(a), ahead_b = rows_ahead(b);
  const auto same = same_calls(a, ahead_a, b, ahead_b);
  const auto kept = [&](const SitePlace& place) {
    const auto found = same.find({a.join->op(place.first), place.second});
    return found == same.end() ? size_t{0} : found->second;
  };
  std::map<SitePlace, uint32_t> first_a, first_b;
  const auto take = [&](const RowsAhead& ahead, std::map<SitePlace, uint32_t>* first) {
    for (const auto& [place, rows] : ahead) {
      if (rows.size() > kept(place)) (*first)[place] = static_cast<uint32_t>(rows.size() - kept(place));
    }
  };
  take(ahead_a, &first_a), take(ahead_b, &first_b);
  for (const auto& [place, count] : first_a) {
    const auto in_b = first_b.find(place);
    if (in_b == first_b.end() || a.join->site(place.first).kind != Kind::collective) continue;
    if (buffers->unsure_ahead == 0) buffers->unsure_site = place.first;
    buffers->unsure_ahead += std::min(count, in_b->second);
  }
  const bool any_a = set_aside(a, first_a), any_b = set_aside(b, first_b);
  buffers->scratch.set_up = any_a || any_b;
}

// All-reduces of the step itself, by op and micro-step.
struct AllReduces {
  std::map<uint32_t, bool> whole_numbers;  // call of int32 -> what went in was recorded, and is nothing but 0 and 1
  uint32_t last_float = 0;
};
using AllReduceFamily = std::pair<uint64_t, int32_t>;
using AllReduceMap = std::map<AllReduceFamily, AllReduces>;

AllReduceFamily family_of(const Side& side, size_t row) {
  return {side.join->op(side.site(row)), side.columns->micro_step[row]};
}

// Not yet out of it, and of the step's own training.
bool counts(const StepColumns& columns, size_t row) {
  return (columns.flags[row] & (kClassFlags | kRecordAhead | kRecordSetUp)) == 0;
}

AllReduceMap all_reduces(const Side& side) {
  AllReduceMap found;
  for (size_t row = 0; row < side.columns->size(); ++row) {
    const Site& site = side.join->site(side.site(row));
    const bool message = site.kind == Kind::collective && (site.role == Role::input || site.role == Role::output);
    if (!message || !counts(*side.columns, row) || !is_all_reduce(site.op)) continue;
    const DType dtype = side.stream->layouts()[side.columns->layout[row]].dtype;
    AllReduces& all = found[family_of(side, row)];
    const uint32_t call = side.columns->call[row];
    if (is_float(dtype)) all.last_float = std::max(all.last_float, call);
    if (dtype != DType::i32) continue;
    const auto [known, fresh] = all.whole_numbers.try_emplace(call, false);
    // Inputs come before outputs; of one call there is one on each rank, or several parts.
    if (site.role == Role::input) known->second = (fresh || known->second) && side.columns->absmax[row] <= 1;
  }
  return found;
}

// Takes the maps of used parameters out of `side`, a run that begins in this step, where `other` goes on.
bool set_aside_used_maps(const Side& side, const Side& other) {
  const AllReduceMap ours = all_reduces(side), theirs = all_reduces(other);
  std::map<AllReduceFamily, std::set<uint32_t>> maps;
  for (const auto& [family, all] : ours) {
    const auto found = theirs.find(family);
    if (found == theirs.end() || !found->second.whole_numbers.empty()) continue;
    for (const auto& [call, binary] : all.whole_numbers) {
      if (binary && call < all.last_float) maps[family].insert(call);
    }
  }
  if (maps.empty()) return false;
  for (size_t row = 0; row < side.columns->size(); ++row) {
    if (!counts(*side.columns, row)) continue;
    const auto found = maps.find(family_of(side, row));
    if (found == maps.end()) continue;
    uint32_t& call = side.columns->call[row];
    const auto behind = found->second.lower_bound(call);
    if (behind != found->second.end() && *behind == call)
      side.columns->flags[row] |= kRecordSetUp;
    else
      call -= static_cast<uint32_t>(std::distance(found->second.begin(), behind));
  }
  return true;
}

}  // namespace

void read_pair(const StreamJoin& join, const RankPair& ranks, const StepPair& step, StepBuffers* buffers, char* which) {
  if (which) *which = 'A';
  ranks.a->read_step(step.a, &buffers->a);
  if (which) *which = 'B';
  ranks.b->read_step(step.b, &buffers->b);
  buffers->scratch.set_up = false;
  buffers->unsure_ahead = 0;
  if (step.first_of == 0) return;
  const Side a{&join, ranks.a, &buffers->a, false}, b{&join, ranks.b, &buffers->b, true};
  set_aside_ahead(a, b, buffers);
  if (step.first_of == 'A' ? set_aside_used_maps(a, b) : set_aside_used_maps(b, a)) buffers->scratch.set_up = true;
}

SetUpRecords set_up_records(const StepBuffers& buffers) {
  SetUpRecords out;
  if (!buffers.scratch.set_up) return out;
  out.unsure = buffers.unsure_ahead, out.unsure_site = buffers.unsure_site;
  for (const StepColumns* columns : {&buffers.a, &buffers.b}) {
    for (const uint8_t flags : columns->flags) {
      if ((flags & kRecordSetUp) != 0) ++((flags & kRecordAhead) != 0 ? out.ahead : out.used_map);
    }
  }
  return out;
}

}  // namespace forkpoint
