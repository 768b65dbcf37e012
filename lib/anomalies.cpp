#include "lib/anomalies.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "lib/anomaly_scan.h"
#include "lib/diff_parallel.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using First = std::optional<FirstHit> RankAnomalies::*;

// A value that came through a collective is no first where another rank put an anomalous one in.
bool came_from_elsewhere(const RankAnomalies& own, const std::vector<RankAnomalies>& ranks, First which) {
  const FirstHit& first = *(own.*which);
  if (!first.received) return false;
  return std::any_of(ranks.begin(), ranks.end(), [&](const RankAnomalies& other) {
    return &other != &own && (other.*which) && (other.*which)->step == first.step &&
           (other.*which)->given.contains(first.via);
  });
}

Anomaly to_anomaly(const Run& run, const RankAnomalies& rank, const FirstHit& first, int64_t first_step) {
  const HashStreamReader& stream = *run.streams()[rank.stream];
  const Site& site = stream.sites()[first.hit.site];
  Anomaly out;
  out.at.in_prologue = first.step == kPrologueStep;
  out.at.step = out.at.in_prologue ? first_step : first.step;
  out.at.micro_step = std::max(0, first.hit.micro_step);
  out.at.rank = stream.header().rank;
  out.at.phase = site.phase, out.at.kind = site.kind;
  out.at.layer = site.layer, out.at.op = site.op, out.at.tensor = site.tensor;
  out.is_nonfinite = first.hit.is_nonfinite;
  out.nonfinite = first.hit.nonfinite, out.elements = statistics_elements(stream.layouts()[first.hit.layout]);
  out.magnitude = first.hit.magnitude, out.usual = first.hit.usual, out.history = first.hit.history;
  out.ranks = {stream.header().rank};
  return out;
}

// The earliest over the ranks: by step, then those that received it last, then by place in the rank's own order.
std::optional<Anomaly> first_over(const Run& run, const std::vector<RankAnomalies>& ranks, First which,
                                  int64_t first_step) {
  const RankAnomalies* best = nullptr;
  const auto order = [&](const RankAnomalies& rank) {
    const FirstHit& first = *(rank.*which);
    return std::tuple(first.step, came_from_elsewhere(rank, ranks, which), first.hit.row,
                      run.streams()[rank.stream]->header().rank);
  };
  for (const RankAnomalies& rank : ranks) {
    if ((rank.*which) && (best == nullptr || order(rank) < order(*best))) best = &rank;
  }
  if (best == nullptr) return std::nullopt;
  Anomaly out = to_anomaly(run, *best, *(best->*which), first_step);
  const Digest key = run.streams()[best->stream]->site_keys()[(best->*which)->hit.site];
  for (const RankAnomalies& rank : ranks) {
    if (&rank == best || !(rank.*which) || (rank.*which)->step != (best->*which)->step) continue;
    const FirstHit& first = *(rank.*which);
    const bool alike = run.streams()[rank.stream]->site_keys()[first.hit.site] == key &&
                       first.hit.micro_step == (best->*which)->hit.micro_step &&
                       first.hit.call == (best->*which)->hit.call;
    if (alike && !came_from_elsewhere(rank, ranks, which))
      out.ranks.push_back(run.streams()[rank.stream]->header().rank);
  }
  std::sort(out.ranks.begin(), out.ranks.end());
  if (ranks.size() > 1 && out.ranks.size() == ranks.size()) out.at.rank = -1;
  return out;
}

// Gradients burst in every training, and clipping takes most of it. A burst counts where, on any rank, a value that
// does not burst left its history, or something became non-finite, in the same step or soon after: then it is where
// that began.
void settle_bursts(std::vector<RankAnomalies>* ranks, int64_t steps_apart, Anomalies* out) {
  int64_t consequence = INT64_MAX;
  for (const RankAnomalies& rank : *ranks) {
    for (const auto* first : {&rank.magnitude, &rank.nonfinite}) {
      if (*first) consequence = std::min(consequence, (*first)->step);
    }
  }
  const int64_t soon = kBurstSteps * steps_apart;
  std::set<int64_t> idle;
  for (RankAnomalies& rank : *ranks) {
    for (FirstHit& burst : rank.bursts) {
      if (consequence == INT64_MAX || burst.step + soon < consequence)
        idle.insert(burst.step);
      else if (burst.step <= consequence) {
        const bool before = !rank.magnitude || std::pair(burst.order, burst.hit.row) <
                                                   std::pair(rank.magnitude->order, rank.magnitude->hit.row);
        if (before) rank.magnitude = std::move(burst);
        break;
      }
    }
  }
  if (idle.empty()) return;
  out->notes.push_back(fmt::format(
      "gradients burst in {}, first in step {}, and no loss, activation or parameter followed within {} steps: "
      "usual in a training, not counted",
      counted(idle.size(), "step"), *idle.begin(), kBurstSteps));
}

std::vector<AnomalyLink> links_over(const Run& run, const std::vector<RankAnomalies>& ranks, int64_t first_step,
                                    int64_t last_step) {
  struct Ordered {
    AnomalyLink link;
    uint32_t row;
  };
  std::map<std::pair<int64_t, Phase>, Ordered> links;
  for (const RankAnomalies& rank : ranks) {
    const HashStreamReader& stream = *run.streams()[rank.stream];
    for (const auto& [key, own] : rank.links) {
      if (key.first < first_step || key.first > last_step) continue;
      const auto [at, fresh] = links.try_emplace(key);
      AnomalyLink& link = at->second.link;
      link.step = key.first, link.phase = key.second;
      link.ranks.push_back(stream.header().rank);
      link.nonfinite += own.nonfinite, link.departed += own.departed;
      if (fresh || own.first_row < at->second.row) {
        const auto text = [&](uint32_t site) {
          const Site& named = stream.sites()[site];
          return place_text("", named.layer, named.op, named.tensor);
        };
        link.first = text(own.first_site), link.last = text(own.last_site);
        at->second.row = own.first_row;
      }
    }
  }
  std::vector<Ordered> list;
  for (auto& [key, entry] : links) list.push_back(std::move(entry));
  std::sort(list.begin(), list.end(), [](const Ordered& left, const Ordered& right) {
    return std::tuple(left.link.step, left.row) < std::tuple(right.link.step, right.row);
  });
  std::vector<AnomalyLink> out;
  for (Ordered& entry : list) out.push_back(std::move(entry.link));
  return out;
}

void add_notes(const std::vector<RankAnomalies>& ranks, Anomalies* out) {
  std::map<std::string, int64_t> by_design;
  std::set<int64_t> skipped;
  for (const RankAnomalies& rank : ranks) {
    for (const auto& [place, step] : rank.by_design) {
      const auto [at, fresh] = by_design.try_emplace(place, step);
      if (!fresh) at->second = std::min(at->second, step);
    }
    skipped.insert(rank.skipped.begin(), rank.skipped.end());
  }
  size_t said = 0;
  for (const auto& [place, step] : by_design) {
    if (++said > 3) break;
    out->notes.push_back(
        fmt::format("{} is not finite from {} on and reaches no loss, gradient or parameter (a mask?): not counted",
                    place, step_text(step)));
  }
  if (by_design.size() > 3)
    out->notes.push_back(fmt::format("and {} like it", counted(by_design.size() - 3, "other tensor")));
  if (skipped.empty()) return;
  const std::vector<int64_t> steps(skipped.begin(), skipped.end());
  out->notes.push_back(
      fmt::format("the gradient scaler skipped {} {}: what overflowed in the gradients there is not counted",
                  steps.size() == 1 ? "step" : "steps", number_list(steps)));
}

void count(const std::vector<RankAnomalies>& ranks, Anomalies* out) {
  std::set<int64_t> steps;
  for (const RankAnomalies& rank : ranks) {
    out->looked_at += rank.looked_at, out->judged += rank.judged;
    out->loss_recorded |= rank.loss_recorded;
    out->lost.insert(out->lost.end(), rank.damage.begin(), rank.damage.end());
    steps.insert(rank.steps.begin(), rank.steps.end());
  }
  out->steps = steps.size();
  out->ranks = static_cast<int>(ranks.size());
}

}  // namespace

Anomalies find_anomalies(const Run& run, const AnomalyOptions& options) {
  Anomalies out;
  std::vector<size_t> streams;
  uint64_t total = 0;
  for (size_t s = 0; s < run.streams().size(); ++s) {
    if (!options.window.wants_rank(run.streams()[s]->header().rank)) continue;
    streams.push_back(s);
    for (const StepSummary& step : run.streams()[s]->steps()) total += options.window.wants(step.step) ? 1 : 0;
  }
  std::vector<RankAnomalies> ranks(streams.size());
  Progress progress(options.progress, total);
  parallel_for(thread_count(options.threads), streams.size(),
               [&](size_t i, int) { ranks[i] = scan_rank(run, streams[i], options.window, [&] { progress.add(1); }); });
  int64_t first_step = INT64_MAX;
  for (const RankAnomalies& rank : ranks) {
    if (!rank.steps.empty()) first_step = std::min(first_step, *rank.steps.begin());
  }
  if (first_step == INT64_MAX) first_step = 0;
  count(ranks, &out);
  const std::vector<std::string> lost = lost_in(run, options.window);
  out.lost.insert(out.lost.begin(), lost.begin(), lost.end());
  out.left_out = left_out_of(run);
  if (run.manifest().names_masked) {
    out.left_out.push_back(
        "which steps a gradient scaler skipped, as names are masked: their gradients, which need not be finite, count");
  }
  add_notes(ranks, &out);
  settle_bursts(&ranks, std::max<int64_t>(1, run.manifest().every), &out);
  out.nonfinite = first_over(run, ranks, &RankAnomalies::nonfinite, first_step);
  out.magnitude = first_over(run, ranks, &RankAnomalies::magnitude, first_step);
  out.evaluation = first_over(run, ranks, &RankAnomalies::evaluation, first_step);
  if (!out.found()) return out;
  out.loss = first_over(run, ranks, &RankAnomalies::loss, first_step);
  int64_t last = INT64_MAX;
  for (const RankAnomalies& rank : ranks) {
    if (!out.loss || !rank.loss || rank.loss->step > last) continue;
    last = rank.loss->step;
    out.loss_before = rank.loss_before;
  }
  int64_t first = INT64_MAX;
  for (const auto* found : {&out.nonfinite, &out.magnitude}) {
    if (*found) first = std::min(first, (*found)->at.in_prologue ? kPrologueStep : (*found)->at.step);
  }
  out.chain = links_over(run, ranks, first, last);
  return out;
}

int exit_code(const Anomalies& anomalies) { return anomalies.found() ? 1 : anomalies.lost.empty() ? 0 : 2; }

}  // namespace forkpoint
