#include "lib/replica_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>

#include "lib/diff_match.h"
#include "lib/diff_parallel.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

constexpr size_t kNever = static_cast<size_t>(-1);

struct Slot {
  uint32_t entry = 0;
  int32_t micro_step = 0;
  uint32_t call = 0;
  std::vector<uint32_t> rows;  // by stream
};

using FoundKey = std::tuple<uint32_t, Compared, int>;

struct Worker {
  std::vector<StepColumns> columns;  // by stream
  std::vector<Slot> slots;
  size_t used = 0;
  std::vector<uint32_t> direct;  // slot of an entry's first occurrence
  std::unordered_map<uint64_t, uint32_t> further;
  std::map<FoundKey, Disagreement> found;
  std::vector<size_t> equal_in_group, equal_in_stage;
  std::vector<uint8_t> equal_when_loaded, group_agrees;
  uint64_t compared = 0, bytes = 0, whole = 0;
  RecomputeCheck recompute;
  std::vector<std::string> damage;
};

class Scanner {
 public:
  Scanner(const Run& run, const ReplicaGroups& groups, const ReplicaSites& sites, ReplicaScan* scan)
      : run_(run), groups_(groups), sites_(sites), scan_(*scan) {}

  void step(size_t index, bool verify, Worker* worker) {
    const RunStep& at = scan_.steps[index];
    if (!at.whole || !read(at, verify, worker)) return;
    ++worker->whole;
    gather(at, worker);
    std::set<uint32_t> differing, seen;
    for (size_t i = 0; i < worker->used; ++i) {
      const Slot& slot = worker->slots[i];
      const uint32_t name = sites_.entries[slot.entry].name;
      const bool equal = sites_.entries[slot.entry].collective ? compare_collective(slot, index, worker)
                                                               : compare(slot, index, worker);
      if (sites_.entries[slot.entry].collective) continue;
      seen.insert(name);
      if (!equal) differing.insert(name);
    }
    scan_.names_seen[index] = static_cast<uint32_t>(seen.size());
    scan_.names_equal[index] = static_cast<uint32_t>(seen.size() - differing.size());
  }

 private:
  bool read(const RunStep& at, bool verify, Worker* worker) {
    for (size_t k = 0; k < at.streams.size(); ++k) {
      const HashStreamReader& stream = *run_.streams()[at.streams[k]];
      StepColumns& columns = worker->columns[at.streams[k]];
      const StepSummary& summary = stream.steps()[at.indices[k]];
      try {
        stream.read_step(at.indices[k], &columns);
      } catch (const Error& error) {
        worker->damage.push_back(
            fmt::format("rank {}, {}: {}", stream.header().rank, step_text(at.step), error.what()));
        return false;
      }
      if (verify && !adds_up(stream, columns, summary)) {
        worker->damage.push_back(
            fmt::format("rank {}, {}: its records do not add up to the step's summary: frames of two runs are "
                        "mixed in {}",
                        stream.header().rank, step_text(at.step), stream.path()));
        return false;
      }
      worker->bytes += summary.bytes_hashed;
    }
    for (const size_t s : at.streams)
      check_recompute(*run_.streams()[s], worker->columns[s], at.step, &worker->recompute);
    return true;
  }

  static bool adds_up(const HashStreamReader& stream, const StepColumns& columns, const StepSummary& summary) {
    Digest sum;
    for (size_t row = 0; row < columns.size(); ++row) {
      if ((columns.flags[row] & kRecordEval) != 0) continue;
      sum +=
          tree_leaf(stream.site_keys()[columns.site[row]], stream.layout_keys()[columns.layout[row]], columns.row(row));
    }
    return sum == summary.digest;
  }

  void gather(const RunStep& at, Worker* worker) {
    worker->used = 0;
    worker->direct.assign(sites_.entries.size(), kNoRow);
    worker->further.clear();
    for (const size_t s : at.streams) {
      const StepColumns& columns = worker->columns[s];
      const std::vector<uint32_t>& entries = sites_.of_stream[s];
      for (uint32_t row = 0; row < columns.size(); ++row) {
        const uint32_t entry = entries[columns.site[row]];
        if (entry == kNoRow || (columns.flags[row] & kClassFlags) != 0) continue;
        slot_of(entry, columns.micro_step[row], columns.call[row], worker).rows[s] = row;
      }
    }
  }

  Slot& slot_of(uint32_t entry, int32_t micro_step, uint32_t call, Worker* worker) {
    uint32_t& direct = worker->direct[entry];
    if (direct != kNoRow) {
      Slot& slot = worker->slots[direct];
      if (slot.micro_step == micro_step && slot.call == call) return slot;
      const uint64_t key = (static_cast<uint64_t>(entry) << 40) ^
                           (static_cast<uint64_t>(static_cast<uint32_t>(micro_step)) << 20) ^ call;
      const auto [at, fresh] = worker->further.try_emplace(key, static_cast<uint32_t>(worker->used));
      if (!fresh) return worker->slots[at->second];
    } else {
      direct = static_cast<uint32_t>(worker->used);
    }
    if (worker->used == worker->slots.size()) worker->slots.emplace_back();
    Slot& slot = worker->slots[worker->used++];
    slot.entry = entry, slot.micro_step = micro_step, slot.call = call;
    slot.rows.assign(run_.streams().size(), kNoRow);
    return slot;
  }

  bool same(size_t left, size_t right, const Slot& slot, const Worker& worker) const {
    const StepColumns &a = worker.columns[left], &b = worker.columns[right];
    return a.digest[slot.rows[left]] == b.digest[slot.rows[right]] &&
           layout_of(left, slot, worker) == layout_of(right, slot, worker);
  }
  uint64_t layout_of(size_t s, const Slot& slot, const Worker& worker) const {
    return run_.streams()[s]->layout_keys()[worker.columns[s].layout[slot.rows[s]]];
  }
  bool is_shard(size_t s, const Slot& slot, const Worker& worker) const {
    return run_.streams()[s]->layouts()[worker.columns[s].layout[slot.rows[s]]].is_shard();
  }
  bool all_same(const std::vector<size_t>& streams, const Slot& slot, const Worker& worker) const {
    return std::all_of(streams.begin(), streams.end(), [&](size_t s) { return same(streams[0], s, slot, worker); });
  }

  // True where nothing disagrees.
  bool compare(const Slot& slot, size_t index, Worker* worker) {
    bool equal = true;
    std::vector<size_t> members;
    for (int stage = 0; stage < groups_.stages(); ++stage) {
      members.clear();
      for (size_t s = 0; s < slot.rows.size(); ++s) {
        if (slot.rows[s] != kNoRow && groups_.places()[s].stage == stage) members.push_back(s);
      }
      if (members.size() < 2) continue;
      if (all_same(members, slot, *worker))
        note_equal(members, slot, index, worker);
      else
        equal &= compare_apart(members, stage, slot, index, worker);
    }
    return equal;
  }

  // They are not all alike: by boxes of a cut tensor, by groups, and between groups.
  bool compare_apart(const std::vector<size_t>& members, int stage, const Slot& slot, size_t index, Worker* worker) {
    std::map<uint64_t, std::vector<size_t>> boxes;
    std::map<int, std::vector<size_t>> groups;
    std::vector<size_t> whole;
    for (const size_t s : members) {
      if (is_shard(s, slot, *worker))
        boxes[layout_of(s, slot, *worker)].push_back(s);
      else
        groups[groups_.places()[s].group].push_back(s), whole.push_back(s);
    }
    bool equal = true;
    const auto settle = [&](const std::vector<size_t>& some, Compared how, int place) {
      if (some.size() < 2) return true;
      if (!all_same(some, slot, *worker)) return add(some, how, place, slot, index, worker), false;
      note_equal(some, slot, index, worker, how == Compared::stage);
      return true;
    };
    for (const auto& [box, some] : boxes) equal &= settle(some, Compared::box, stage);
    bool within = true;
    if (groups_.known()) {
      for (const auto& [group, some] : groups) within &= settle(some, Compared::group, group);
      if (groups.size() < 2) return equal && within;
      std::vector<size_t> one_each;
      for (const auto& [group, some] : groups) one_each.push_back(some[0]);
      if (within && !all_same(one_each, slot, *worker))
        add(whole, Compared::stage, stage, slot, index, worker), equal = false;
      return equal && within;
    }
    return settle(whole, Compared::stage, stage) && equal;
  }

  void note_equal(const std::vector<size_t>& members, const Slot& slot, size_t index, Worker* worker,
                  bool of_stage = true) {
    worker->compared += members.size();
    const Digest& digest = worker->columns[members[0]].digest[slot.rows[members[0]]];
    if (digest == Digest{}) return;  // zeros are alike on ranks that have nothing in common
    const uint32_t name = sites_.entries[slot.entry].name;
    const bool loaded = sites_.entries[slot.entry].site->phase == Phase::load;
    const auto lower = [&](size_t* value) { *value = std::min(*value, index); };
    const ReplicaPlace& first = groups_.places()[members[0]];
    const bool spans =
        std::any_of(members.begin(), members.end(), [&](size_t s) { return groups_.places()[s].group != first.group; });
    if (of_stage && (spans || !groups_.known())) {
      if (loaded)
        worker->equal_when_loaded[name * scan_.stages + static_cast<size_t>(first.stage)] = 1;
      else
        lower(&worker->equal_in_stage[name * scan_.stages + static_cast<size_t>(first.stage)]);
    }
    std::set<int> once;
    for (const size_t s : members) {
      const int group = groups_.places()[s].group;
      if (!once.insert(group).second) {  // two of this group
        lower(&worker->equal_in_group[name * scan_.groups + static_cast<size_t>(group)]);
        worker->group_agrees[static_cast<size_t>(group)] = 1;
      }
    }
  }

  void add(const std::vector<size_t>& streams, Compared how, int place, const Slot& slot, size_t index,
           Worker* worker) {
    std::vector<ReplicaPiece> pieces;
    bool forms_differ = false;
    for (const size_t s : streams) {
      const StepColumns& columns = worker->columns[s];
      const uint32_t row = slot.rows[s];
      pieces.push_back({s,
                        run_.streams()[s]->header().rank,
                        row,
                        columns.layout[row],
                        slot.micro_step,
                        slot.call,
                        columns.digest[row],
                        {columns.absmax[row], columns.nonfinite[row], columns.word_sum[row]}});
      forms_differ |= layout_of(s, slot, *worker) != layout_of(streams[0], slot, *worker);
    }
    const std::vector<int> outliers = outliers_of(pieces);
    const auto [at, fresh] = worker->found.try_emplace({slot.entry, how, place});
    Disagreement& found = at->second;
    if (fresh || index < found.step) {
      found.entry = slot.entry, found.how = how, found.place = place, found.step = index;
      found.forms_differ = forms_differ, found.pieces = std::move(pieces);
    }
    ++found.records;
    std::vector<int> all;
    std::set_union(found.outliers.begin(), found.outliers.end(), outliers.begin(), outliers.end(),
                   std::back_inserter(all));
    found.outliers = std::move(all);
  }

  bool compare_collective(const Slot& slot, size_t index, Worker* worker) {
    std::map<std::vector<int>, std::vector<size_t>> calls;
    for (size_t s = 0; s < slot.rows.size(); ++s) {
      const std::vector<int>& members = sites_.members[slot.entry][s];
      if (slot.rows[s] != kNoRow && members.size() > 1) calls[members].push_back(s);
    }
    bool equal = true;
    for (const auto& [members, streams] : calls) {
      if (streams.size() < 2) continue;
      if (all_same(streams, slot, *worker)) {
        worker->compared += streams.size();
      } else if (!only_order_differs(streams, slot, *worker)) {
        // One entry for each set of members: its lowest rank tells them apart.
        add(streams, Compared::collective, members[0], slot, index, worker);
        equal = false;
      }
    }
    return equal;
  }

  // Two communicators of one name may be used in another order on each rank.
  bool only_order_differs(const std::vector<size_t>& streams, const Slot& slot, const Worker& worker) const {
    std::vector<std::pair<uint64_t, uint64_t>> first, own;
    for (const size_t s : streams) {
      own.clear();
      const StepColumns& columns = worker.columns[s];
      const uint32_t site = columns.site[slot.rows[s]];
      for (uint32_t row = 0; row < columns.size(); ++row) {
        if (columns.site[row] == site && (columns.flags[row] & kClassFlags) == 0)
          own.emplace_back(columns.digest[row].a, columns.digest[row].b);
      }
      std::sort(own.begin(), own.end());
      if (s == streams[0])
        first = own;
      else if (own != first)
        return false;
    }
    return true;
  }

  const Run& run_;
  const ReplicaGroups& groups_;
  const ReplicaSites& sites_;
  ReplicaScan& scan_;
};

void merge(const Worker& worker, std::map<FoundKey, Disagreement>* found, ReplicaScan* scan) {
  for (const auto& [key, entry] : worker.found) {
    const auto [at, fresh] = found->try_emplace(key, entry);
    if (fresh) continue;
    Disagreement& into = at->second;
    const uint64_t records = into.records + entry.records;
    std::vector<int> outliers;
    std::set_union(into.outliers.begin(), into.outliers.end(), entry.outliers.begin(), entry.outliers.end(),
                   std::back_inserter(outliers));
    if (entry.step < into.step) into = entry;
    into.records = records, into.outliers = std::move(outliers);
  }
  const auto lowest = [](const std::vector<size_t>& from, std::vector<size_t>* into) {
    for (size_t i = 0; i < into->size(); ++i) (*into)[i] = std::min((*into)[i], from[i]);
  };
  lowest(worker.equal_in_group, &scan->equal_in_group);
  lowest(worker.equal_in_stage, &scan->equal_in_stage);
  for (size_t i = 0; i < scan->equal_when_loaded.size(); ++i) scan->equal_when_loaded[i] |= worker.equal_when_loaded[i];
  for (size_t i = 0; i < scan->group_agrees.size(); ++i) scan->group_agrees[i] |= worker.group_agrees[i];
  scan->compared += worker.compared, scan->bytes += worker.bytes, scan->whole_steps += worker.whole;
  scan->recompute.compared += worker.recompute.compared, scan->recompute.unmatched += worker.recompute.unmatched;
  const auto& more = worker.recompute.mismatches;
  scan->recompute.mismatches.insert(scan->recompute.mismatches.end(), more.begin(), more.end());
  scan->damage.insert(scan->damage.end(), worker.damage.begin(), worker.damage.end());
}

}  // namespace

ReplicaScan scan_replicas(const Run& run, const ReplicaGroups& groups, const ReplicaSites& sites,
                          const StepWindow& window, const DiffOptions& options) {
  ReplicaScan scan;
  scan.steps = steps_of(run, window);
  scan.stages = static_cast<size_t>(groups.stages());
  for (const ReplicaPlace& place : groups.places())
    scan.groups = std::max(scan.groups, static_cast<size_t>(place.group) + 1);
  scan.equal_in_group.assign(sites.names * scan.groups, kNever);
  scan.equal_in_stage.assign(sites.names * scan.stages, kNever);
  scan.equal_when_loaded.assign(sites.names * scan.stages, 0);
  scan.group_agrees.assign(scan.groups, 0);
  scan.names_equal.assign(scan.steps.size(), 0);
  scan.names_seen.assign(scan.steps.size(), 0);
  const int threads = thread_count(options.threads);
  std::vector<Worker> workers(static_cast<size_t>(threads));
  for (Worker& worker : workers) {
    worker.columns.resize(run.streams().size());
    worker.equal_in_group = scan.equal_in_group, worker.equal_in_stage = scan.equal_in_stage;
    worker.equal_when_loaded = scan.equal_when_loaded, worker.group_agrees = scan.group_agrees;
  }
  Scanner scanner(run, groups, sites, &scan);
  Progress progress(options.progress, scan.steps.size());
  parallel_for(threads, scan.steps.size(), [&](size_t step, int worker) {
    scanner.step(step, options.verify_checksums, &workers[static_cast<size_t>(worker)]);
    progress.add(1);
  });
  std::map<FoundKey, Disagreement> found;
  for (const Worker& worker : workers) merge(worker, &found, &scan);
  for (auto& [key, entry] : found) scan.disagreements.push_back(std::move(entry));
  const auto row_of = [](const Disagreement& entry) { return entry.pieces[0].row; };
  std::sort(
      scan.disagreements.begin(), scan.disagreements.end(), [&](const Disagreement& left, const Disagreement& right) {
        return std::tuple(left.step, row_of(left), left.entry) < std::tuple(right.step, row_of(right), right.entry);
      });
  return scan;
}

}  // namespace forkpoint
