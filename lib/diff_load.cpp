#include "lib/diff_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "lib/assemble.h"
#include "lib/diff_parallel.h"
#include "lib/diff_set_up.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using StateKey = std::tuple<Role, std::string, std::string>;  // role, layer, tensor

bool is_buffer(const Site& site) { return site.role == Role::other && site.kind == Kind::tensor; }
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
    if (site.phase == Phase::optimizer && (is_state(site) || is_buffer(site)) &&
        (side.columns.flags[row] & kRecordEval) == 0)
      last[state_key(site)] = row;
  }
  return last;
}

// The later run's load against the other's step before, on one rank.
class LoadComparison {
 public:
  LoadComparison(const StreamJoin& join, bool b_later, int rank, size_t pair, Loads* out)
      : join_(join),
        b_later_(b_later),
        rank_(rank),
        out_(*out),
        differences_(out->differences[pair]),
        buffers_(out->buffers[pair]) {}

  // initial: the other run's own prologue; without rows where it has none.
  void run(const Side& load, const Side& before, const Side& initial) {
    const auto states = states_after_update(before);
    const auto initial_states = all_states(initial);
    std::set<StateKey> loaded;
    std::vector<std::string> unmatched, missing;
    size_t parameters = 0, equal_parameters = 0;
    for (uint32_t row = 0; row < load.columns.size(); ++row) {
      const Site& site = load.site(row);
      if (is_buffer(site)) compare_buffer(load, row, before, states);
      if (!is_state(site)) continue;
      loaded.insert(state_key(site));
      const auto found = states.find(state_key(site));
      const Difference d = found == states.end() ? Difference{} : pair_of(load, row, before, found->second);
      if (found == states.end() || d.same == Same::resharded) {
        unmatched.push_back(place_text({}, site.layer, {}, site.tensor));
        continue;
      }
      ++out_.compared;
      parameters += site.role == Role::parameter ? 1 : 0;
      if (is_difference(d.same)) {
        differences_.push_back(d);
        continue;
      }
      equal_parameters += site.role == Role::parameter ? 1 : 0;
      const auto at_start = initial_states.find(state_key(site));
      // Momentum that was not there when the other run began came to be in its steps; a count of steps may be anybody's.
      const bool grew = at_start == initial_states.end() && !initial_states.empty() && site.role == Role::optimizer_state &&
                        element_count(load.stream->layouts()[load.columns.layout[row]]) > 1;
      const bool moved = at_start != initial_states.end() ? !(initial.columns.digest[at_start->second] == d.digest_a) : grew;
      out_.resumed |= moved && !(d.digest_a == Digest{});
    }
    if (initial_states.empty()) out_.resumed |= equal_parameters > 0 && equal_parameters * 2 >= parameters;
    for (const auto& [key, row] : states) {
      if (loaded.count(key) == 0 && is_state(before.site(row)))
        missing.push_back(place_text({}, std::get<1>(key), {}, std::get<2>(key)));
    }
    const char later = b_later_ ? 'B' : 'A';
    if (!unmatched.empty()) {
      out_.unmatched.push_back(
          fmt::format("{} that run {} loaded on rank {} cannot be compared with the other run's step before "
                      "(first: {})",
                      counted(unmatched.size(), "tensor"), later, rank_, unmatched[0]));
    }
    if (!missing.empty()) {
      out_.unmatched.push_back(
          fmt::format("run {} recorded no load of {} of the other run's state on rank {} (first: {})", later,
                      counted(missing.size(), "tensor"), rank_, missing[0]));
    }
  }

 private:
  void compare_buffer(const Side& load, uint32_t row, const Side& before, const std::map<StateKey, uint32_t>& states) {
    const auto found = states.find(state_key(load.site(row)));
    if (found == states.end()) return;
    const Difference d = pair_of(load, row, before, found->second);
    if (is_difference(d.same))
      buffers_.push_back(d);
    else if (d.same != Same::resharded)
      ++out_.compared;
  }

  static std::map<StateKey, uint32_t> all_states(const Side& side) {
    std::map<StateKey, uint32_t> states;
    for (uint32_t row = 0; row < side.columns.size(); ++row) {
      if (is_state(side.site(row))) states[state_key(side.site(row))] = row;
    }
    return states;
  }

  Difference pair_of(const Side& load, uint32_t load_row, const Side& before, uint32_t before_row) const {
    const Side &a = b_later_ ? before : load, &b = b_later_ ? load : before;
    const uint32_t row_a = b_later_ ? before_row : load_row, row_b = b_later_ ? load_row : before_row;
    Difference d;
    d.row_a = d.row_b = load_row;
    d.site = b_later_ ? join_.site_of_b(load.columns.site[load_row]) : load.columns.site[load_row];
    d.micro_step = load.columns.micro_step[load_row], d.call = load.columns.call[load_row];
    d.layout_a = a.columns.layout[row_a], d.layout_b = b.columns.layout[row_b];
    d.digest_a = a.columns.digest[row_a], d.digest_b = b.columns.digest[row_b];
    d.stats_a = stats_of(a.columns, row_a), d.stats_b = stats_of(b.columns, row_b);
    d.same = compare_records(join_, d.site, d.layout_a, d.layout_b, d.digest_a, d.digest_b);
    return d;
  }

  const StreamJoin& join_;
  const bool b_later_;
  const int rank_;
  Loads& out_;
  std::vector<Difference>& differences_;
  std::vector<Difference>& buffers_;
};

// Of a buffer, what any rank holds: where a job saves one rank's and gives it to all (DistributedDataParallel), the
// others load what was never theirs, and broadcast it over whatever they hold before they use it.
using BufferValues = std::map<StateKey, std::set<std::pair<uint64_t, uint64_t>>>;

void add_buffers(const Side& before, BufferValues* values) {
  for (const auto& [key, row] : states_after_update(before)) {
    const Digest& digest = before.columns.digest[row];
    if (is_buffer(before.site(row))) (*values)[key].insert({digest.a, digest.b});
  }
}

struct FirstStep {
  std::set<StateKey> differ;  // buffers that do at its end
  bool broadcasts = false;    // something is broadcast in it, in both runs
};

// Of the step that the later run begins with.
FirstStep first_step_of(const StreamJoin& join, const RankPair& pair, int64_t begin) {
  FirstStep found;
  for (const StepPair& step : pair.steps) {
    if (step.step != begin || step.occurrence != 0) continue;
    StepBuffers buffers;
    read_pair(join, pair, step, &buffers);
    const auto on_match = [&](uint32_t i, uint32_t j) {
      const Site& site = join.site(buffers.a.site[i]);
      found.broadcasts |= site.kind == Kind::collective && site.op.find("broadcast") != std::string::npos;
      if (is_buffer(site) && site.phase == Phase::optimizer && !(buffers.a.digest[i] == buffers.b.digest[j]))
        found.differ.insert(state_key(site));
    };
    match_step(
        join, buffers.a, buffers.b, step.complete, &buffers.scratch, on_match, [](uint32_t) {}, [](uint32_t) {});
  }
  return found;
}

// Those that tell where the runs part: what the later run loaded is no rank's, and the step behind it did not make up
// for that.
void take_buffers(const Alignment& alignment, const BufferValues& values, bool b_later, Joins* joins, Loads* out) {
  for (size_t p = 0; p < out->buffers.size(); ++p) {
    auto& buffers = out->buffers[p];
    if (buffers.empty()) continue;
    const StreamJoin& join = joins->of(p);
    FirstStep first;
    try {
      first = first_step_of(join, alignment.ranks[p], alignment.begin);
    } catch (const Error&) {  // the scan says so
    }
    std::erase_if(buffers, [&](const Difference& d) {
      const StateKey key = state_key(join.site(d.site));
      const Digest& loaded = b_later ? d.digest_b : d.digest_a;
      const auto known = values.find(key);
      const bool is_some_rank_s = known != values.end() && known->second.contains({loaded.a, loaded.b});
      return !first.differ.contains(key) || (first.broadcasts && is_some_rank_s);
    });
    auto& list = out->differences[p];
    list.insert(list.end(), buffers.begin(), buffers.end());
    std::ranges::stable_sort(list, {}, &Difference::row_a);
  }
}

bool prologue_has_optimizer_state(const HashStreamReader& stream, size_t step) {
  Side side{&stream, {}};
  try {
    stream.read_step(step, &side.columns);
  } catch (const Error&) {
    return false;
  }
  for (uint32_t row = 0; row < side.columns.size(); ++row) {
    if (side.site(row).role == Role::optimizer_state && !(side.columns.digest[row] == Digest{})) return true;
  }
  return false;
}

}  // namespace

Loads compare_loads(const Alignment& alignment, bool is_resume, Joins* joins) {
  Loads out;
  BufferValues values;
  out.differences.resize(alignment.ranks.size());
  out.buffers.resize(alignment.ranks.size());
  if (alignment.start == Start::together) return out;
  const bool b_later = alignment.start == Start::b_later;
  const char later = b_later ? 'B' : 'A', earlier = b_later ? 'A' : 'B';
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    if (pair.load_step == kNoStep) {
      out.unmatched.push_back(fmt::format("run {} has no record of a load on rank {}", later, pair.rank));
      continue;
    }
    Side load{b_later ? pair.b : pair.a, {}}, before{b_later ? pair.a : pair.b, {}}, initial = before;
    try {
      load.stream->read_step(pair.load_step, &load.columns);
      before.stream->read_step(pair.step_before, &before.columns);
      if (pair.prologue_other != kNoStep) initial.stream->read_step(pair.prologue_other, &initial.columns);
    } catch (const Error& error) {
      out.unmatched.push_back(fmt::format("rank {}: {}", pair.rank, error.what()));
      continue;
    }
    if (!load.stream->steps()[pair.load_step].complete) {
      out.unmatched.push_back(fmt::format("what was loaded on rank {} was not recorded whole", pair.rank));
    }
    add_buffers(before, &values);
    const uint64_t compared_before = out.compared;
    LoadComparison(joins->of(p), b_later, pair.rank, p, &out).run(load, before, initial);
    if (out.compared == compared_before) {
      out.unmatched.push_back(fmt::format("nothing that run {} loaded on rank {} could be compared", later, pair.rank));
    }
  }
  take_buffers(alignment, values, b_later, joins, &out);
  out.resumed |= is_resume && out.compared > 0;
  if (out.resumed) return out;
  Loads nothing;
  nothing.differences.resize(alignment.ranks.size());
  nothing.unmatched.push_back(
      alignment.begun == alignment.begin
          ? fmt::format("run {0} begins at step {1}, and nothing shows that it began with run {2}'s state at the end "
                        "of step {3} (to compare only the steps from there on: --steps {1}:N)",
                        later, alignment.begin, earlier, alignment.begin - 1)
          : fmt::format("run {0} began at step {1} and is recorded from step {2} on: what it had there is not known to "
                        "have been "
                        "run {3}'s (to compare only the steps from there on: --steps {2}:N)",
                        later, alignment.begun, alignment.begin, earlier));
  return nothing;
}

Loaded loaded_before(const Alignment& alignment, const Loads& loads) {
  if (alignment.start != Start::together) return loads.resumed ? Loaded::by_one : Loaded::maybe;
  for (const RankPair& pair : alignment.ranks) {
    if (pair.a->header().step_base == "checkpoint" || pair.b->header().step_base == "checkpoint")
      return Loaded::by_both;
    // Momentum before the first step can only come from a checkpoint.
    if (alignment.begin <= 0 || pair.steps.empty() || pair.steps[0].step != kPrologueStep) continue;
    if (prologue_has_optimizer_state(*pair.a, pair.steps[0].a) ||
        prologue_has_optimizer_state(*pair.b, pair.steps[0].b)) {
      return Loaded::by_both;
    }
  }
  return alignment.begin > 0 ? Loaded::maybe : Loaded::no;
}

namespace {

// Which records of a step were sharded differently, on any rank.
RecordKeys resharded_keys(const Alignment& alignment, const Scan& scan, Joins* joins, std::pair<int64_t, int> at,
                          StepBuffers* worker) {
  RecordKeys keys;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      if (std::pair(pair.steps[s].step, pair.steps[s].occurrence) != at || scan.steps[p][s].resharded == 0) continue;
      const StreamJoin& join = joins->of(p);
      read_pair(join, pair, pair.steps[s], worker);
      const auto on_match = [&](uint32_t i, uint32_t j) {
        if (compare_records(join, worker->a.site[i], worker->a.layout[i], worker->b.layout[j], worker->a.digest[i],
                            worker->b.digest[j]) != Same::resharded) {
          return;
        }
        const Digest& key = join.key(worker->a.site[i]);
        keys.insert({key.a, key.b, worker->a.micro_step[i], worker->a.call[i]});
      };
      match_step(
          join, worker->a, worker->b, pair.steps[s].complete, &worker->scratch, on_match, [](uint32_t) {},
          [](uint32_t) {});
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
    RecordKeys keys;
    try {
      keys = resharded_keys(alignment, scan, joins, list[item], &worker);
      for (const RankPair& pair : alignment.ranks) {
        for (const StepPair& step : pair.steps) {
          if (std::pair(step.step, step.occurrence) != list[item]) continue;
          if (!step.complete) throw Error("records of that step are missing");  // their loss may have shifted calls
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
    // Those of an evaluation are not gathered: not compared, and so to be said.
    const size_t seen = step.equal.size() + step.differing.size() + step.not_comparable.size();
    if (seen < keys.size()) {
      out.not_comparable += keys.size() - seen;
      if (out.why.empty()) out.why = "records of an evaluation are not put together from shards";
    }
    out.compared += step.equal.size() + step.differing.size();
    out.differing_records += step.differing.size();
    out.not_comparable += step.not_comparable.size();
    if (!step.not_comparable.empty() && out.why.empty()) out.why = step.not_comparable.begin()->second;
    if (!step.differing.empty()) out.differing[list[item]] = step.differing;
  });
  return out;
}

}  // namespace forkpoint
