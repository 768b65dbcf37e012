#include "lib/diff_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "lib/diff_map.h"
#include "lib/diff_parallel.h"
#include "lib/diff_set_up.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

struct Task {
  size_t pair, step;
};

struct Worker : StepBuffers {
  std::unordered_map<uint64_t, OneSided> one_sided;
  std::vector<Unequal> unequal;
  std::vector<RelaidCalls> relaid;
  std::vector<std::string> gaps;
  std::vector<int64_t> gap_steps;
  std::vector<uint8_t> cells;
};

// Equal roots of whole steps: nothing to read. Evaluations are in no tree, so they are read where both runs have some.
bool equal_by_tree(const StepPair& pair, const StepSummary& a, const StepSummary& b) {
  return pair.complete && a.digest == b.digest && a.records == b.records &&
         (a.eval_records == 0 || b.eval_records == 0);
}

OneSided& note_one_sided(Worker* worker, const Task& task, int64_t step, uint32_t site, OneSided::Side side,
                         uint8_t flags, uint32_t row, int32_t micro_step) {
  const bool eval = (flags & kRecordEval) != 0;
  const uint64_t key = (static_cast<uint64_t>(task.pair) << 35) ^ (static_cast<uint64_t>(site) << 3) ^
                       (static_cast<uint64_t>(side) << 1) ^ (eval ? 1u : 0u);
  OneSided& entry =
      worker->one_sided.try_emplace(key, OneSided{task.pair, site, side, eval, 0, 0, step, row, micro_step, 0})
          .first->second;
  if (step < entry.first_step) entry.first_step = step, entry.first_row = row, entry.micro_step = micro_step;
  ++entry.records;
  return entry;
}

// Sums are no proof, so the step is read once more for what stands behind them. What is behind one family cannot be told
// from what is behind another: it has to be enough for all.
void note_relaid(const Relaid& relaid, const Task& task, const StepPair& step, const StreamJoin& join, Worker* worker) {
  if (relaid.groups.empty()) return;
  const StepColumns &a = worker->a, &b = worker->b;
  const uint64_t witnessed = witnessed_elements(join, a, b, step, &worker->scratch);
  const auto elements_of = [](const RelaidGroup& group) {
    return std::max(group.input.sums_a.elements, group.output.sums_a.elements);
  };
  uint64_t sent = 0;
  for (const RelaidGroup& group : relaid.groups) sent += elements_of(group);
  for (const RelaidGroup& group : relaid.groups) {
    const RelaidSide& side = group.input.used() ? group.input : group.output;
    RelaidCalls& calls = worker->relaid.emplace_back();
    calls.pair = task.pair, calls.site = a.site[side.rows_a[0]], calls.step = step.step;
    calls.elements = elements_of(group);
    for (const uint32_t i : side.rows_a) calls.layouts_a.push_back(a.layout[i]);
    for (const uint32_t j : side.rows_b) calls.layouts_b.push_back(b.layout[j]);
    calls.inputs_same = group.input.same(), calls.outputs_same = group.output.same();
    calls.outputs_seen = group.output.used();
    calls.witnessed = witnessed >= sent;
  }
}

void scan_step(const Task& task, const StepPair& step, const StreamJoin& join, MapBuilder* map, Worker* worker,
               StepCounts* counts) {
  const StepColumns &a = worker->a, &b = worker->b;
  const uint32_t* rows = map != nullptr ? map->rows_of(task.pair, join).data() : nullptr;
  if (rows != nullptr) worker->cells.assign(map->row_count(), 0);
  const auto mark = [&](uint32_t site, uint8_t cell) {
    if (rows != nullptr) worker->cells[rows[site]] = std::max(worker->cells[rows[site]], cell);
  };
  const Relaid relaid = match_relaid(join, a, b, step, &worker->scratch, &worker->unequal, [&](uint32_t i, uint32_t) {
    ++counts->matched;
    mark(a.site[i], MapBuilder::kEqual);
  });
  for (const auto& [i, j, same] : worker->unequal) {
    if (i == kNoRow || j == kNoRow) {
      const uint32_t site = i == kNoRow ? join.site_of_b(b.site[j]) : a.site[i];
      mark(site, MapBuilder::kMissing);
      if (!step.complete) continue;
      if (i == kNoRow) note_one_sided(worker, task, step.step, site, OneSided::only_b, b.flags[j], j, b.micro_step[j]);
      else note_one_sided(worker, task, step.step, site, OneSided::only_a, a.flags[i], i, a.micro_step[i]);
      continue;
    }
    if (same == Same::resharded) {
      ++counts->resharded;
      continue;
    }
    ++counts->matched;
    if (same == Same::relabelled || same == Same::regrouped) {
      const auto side = same == Same::relabelled ? OneSided::relabelled : OneSided::regrouped;
      OneSided& entry = note_one_sided(worker, task, step.step, a.site[i], side, a.flags[i], i, a.micro_step[i]);
      entry.layout_a = a.layout[i], entry.layout_b = b.layout[j];
    }
    mark(a.site[i], is_difference(same) ? MapBuilder::kPropagated : MapBuilder::kEqual);
    if (!is_difference(same)) continue;
    ++((a.flags[i] & kRecordEval) != 0 ? counts->differing_eval : counts->differing);
  }
  for (const RelaidGroup& group : relaid.groups) {
    for (const RelaidSide* side : {&group.input, &group.output}) {
      if (!side->used()) continue;
      counts->differing += side->same() ? 0 : 1;
      mark(a.site[side->rows_a[0]], side->same() ? MapBuilder::kEqual : MapBuilder::kPropagated);
    }
  }
  note_relaid(relaid, task, step, join, worker);
  if (rows != nullptr) map->add(step.step, worker->cells);
}

// False, with a gap noted, when the step cannot be read.
bool read_both(const StreamJoin& join, const RankPair& pair, const StepPair& step, Worker* worker) {
  char which = 'A';
  try {
    read_pair(join, pair, step, worker, &which);
    return true;
  } catch (const Error& error) {
    worker->gaps.push_back(fmt::format("run {}, rank {}, step {}: {}", which, pair.rank, step.step, error.what()));
    worker->gap_steps.push_back(step.step);
    return false;
  }
}

std::vector<OneSided> merge_one_sided(std::vector<Worker>* workers) {
  std::unordered_map<uint64_t, OneSided> merged;
  for (Worker& worker : *workers) {
    for (const auto& [key, entry] : worker.one_sided) {
      const auto [at, fresh] = merged.try_emplace(key, entry);
      if (fresh) continue;
      const uint64_t records = at->second.records + entry.records;
      if (entry.first_step < at->second.first_step) at->second = entry;
      at->second.records = records;
    }
  }
  std::vector<OneSided> list;
  for (auto& [key, entry] : merged) list.push_back(entry);
  std::sort(list.begin(), list.end(), [](const OneSided& left, const OneSided& right) {
    return std::tuple(left.first_step, left.eval, left.first_row, left.pair, left.side, left.site) <
           std::tuple(right.first_step, right.eval, right.first_row, right.pair, right.side, right.site);
  });
  return list;
}

}  // namespace

const StreamJoin& Joins::of(size_t pair) {
  Slot& slot = slots_[pair];
  std::call_once(slot.once,
                 [&] { slot.join = std::make_unique<StreamJoin>(*pairs_[pair].a, *pairs_[pair].b, level_); });
  return *slot.join;
}

Scan scan_runs(const Alignment& alignment, const DiffOptions& options, Joins* joins, MapBuilder* map) {
  Scan scan;
  scan.steps.resize(alignment.ranks.size());
  std::vector<Task> tasks, equals;  // equals: for the map only
  uint64_t total = 0, equal = 0;
  const bool use_tree = !options.full_scan && !alignment.levels_differ;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    scan.steps[p].resize(pair.steps.size());
    total += pair.steps.size();
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      const StepSummary& a = pair.a->steps()[pair.steps[s].a];
      if (use_tree && equal_by_tree(pair.steps[s], a, pair.b->steps()[pair.steps[s].b])) {
        scan.steps[p][s].matched = a.records;
        ++equal;
        if (map != nullptr) equals.push_back({p, s});
      } else {
        tasks.push_back({p, s});
      }
    }
  }
  Progress progress(options.progress, total);
  progress.add(equal);
  const int threads = thread_count(options.threads);
  std::vector<Worker> workers(static_cast<size_t>(threads));
  parallel_for(threads, tasks.size(), [&](size_t item, int index) {
    const Task task = tasks[item];
    Worker& worker = workers[static_cast<size_t>(index)];
    const RankPair& pair = alignment.ranks[task.pair];
    StepCounts& counts = scan.steps[task.pair][task.step];
    const StreamJoin& join = joins->of(task.pair);
    if (read_both(join, pair, pair.steps[task.step], &worker)) {
      counts.set_up = set_up_records(worker);
      scan_step(task, pair.steps[task.step], join, map, &worker, &counts);
    } else {
      counts.unread = true;
    }
    progress.add(1);
  });
  parallel_for(threads, equals.size(), [&](size_t item, int) {
    const RankPair& pair = alignment.ranks[equals[item].pair];
    const StepPair& step = pair.steps[equals[item].step];
    try {
      map->add_equal(step.step, pair.a->layers(step.a));
    } catch (const Error&) {  // damaged: verify() says so, unless a divergence is found
    }
  });
  for (const Worker& worker : workers) {
    scan.gaps.insert(scan.gaps.end(), worker.gaps.begin(), worker.gaps.end());
    scan.gap_steps.insert(scan.gap_steps.end(), worker.gap_steps.begin(), worker.gap_steps.end());
    scan.relaid.insert(scan.relaid.end(), worker.relaid.begin(), worker.relaid.end());
  }
  std::stable_sort(scan.relaid.begin(), scan.relaid.end(), [](const RelaidCalls& left, const RelaidCalls& right) {
    return std::tuple(left.step, left.pair) < std::tuple(right.step, right.pair);
  });
  scan.one_sided = merge_one_sided(&workers);
  return scan;
}

}  // namespace forkpoint
