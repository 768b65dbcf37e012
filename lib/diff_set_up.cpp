#include "lib/diff_set_up.h"

#include <algorithm>
#include <unordered_map>

namespace forkpoint {
namespace {

bool is_ahead(const StepColumns& columns, size_t row) {
  return (columns.flags[row] & kRecordAhead) != 0 && (columns.flags[row] & kRecordEval) == 0;
}

// By joint site and micro-step.
using Counts = std::unordered_map<uint64_t, uint32_t>;

template <typename SiteOf>
uint64_t place(const StepColumns& columns, size_t row, const SiteOf& site_of) {
  return static_cast<uint64_t>(site_of(columns.site[row])) << 32 | static_cast<uint32_t>(columns.micro_step[row]);
}

template <typename SiteOf>
Counts count_ahead(const StepColumns& columns, const SiteOf& site_of) {
  Counts counts;
  for (size_t row = 0; row < columns.size(); ++row) {
    if (is_ahead(columns, row)) ++counts[place(columns, row, site_of)];
  }
  return counts;
}

template <typename SiteOf>
bool set_aside(const Counts& other, const SiteOf& site_of, StepColumns* columns) {
  Counts surplus = count_ahead(*columns, site_of);
  for (auto& [key, count] : surplus) {
    const auto found = other.find(key);
    count -= found == other.end() ? 0 : std::min(count, found->second);
  }
  bool any = false;
  for (size_t row = 0; row < columns->size(); ++row) {
    const auto found = surplus.find(place(*columns, row, site_of));
    if (found == surplus.end() || found->second == 0 || (columns->flags[row] & kClassFlags) != 0) continue;
    any = true;
    if (columns->call[row] >= found->second) columns->call[row] -= found->second;
    else columns->flags[row] |= kRecordSetUp;
  }
  return any;
}

}  // namespace

void read_pair(const StreamJoin& join, const RankPair& ranks, const StepPair& step, StepBuffers* buffers, char* which) {
  if (which) *which = 'A';
  ranks.a->read_step(step.a, &buffers->a);
  if (which) *which = 'B';
  ranks.b->read_step(step.b, &buffers->b);
  buffers->scratch.set_up = false;
  if (step.first_of == 0) return;
  const auto site_of_a = [](uint32_t site) { return site; };
  const auto site_of_b = [&](uint32_t site) { return join.site_of_b(site); };
  const Counts ahead_a = count_ahead(buffers->a, site_of_a), ahead_b = count_ahead(buffers->b, site_of_b);
  const bool any_a = set_aside(ahead_b, site_of_a, &buffers->a), any_b = set_aside(ahead_a, site_of_b, &buffers->b);
  buffers->scratch.set_up = any_a || any_b;
}

uint64_t set_up_records(const StepBuffers& buffers) {
  if (!buffers.scratch.set_up) return 0;
  const auto has_flag = [](uint8_t flags) { return (flags & kRecordSetUp) != 0; };
  return static_cast<uint64_t>(std::ranges::count_if(buffers.a.flags, has_flag) +
                               std::ranges::count_if(buffers.b.flags, has_flag));
}

}  // namespace forkpoint
