#include "lib/launch_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "lib/diff_parallel.h"
#include "lib/error.h"
#include "lib/launch_words.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// Compares the buffers of two rows; true when one of them differs.
bool buffers_differ(std::span<const BufferRow> a, std::span<const BufferRow> b, uint64_t* compared) {
  bool differ = false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (is_before(a[i]) || !has_digest(a[i])) continue;
    size_t j = i < b.size() && b[i].place == a[i].place && !is_before(b[i]) ? i : 0;
    while (j < b.size() && (b[j].place != a[i].place || is_before(b[j]))) ++j;
    if (j == b.size() || !has_digest(b[j])) continue;
    ++*compared;
    differ |= !(a[i].digest == b[j].digest);
  }
  return differ;
}

void count_step(const LaunchJoin& join, const LaunchStep& a, const LaunchStep& b, LaunchCounts* out, FreeWords* free) {
  const LaunchPairs pairs = pair_launches(join, a, b);
  out->launches = pairs.paired, out->only_a = pairs.only_a, out->only_b = pairs.only_b;
  bool records_differ = false;
  for (size_t i = 0; i < a.size(); ++i) {
    const uint32_t j = pairs.in_b[i];
    const bool record = a.row(i).kind == LaunchKind::record;
    if (j == kNoRow) {
      records_differ |= record;
      continue;
    }
    uint64_t none = 0;
    const bool differ = buffers_differ(a.buffers(i), b.buffers(j), record ? &none : &out->buffers);
    if (record)
      records_differ |= differ;
    else
      out->differing += differ ? 1 : 0;
    if (!record && !differ && !(a.row(i).params == b.row(j).params) && a.row(i).buffers > 0) {
      free->learn(join.names.name(join.kernel(false, a.row(i))),
                  compare_parameters(a.row(i), a.buffers(i), b.row(j), b.buffers(j), false));
    }
  }
  out->equal = out->differing == 0 && !records_differ && out->only_a == 0 && out->only_b == 0;
}

// Is there a row that takes part in the comparison? A step may hold nothing but an allocation or a wait of some thread
// that happened to come then. What cannot be read may hold anything.
bool has_work(const HashStreamReader& stream, size_t step) {
  LaunchColumns launches;
  try {
    stream.read_launches(step, &launches);
  } catch (const Error&) {
    return true;
  }
  return std::any_of(launches.rows.begin(), launches.rows.end(),
                     [](const LaunchRow& row) { return is_aligned(row.kind); });
}

class Scanner {
 public:
  Scanner(const OriginInput& input, const Origins& origins, bool wanted)
      : in_(input), origins_(origins), wanted_(wanted) {}

  LaunchScan run() {
    out_.steps.resize(in_.alignment.ranks.size());
    out_.ranks.resize(in_.alignment.ranks.size());
    out_.records.resize(origins_.list.size());
    for (size_t p = 0; p < out_.steps.size(); ++p) out_.steps[p].resize(pair(p).steps.size());
    if (!wanted_ || in_.alignment.level != Level::launch) return std::move(out_);
    for (size_t p = 0; p < in_.alignment.ranks.size(); ++p) {
      joins_.push_back(std::make_unique<LaunchJoin>(in_.joins.of(p)));
    }
    check_presence();
    count();
    std::vector<std::vector<std::pair<std::string, int64_t>>> gaps(joins_.size());
    parallel_for(thread_count(in_.threads), joins_.size(), [&](size_t p, int) { compare_rank(p, &gaps[p]); });
    for (const auto& of_rank : gaps) {
      for (const auto& [text, step] : of_rank) out_.gaps.push_back(text), out_.gap_steps.push_back(step);
    }
    return std::move(out_);
  }

 private:
  const RankPair& pair(size_t p) const { return in_.alignment.ranks[p]; }

  // Launches in one of the runs only, of a rank or of a step, are no launches compared.
  void check_presence() {
    for (size_t p = 0; p < joins_.size(); ++p) {
      uint64_t in_a = 0, in_b = 0;
      std::vector<const StepPair*> only_a, only_b;
      for (const StepPair& step : pair(p).steps) {
        const uint64_t a = pair(p).a->steps()[step.a].launches, b = pair(p).b->steps()[step.b].launches;
        in_a += a, in_b += b;
        if (a != 0 && b == 0 && step.complete) only_a.push_back(&step);
        if (b != 0 && a == 0 && step.complete) only_b.push_back(&step);
      }
      out_.compared |= in_a != 0 && in_b != 0;
      if (in_b != 0) std::erase_if(only_a, [&](const StepPair* step) { return !has_work(*pair(p).a, step->a); });
      if (in_a != 0) std::erase_if(only_b, [&](const StepPair* step) { return !has_work(*pair(p).b, step->b); });
      for (const auto& [count, steps, which] : {std::tuple(in_b, &only_a, 'B'), std::tuple(in_a, &only_b, 'A')}) {
        if (steps->empty()) continue;
        std::vector<int64_t> numbers;
        for (const StepPair* step : *steps) {
          if (step->step != kPrologueStep) numbers.push_back(step->step);
        }
        const std::string when =
            count == 0        ? ""
            : numbers.empty() ? " before the first step"
                              : fmt::format(" in step{} {}", numbers.size() == 1 ? "" : "s", number_list(numbers));
        out_.blockers.push_back(
            fmt::format("run {} recorded no launches of rank {}{}, the other run did", which, pair(p).rank, when));
      }
    }
  }

  // What of a step can be said without the steps before it.
  void count() {
    std::vector<std::pair<size_t, size_t>> tasks;
    for (size_t p = 0; p < joins_.size(); ++p) {
      for (size_t s = 0; s < pair(p).steps.size(); ++s) {
        const StepPair& step = pair(p).steps[s];
        const StepSummary &a = pair(p).a->steps()[step.a], &b = pair(p).b->steps()[step.b];
        out_.steps[p][s].complete = step.complete;
        const bool equal = step.complete && a.launches == b.launches && a.launch_sum == b.launch_sum;
        if (equal)
          out_.steps[p][s].launches = a.launches, out_.steps[p][s].equal = true;
        else
          tasks.push_back({p, s});
      }
    }
    struct Worker {
      LaunchStep a, b;
      FreeWords free;
      std::vector<std::pair<std::string, int64_t>> gaps;
    };
    std::vector<Worker> workers(static_cast<size_t>(thread_count(in_.threads)));
    parallel_for(static_cast<int>(workers.size()), tasks.size(), [&](size_t item, int index) {
      Worker& worker = workers[static_cast<size_t>(index)];
      const auto [p, s] = tasks[item];
      const StepPair& step = pair(p).steps[s];
      try {
        worker.a.read(*pair(p).a, step.a);
        worker.b.read(*pair(p).b, step.b);
        count_step(*joins_[p], worker.a, worker.b, &out_.steps[p][s], &worker.free);
      } catch (const Error& error) {
        out_.steps[p][s].unread = true;
        worker.gaps.push_back(
            {fmt::format("rank {}, launches of step {}: {}", pair(p).rank, step.step, error.what()), step.step});
      }
    });
    for (const Worker& worker : workers) {
      out_.free_words.add(worker.free);
      for (const auto& [text, step] : worker.gaps) out_.gaps.push_back(text), out_.gap_steps.push_back(step);
    }
  }

  std::vector<size_t> steps_in_time(size_t p) const {
    std::vector<size_t> order(pair(p).steps.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(),
              [&](size_t left, size_t right) { return pair(p).steps[left].a < pair(p).steps[right].a; });
    return order;
  }

  // The records' first differences on this rank: by step, and their places in Origins::list.
  std::multimap<size_t, size_t> record_origins(size_t p) const {
    std::multimap<size_t, size_t> out;
    for (size_t o = 0; o < origins_.list.size(); ++o) {
      if (origins_.list[o].pair == p && origins_.list[o].step_index != kNoStep)
        out.insert({origins_.list[o].step_index, o});
    }
    return out;
  }

  // Goes through the steps until something that differs has left the device, or is recorded, and every first difference
  // of the records has been reached; and a little further, to learn which buffers are scratch. Equal steps are left out
  // while no buffer differs.
  void compare_rank(size_t p, std::vector<std::pair<std::string, int64_t>>* gaps) {
    const bool any = std::any_of(out_.steps[p].begin(), out_.steps[p].end(),
                                 [](const LaunchCounts& counts) { return !counts.equal || counts.launches > 0; });
    if (!any) return;
    RankLaunches& out = out_.ranks[p];
    auto wanted = record_origins(p);
    RankComparison comparison(*joins_[p], pair(p));
    constexpr int kStepsToLearn = 2;
    size_t last_sinks = 0;
    bool recorded = false;  // a record differs
    int beyond = 0;
    std::vector<std::pair<size_t, size_t>> records;  // step, place in Origins::list
    for (const size_t s : steps_in_time(p)) {
      if ((last_sinks > 0 || recorded) && wanted.empty() && beyond++ == kStepsToLearn) break;
      recorded |= in_.scan.steps[p][s].differing > 0;
      const auto [first, end] = wanted.equal_range(s);
      const bool needed = !out_.steps[p][s].equal || !comparison.live().empty() || first != end;
      if (!needed || out_.steps[p][s].unread) {
        wanted.erase(first, end);
        continue;
      }
      try {
        comparison.compare(s);
      } catch (const Error& error) {  // it could be read a moment ago: the file is being changed under us
        out_.steps[p][s].unread = true;
        gaps->push_back(
            {fmt::format("rank {}, launches of step {}: {}", pair(p).rank, pair(p).steps[s].step, error.what()),
             pair(p).steps[s].step});
      }
      for (auto at = first; at != end; ++at) records.push_back({s, at->second});
      wanted.erase(first, end);
      if (last_sinks == 0) last_sinks = comparison.sinks().size();
    }
    for (const auto& [s, origin] : records) slice_record(p, comparison, s, origin);
    slice_sinks(p, comparison, last_sinks);
    out.noise = comparison.noise();
    out.finished = last_sinks == 0 && !recorded;
    if (!out.finished) return;
    for (const auto& [allocation, difference] : comparison.live()) {
      out.live.push_back(difference);
      out.live_text.push_back(live_text(*joins_[p], pair(p), difference));
    }
  }

  void slice_record(size_t p, const RankComparison& comparison, size_t s, size_t origin) {
    RecordSlice& out = out_.records[origin];
    const Difference& difference = origins_.list[origin].difference;
    const uint32_t node = comparison.record_node(s, difference.row_a);
    out.on_device = node != kNoNode;
    if (node == kNoNode) return;
    out.row = comparison.nodes()[node].row_a;
    const Slice slice = slice_back(comparison, node);
    for (const SliceEnd& end : slice.ends) {
      if (end.node == node) continue;                 // nothing recorded put another value there
      if (end.kind == EndKind::collective) continue;  // what the other ranks brought is told by the records
      out.ends.push_back(make_origin(p, comparison, slice, end));
      out.ends.back().reached = place_text(in_.joins.of(p).site(difference.site));
    }
  }

  // The first launch that differs and leaves the device tells where it began; the others of that step may have begun
  // elsewhere.
  void slice_sinks(size_t p, const RankComparison& comparison, size_t count) {
    constexpr size_t kMostSinks = 256;
    RankLaunches& out = out_.ranks[p];
    std::set<std::pair<uint32_t, uint32_t>> known;  // nodes; and what entered
    for (size_t k = 0; k < std::min(count, kMostSinks); ++k) {
      const uint32_t sink = comparison.sinks()[k];
      const Slice slice = slice_back(comparison, sink);
      for (const SliceEnd& end : slice.ends) {
        out.via_collective |= end.kind == EndKind::collective;
        const bool certain = (end.kind == EndKind::launch || end.kind == EndKind::gap) && end.opaque.empty();
        if (end.kind == EndKind::collective || (k > 0 && !certain) || !known.insert({end.node, kNoPlace}).second)
          continue;
        out.from_device.push_back(make_origin(p, comparison, slice, end));
        out.from_device.back().reached = sink_text(*joins_[p], pair(p), comparison.nodes()[sink]);
      }
    }
    std::stable_sort(
        out.from_device.begin(), out.from_device.end(),
        [](const LaunchOrigin& left, const LaunchOrigin& right) { return left.node.order < right.node.order; });
  }

  // Of all that stands in a gap, the launch of each run that left what was followed to here, or was handed that buffer
  // as the other run's was; kNoRow: that run has none.
  static void name_writers(const RankComparison& comparison, const Slice& slice, uint32_t id, DataNode* node) {
    node->row_a = node->row_b = kNoRow;
    for (const SliceEnd& end : slice.ends) {
      if (end.node != id || end.place >= node->place_rows.size()) continue;
      const auto [in_b, row] = node->place_rows[end.place];
      uint32_t& at = in_b ? node->row_b : node->row_a;
      at = at == kNoRow ? row : std::max(at, row);
    }
    if (node->row_a != kNoRow && node->row_b != kNoRow) return;
    const bool known_in_b = node->row_b != kNoRow;
    std::set<uint64_t> there;  // allocations of the other run
    for (size_t k = 0; k < node->places.size(); ++k) {
      const bool of_named = node->place_rows[k] == std::pair(known_in_b, known_in_b ? node->row_b : node->row_a);
      const PlaceSide& side = node->places[k].side(known_in_b);
      if (of_named && side.changed != Changed::no)
        there.insert(comparison.counterparts().of(known_in_b, side.buffer.allocation));
    }
    for (size_t k = 0; k < node->places.size(); ++k) {
      if (node->place_rows[k].first == known_in_b || node->places[k].reads_only) continue;
      if (there.count(node->places[k].side(!known_in_b).buffer.allocation) == 0) continue;
      (known_in_b ? node->row_a : node->row_b) = node->place_rows[k].second;
    }
  }

  LaunchOrigin make_origin(size_t p, const RankComparison& comparison, const Slice& slice, const SliceEnd& end) const {
    LaunchOrigin out;
    out.pair = p, out.end = end, out.node = comparison.nodes()[end.node];
    out.through = slice.nodes > 0 ? slice.nodes - 1 : 0;
    if (out.node.form == NodeForm::gap) name_writers(comparison, slice, end.node, &out.node);
    const StepPair& step = pair(p).steps[out.node.pair_step];
    out.kernel_a = kernel_name(*pair(p).a, step.a, out.node.row_a);
    out.kernel_b = kernel_name(*pair(p).b, step.b, out.node.row_b);
    if (end.entry_node != kNoNode) out.entry = comparison.nodes()[end.entry_node];
    for (const PlaceFact& place : out.node.places) {
      if (comparison.places().always(out.node.kernel, place.place())) out.pointer_places.insert(place.place());
    }
    for (const uint32_t node : end.opaque) out.opaque.push_back(joins_[p]->names.name(comparison.nodes()[node].kernel));
    return out;
  }

  const OriginInput& in_;
  const Origins& origins_;
  const bool wanted_;
  std::vector<std::unique_ptr<LaunchJoin>> joins_;
  LaunchScan out_;
};

}  // namespace

LaunchScan scan_launches(const OriginInput& input, const Origins& origins, bool wanted) {
  return Scanner(input, origins, wanted).run();
}

}  // namespace forkpoint
