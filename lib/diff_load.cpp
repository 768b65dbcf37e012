#include "lib/diff_load.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <set>

#include "lib/assemble.h"
#include "lib/diff_parallel.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using StateKey = std::tuple<Role, std::string, std::string>;  // role, layer, tensor

bool is_state(const Site& site) { return site.role == Role::parameter || site.role == Role::optimizer_state; }
StateKey state_key(const Site& site) { return {site.role, site.layer, site.tensor}; }

struct Side {
  const HashStreamReader* stream;
  StepColumns columns;
  const Site& site(uint32_t row) const { return stream->sites()[columns.site[row]]; }
};

TensorStats stats_of(const StepColumns& columns, uint32_t row) {
  return {columns.absmax[row], columns.nonfinite[row], columns.word_sum[row]};
}

// The last record of each state tensor in the update.
std::map<StateKey, uint32_t> states_after_update(const Side& side) {
  std::map<StateKey, uint32_t> last;
  for (uint32_t row = 0; row < side.columns.size(); ++row) {
    const Site& site = side.site(row);
    if (site.phase == Phase::optimizer && is_state(site) && (side.columns.flags[row] & kRecordEval) == 0) last[state_key(site)] = row;
  }
  return last;
}

void compare_load(const StreamJoin& join, bool b_resumed, const Side& load, const Side& before, int rank, Loads* out,
                  std::vector<Difference>* differences) {
  auto states = states_after_update(before);
  std::set<StateKey> loaded;
  size_t unmatched = 0;
  std::string first_unmatched;
  const auto miss = [&](const Site& site) {
    if (unmatched++ == 0) first_unmatched = place_text({}, site.layer, {}, site.tensor);
  };
  for (uint32_t row = 0; row < load.columns.size(); ++row) {
    const Site& site = load.site(row);
    if (!is_state(site)) continue;
    loaded.insert(state_key(site));
    const auto found = states.find(state_key(site));
    if (found == states.end()) {
      miss(site);
      continue;
    }
    const Side &a = b_resumed ? before : load, &b = b_resumed ? load : before;
    const uint32_t row_a = b_resumed ? found->second : row, row_b = b_resumed ? row : found->second;
    Difference d;
    d.row_a = d.row_b = row;
    d.site = b_resumed ? join.site_of_b(load.columns.site[row]) : load.columns.site[row];
    d.micro_step = load.columns.micro_step[row], d.call = load.columns.call[row];
    d.layout_a = a.columns.layout[row_a], d.layout_b = b.columns.layout[row_b];
    d.digest_a = a.columns.digest[row_a], d.digest_b = b.columns.digest[row_b];
    d.stats_a = stats_of(a.columns, row_a), d.stats_b = stats_of(b.columns, row_b);
    d.same = compare_records(join, d.layout_a, d.layout_b, d.digest_a, d.digest_b);
    if (d.same == Same::resharded) {
      miss(site);
      continue;
    }
    ++out->compared;
    if (is_difference(d.same)) differences->push_back(d);
  }
  if (unmatched > 0) {
    out->unmatched.push_back(fmt::format("of what run {} loaded on rank {}, {} not recorded in the other run's step before (first: {})",
                                         b_resumed ? 'B' : 'A', rank,
                                         unmatched == 1 ? "one tensor was" : fmt::format("{} were", counted(unmatched, "tensor")),
                                         first_unmatched));
  }
  size_t missing = 0;
  std::string first_missing;
  for (const auto& [key, row] : states) {
    if (loaded.count(key) != 0) continue;
    if (missing++ == 0) first_missing = place_text({}, std::get<1>(key), {}, std::get<2>(key));
  }
  if (missing > 0) {
    out->unmatched.push_back(fmt::format("run {} has no load record of {} on rank {} (first: {})", b_resumed ? 'B' : 'A',
                                         missing == 1 ? "one state tensor" : counted(missing, "state tensor"), rank, first_missing));
  }
}

}  // namespace

Loads compare_loads(const Alignment& alignment, Joins* joins) {
  Loads out;
  out.differences.resize(alignment.ranks.size());
  if (alignment.start == Start::together) return out;
  const bool b_resumed = alignment.start == Start::b_resumed;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    if (pair.load_step == kNoStep) continue;
    Side load{b_resumed ? pair.b : pair.a, {}}, before{b_resumed ? pair.a : pair.b, {}};
    try {
      load.stream->read_step(pair.load_step, &load.columns);
      before.stream->read_step(pair.step_before, &before.columns);
    } catch (const Error& error) {
      out.unmatched.push_back(fmt::format("rank {}: {}", pair.rank, error.what()));
      continue;
    }
    if (!load.stream->steps()[pair.load_step].complete) {
      out.unmatched.push_back(fmt::format("what was loaded on rank {} was not recorded whole", pair.rank));
    }
    const uint64_t before_count = out.compared;
    compare_load(joins->of(p), b_resumed, load, before, pair.rank, &out, &out.differences[p]);
    if (out.compared == before_count) {
      out.unmatched.push_back(fmt::format("nothing that run {} loaded on rank {} could be compared", b_resumed ? 'B' : 'A', pair.rank));
    }
  }
  return out;
}

namespace {

// Which records of a step were sharded differently, on any rank.
RecordKeys resharded_keys(const Alignment& alignment, const Scan& scan, Joins* joins, std::pair<int64_t, int> at, StepBuffers* worker) {
  RecordKeys keys;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      if (std::pair(pair.steps[s].step, pair.steps[s].occurrence) != at || scan.steps[p][s].resharded == 0) continue;
      const StreamJoin& join = joins->of(p);
      pair.a->read_step(pair.steps[s].a, &worker->a);
      pair.b->read_step(pair.steps[s].b, &worker->b);
      const auto on_match = [&](uint32_t i, uint32_t j) {
        if (compare_records(join, worker->a.layout[i], worker->b.layout[j], worker->a.digest[i], worker->b.digest[j]) !=
            Same::resharded) {
          return;
        }
        const Digest& key = join.key(worker->a.site[i]);
        keys.insert({key.a, key.b, worker->a.micro_step[i], worker->a.call[i]});
      };
      match_step(join, worker->a, worker->b, pair.steps[s].complete, &worker->scratch, on_match, [](uint32_t) {}, [](uint32_t) {});
    }
  }
  return keys;
}

}  // namespace

Resharding assemble_resharded(const Alignment& alignment, const Scan& scan, Joins* joins, int threads) {
  Resharding out;
  std::set<std::pair<int64_t, int>> steps;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    for (size_t s = 0; s < alignment.ranks[p].steps.size(); ++s) {
      const StepPair& step = alignment.ranks[p].steps[s];
      if (scan.steps[p][s].resharded > 0) steps.insert({step.step, step.occurrence});
    }
  }
  const std::vector<std::pair<int64_t, int>> list(steps.begin(), steps.end());
  std::mutex mutex;
  parallel_for(thread_count(threads), list.size(), [&](size_t item, int) {
    StepBuffers worker;
    Pieces in_a, in_b;
    try {
      const RecordKeys keys = resharded_keys(alignment, scan, joins, list[item], &worker);
      for (const RankPair& pair : alignment.ranks) {
        for (const StepPair& step : pair.steps) {
          if (std::pair(step.step, step.occurrence) != list[item]) continue;
          gather(*pair.a, step.a, alignment.level, &keys, &worker.a, &in_a);
          gather(*pair.b, step.b, alignment.level, &keys, &worker.b, &in_b);
        }
      }
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      ++out.not_comparable;
      out.why = error.what();
      return;
    }
    const ReshardedStep step = compare_pieces(in_a, in_b);
    const std::lock_guard lock(mutex);
    out.compared += step.equal.size() + step.differing.size();
    out.differing_records += step.differing.size();
    out.not_comparable += step.not_comparable.size();
    if (!step.not_comparable.empty() && out.why.empty()) out.why = step.not_comparable.begin()->second;
    if (!step.differing.empty()) out.differing[list[item]] = step.differing;
  });
  return out;
}

}  // namespace forkpoint
