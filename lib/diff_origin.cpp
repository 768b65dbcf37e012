#include "lib/diff_origin.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "lib/diff_collective.h"
#include "lib/diff_parallel.h"
#include "lib/diff_set_up.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using StepKey = std::pair<int64_t, int>;

// Order between ranks, where no collective gives one: by micro-step, phase, place in the rank's order of arrival.
std::tuple<bool, int64_t, int, uint32_t, int> rough_order(const Origin& origin, const Site& site) {
  static constexpr int kPhaseOrder[kPhaseCount] = {0, 2, 3, 4, 5, 6, 1};  // generator state is taken before the forward
  const bool whole_step = site.phase == Phase::optimizer || site.phase == Phase::collective;
  const int64_t micro_step = whole_step ? INT32_MAX : origin.difference.micro_step;
  return {!origin.judged, micro_step, kPhaseOrder[static_cast<int>(site.phase) % kPhaseCount], origin.difference.row_a,
          origin.ranks[0]};
}

class Search {
 public:
  explicit Search(const OriginInput& input)
      : in_(input),
        diverged_(input.alignment.ranks.size(), false),
        scratch_(static_cast<size_t>(thread_count(input.threads))) {}

  Origins run() {
    resolve_loads();
    for (const auto& [when, participants] : steps_with_differences()) {
      if (std::all_of(participants.begin(), participants.end(), [&](const auto& at) { return diverged_[at.first]; }))
        continue;
      resolve(when.second, participants);
    }
    find_evaluation();
    return std::move(out_);
  }

 private:
  using Participants = std::vector<std::pair<size_t, size_t>>;  // pair, index in its steps

  const RankPair& pair(size_t index) const { return in_.alignment.ranks[index]; }
  const Site& site_of(const Origin& origin) { return in_.joins.of(origin.pair).site(origin.difference.site); }

  // How often run A had gone back to an earlier step before each step of the pair: with the number it gives the order in time.
  std::vector<int> rollbacks_before(size_t p) const {
    const auto& steps = pair(p).steps;
    std::vector<size_t> order(steps.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t left, size_t right) { return steps[left].a < steps[right].a; });
    std::vector<int> before(steps.size());
    int count = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      count += i > 0 && steps[order[i]].step <= steps[order[i - 1]].step ? 1 : 0;
      before[order[i]] = count;
    }
    return before;
  }

  // In the order of time.
  std::map<std::pair<int, StepKey>, Participants> steps_with_differences() const {
    std::map<std::pair<int, StepKey>, Participants> steps;
    for (size_t p = 0; p < in_.alignment.ranks.size(); ++p) {
      const std::vector<int> rollbacks = rollbacks_before(p);
      for (size_t s = 0; s < pair(p).steps.size(); ++s) {
        const StepKey key{pair(p).steps[s].step, pair(p).steps[s].occurrence};
        const StepCounts& counts = in_.scan.steps[p][s];
        if (counts.unread) continue;
        if (counts.differing > 0 || (counts.resharded > 0 && in_.assembled.count(key) != 0))
          steps[{rollbacks[s], key}].push_back({p, s});
      }
    }
    return steps;
  }

  RankStep analyse(size_t p, size_t s, StepBuffers* worker) const {
    const StepPair& step = pair(p).steps[s];
    static const RecordKeys kNone;
    const auto assembled = in_.assembled.find({step.step, step.occurrence});
    read_pair(in_.joins.of(p), pair(p), step, worker);
    return analyse_step(in_.joins.of(p), worker->a, worker->b, step,
                        assembled == in_.assembled.end() ? kNone : assembled->second, &worker->scratch);
  }

  Origin make_origin(size_t p, size_t s, const Difference& difference) const {
    Origin origin;
    const int64_t step = s == kNoStep ? in_.alignment.begin : pair(p).steps[s].step;
    origin.in_prologue = s == kNoStep || step == kPrologueStep;
    origin.step = origin.in_prologue ? in_.alignment.begin : step;
    origin.ranks = {pair(p).rank};
    origin.pair = p, origin.step_index = s, origin.difference = difference;
    return origin;
  }

  void resolve_loads() {
    std::vector<Origin> candidates;
    for (size_t p = 0; p < in_.loads.size(); ++p) {
      if (in_.loads[p].empty()) continue;
      candidates.push_back(make_origin(p, kNoStep, in_.loads[p][0]));
      diverged_[p] = true;
    }
    accept(&candidates);
  }

  void resolve(const StepKey& key, const Participants& participants) {
    CollectiveView collectives(in_, key, [this](size_t p, size_t s) { return analyse(p, s, &scratch_[0]); });
    std::vector<RankStep> steps(participants.size());
    parallel_for(static_cast<int>(scratch_.size()), participants.size(), [&](size_t i, int worker) {
      try {
        steps[i] = analyse(participants[i].first, participants[i].second, &scratch_[static_cast<size_t>(worker)]);
      } catch (const Error&) {  // it could be read a moment ago: the file is being changed under us
      }
    });
    for (size_t i = 0; i < participants.size(); ++i) collectives.add(participants[i].first, &steps[i]);

    std::vector<Origin> candidates, later;
    std::map<std::pair<std::string, std::vector<int>>, Infection> infections;  // by collective and sources
    for (size_t i = 0; i < participants.size(); ++i) {
      const auto [p, s] = participants[i];
      if (diverged_[p]) continue;
      if (steps[i].permuted && !out_.permutation) out_.permutation = make_origin(p, s, *steps[i].permuted);
      if (!steps[i].first) continue;
      diverged_[p] = true;
      Origin origin = make_origin(p, s, *steps[i].first);
      origin.skipped_permutation = steps[i].permuted;
      origin.sources = steps[i].sources;
      const auto reached = collectives.reached_through(p, steps[i], origin.difference);
      if (reached) {
        Infection& infection = infections[{reached->via, reached->sources}];
        infection.step = origin.step, infection.via = reached->via;
        infection.ranks.push_back(pair(p).rank);
        infection.sources = reached->sources;
        for (const Difference& source : steps[i].sources) {
          infection.second_causes.push_back(
              fmt::format("rank {}, {}", pair(p).rank, place_text(in_.joins.of(p).site(source.site))));
        }
        continue;
      }
      collectives.judge(&origin);
      for (const Difference& difference : steps[i].later) {
        later.push_back(make_origin(p, s, difference));
        later.back().later = true;
      }
      candidates.push_back(std::move(origin));
    }
    for (auto& [through, infection] : infections) out_.infections.push_back(std::move(infection));
    accept(&candidates);
    std::erase_if(later, [&](const Origin& origin) {
      return std::binary_search(out_.uncertain.begin(), out_.uncertain.end(), origin.ranks[0]);
    });
    for (Origin& origin : merge_alike(&later)) out_.list.push_back(std::move(origin));
  }

  // One origin for what all ranks, or all members of a collective, do alike.
  std::vector<Origin> merge_alike(std::vector<Origin>* candidates) {
    std::map<std::tuple<uint64_t, uint64_t, int32_t, uint32_t, bool>, std::vector<Origin*>> groups;
    for (Origin& origin : *candidates) {
      const bool of_group = origin.collective_output && (origin.alike || !origin.judged || origin.outputs_disagree_b);
      if (!(origin.instance == Digest{})) {
        groups[{origin.instance.a, origin.instance.b, 0, 0, of_group}].push_back(&origin);
        continue;
      }
      const Digest& key = in_.joins.of(origin.pair).key(origin.difference.site);
      groups[{key.a, key.b, origin.difference.micro_step, origin.difference.call, of_group}].push_back(&origin);
    }
    const size_t world = static_cast<size_t>(std::max(1, in_.run_a.world_size()));
    std::vector<Origin> merged;
    for (auto& [key, group] : groups) {
      std::set<int> ranks, members;
      for (const Origin* origin : group) {
        ranks.insert(origin->ranks.begin(), origin->ranks.end());
        members.insert(origin->members.begin(), origin->members.end());
      }
      const bool whole_world = world > 1 && ranks.size() == world;
      const bool whole_group =
          std::get<4>(key) && ranks.size() > 1 &&
          (!group[0]->judged || std::includes(ranks.begin(), ranks.end(), members.begin(), members.end()));
      const bool resharded =
          group[0]->difference.same == Same::value &&
          !in_.joins.of(group[0]->pair).same_layout(group[0]->difference.layout_a, group[0]->difference.layout_b);
      if (!whole_world && !whole_group && !resharded) {
        for (Origin* origin : group) merged.push_back(std::move(*origin));
        continue;
      }
      Origin& lead = *group[0];
      lead.everyone = world > 1;
      lead.ranks.assign(ranks.begin(), ranks.end());
      lead.members.assign(members.begin(), members.end());
      for (const Origin* origin : group) lead.alike &= origin->alike;
      merged.push_back(std::move(lead));
    }
    return merged;
  }

  // Appends the candidates of one step in order. Without recorded collectives nothing tells whether a rank was reached
  // from another that diverged before it: such ranks are named as uncertain, not as origins.
  void accept(std::vector<Origin>* candidates) {
    std::vector<Origin> merged = merge_alike(candidates);
    std::sort(merged.begin(), merged.end(), [&](const Origin& left, const Origin& right) {
      return rough_order(left, site_of(left)) < rough_order(right, site_of(right));
    });
    for (Origin& origin : merged) {
      const bool alone = out_.list.empty();
      // Nothing passes between ranks while they load.
      const bool joined = origin.in_prologue || records_collectives(in_.joins.of(origin.pair));
      const bool same_place = !alone && out_.list[0].step == origin.step &&
                              out_.list[0].in_prologue == origin.in_prologue &&
                              in_.joins.of(out_.list[0].pair).key(out_.list[0].difference.site) ==
                                  in_.joins.of(origin.pair).key(origin.difference.site);
      if (alone || joined || same_place) {
        out_.list.push_back(std::move(origin));
      } else {
        out_.uncertain.insert(out_.uncertain.end(), origin.ranks.begin(), origin.ranks.end());
      }
    }
    std::sort(out_.uncertain.begin(), out_.uncertain.end());
  }

  void find_evaluation() {
    for (size_t p = 0; p < in_.alignment.ranks.size(); ++p) {
      for (size_t s = 0; s < pair(p).steps.size(); ++s) {
        if (in_.scan.steps[p][s].differing_eval == 0) continue;
        if (out_.evaluation && out_.evaluation->step <= pair(p).steps[s].step) break;
        try {
          const RankStep step = analyse(p, s, &scratch_[0]);
          if (step.first_eval) out_.evaluation = make_origin(p, s, *step.first_eval);
        } catch (const Error&) {  // as in resolve
        }
        break;
      }
    }
  }

  const OriginInput& in_;
  std::vector<char> diverged_;
  std::vector<StepBuffers> scratch_;
  Origins out_;
};

}  // namespace

bool records_collectives(const StreamJoin& join) {
  if (join.collectives_apart()) return false;  // they were not compared
  const auto is_collective = [](const Site& site) { return site.kind == Kind::collective; };
  return std::any_of(join.a().sites().begin(), join.a().sites().end(), is_collective) ||
         std::any_of(join.b().sites().begin(), join.b().sites().end(), is_collective);
}

Origins find_origins(const OriginInput& input) { return Search(input).run(); }

}  // namespace forkpoint
