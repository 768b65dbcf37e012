#include "lib/diff_verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "lib/cause_facts.h"
#include "lib/diff_parallel.h"
#include "lib/launch_facts.h"
#include "lib/pointing.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr size_t kMostAlsoFirst = 256;

// Searching for single words costs 2 ns a word: one budget for the whole verdict.
class PointingBudget {
 public:
  // skipped: there was no budget left.
  std::optional<Pointing> point_at(const StreamJoin& join, const Difference& difference, bool* skipped) {
    const Site& site = join.site(difference.site);
    const bool tensor = site.kind == Kind::tensor || site.kind == Kind::collective;
    if (!tensor || difference.same != Same::value || !join.same_layout(difference.layout_a, difference.layout_b))
      return {};
    const Layout& layout = join.a().layouts()[difference.layout_a];
    const uint64_t words = word_count(layout);
    *skipped = words > left_;
    if (*skipped) return {};
    left_ -= words;
    return point(difference.digest_a, difference.digest_b, layout);
  }

 private:
  uint64_t left_ = kMaxPointingWords;
};

std::string reached_text(const Infection& infection) {
  return fmt::format("{} {} reached through {} at step {}, from {}", rank_list(infection.ranks),
                     infection.ranks.size() == 1 ? "was" : "were", infection.via, infection.step,
                     rank_list(infection.sources));
}

std::vector<int> ranks_that_differ(const Findings& findings) {
  const auto& alignment = findings.input.alignment;
  std::vector<int> ranks;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    bool differs = !findings.loads.differences[p].empty();
    for (size_t s = 0; s < alignment.ranks[p].steps.size(); ++s) {
      const StepCounts& counts = findings.input.scan.steps[p][s];
      const StepPair& step = alignment.ranks[p].steps[s];
      differs |= counts.differing > 0 || counts.differing_eval > 0 ||
                 (counts.resharded > 0 && findings.resharding.differing.count({step.step, step.occurrence}) != 0);
    }
    differs |= !findings.launches.ranks[p].from_device.empty();
    if (differs) ranks.push_back(alignment.ranks[p].rank);
  }
  return ranks;
}

uint64_t differing_records(const Findings& findings) {
  uint64_t count = findings.resharding.differing_records;
  for (const auto& steps : findings.input.scan.steps) {
    for (const StepCounts& counts : steps) count += counts.differing + counts.differing_eval;
  }
  for (const auto& differences : findings.loads.differences) count += differences.size();
  return count;
}

// Gaps and unread steps at or before the first divergence.
std::vector<std::string> gaps_before(const Findings& findings, const Divergence& first) {
  std::vector<std::string> out;
  const auto collect = [&](const std::vector<std::string>& texts, const std::vector<int64_t>& steps) {
    for (size_t i = 0; i < texts.size(); ++i) {
      if (steps[i] == kPrologueStep || (!first.in_prologue && steps[i] <= first.step)) out.push_back(texts[i]);
    }
  };
  collect(findings.input.alignment.gaps, findings.input.alignment.gap_steps);
  collect(findings.input.scan.gaps, findings.input.scan.gap_steps);
  return out;
}

std::string later_text(const Verdict& verdict) {
  if (verdict.propagated == 0) return {};
  const bool launches = verdict.coverage.launches_compared > 0;
  if (verdict.propagated == 1)
    return fmt::format("; one more {} differs after it", launches ? "record or launch" : "record");
  return fmt::format("; {} more {} differ after it", grouped(verdict.propagated),
                     launches ? "records and launches" : "records");
}

std::string reason_for(const LaunchFacts& facts, const Verdict& verdict) {
  std::string how = "its inputs agree and its output differs";
  switch (facts.end) {
    case EndKind::launch:
      if (!facts.resized.empty()) how = facts.resized;
      else if (facts.parameters.values_differ && !facts.parameters_free)
        how = "its buffers agree, its parameters and its output differ";
      break;
    case EndKind::collective:
      break;
    case EndKind::gap:
      how = facts.only_a.empty()   ? "only run B launches it, and what is left in memory differs"
            : facts.only_b.empty() ? "only run A launches it, and what is left in memory differs"
                                   : "the runs launch other kernels here, and what they leave differs";
      break;
    case EndKind::from_host:
      how = "it brings another value from the host in each run";
      break;
    case EndKind::entered:
      how = facts.other_data ? "it was handed other data in each run"
                             : "a buffer of it differs before it, and no recorded launch put that there";
      break;
  }
  return fmt::format("{}: {}{}", place_text(*verdict.first), how, later_text(verdict));
}

std::string reason_for(const CauseFacts& facts, const Verdict& verdict) {
  const std::string place = place_text(*verdict.first);
  if (facts.structure_only)
    return fmt::format("the runs do not record the same: first {}; every record that both have agrees", at_text(*verdict.first));
  const std::string later = later_text(verdict);
  std::string how = "differs first";
  if (facts.collective_output && facts.collective_judged) {
    how = facts.inputs_relaid ? "every member's inputs hold the same elements together and the output differs"
                              : "every member's input agrees and the output differs";
  } else if (facts.site.role == Role::input && !facts.layout_differs)
    how = "this input differs, though nothing recorded before it does";
  else if (!facts.inputs_agree.empty() && facts.inputs_differ.empty() && facts.site.role != Role::input)
    how = "its inputs agree and it differs";
  return fmt::format("{}: {}{}", place, how, later);
}

void add_notes(const Findings& findings, Verdict* verdict) {
  for (const Infection& infection : findings.origins.infections) verdict->notes.push_back(reached_text(infection));
  if (!findings.origins.uncertain.empty()) {
    verdict->notes.push_back(
        fmt::format("{} differ{} later; no collective is recorded there, so what reached {} is not known",
                    rank_list(findings.origins.uncertain), findings.origins.uncertain.size() == 1 ? "s" : "",
                    findings.origins.uncertain.size() == 1 ? "it" : "them"));
  }
}

void describe_skipped(const Findings& findings, const Origin& origin, Verdict* verdict) {
  if (!origin.skipped_permutation) return;
  const Site& site = findings.input.joins.of(origin.pair).site(origin.skipped_permutation->site);
  verdict->notes.push_back(
      fmt::format("{} of rank {} holds the same words in another order (step {}), and what follows is equal: "
                  "a benign permutation",
                  place_text(site), origin.ranks[0], origin.step));
}

// An unmatched record as an origin of kind structure.
Divergence structure_divergence(const Findings& findings, const OneSided& entry) {
  const Site& site = findings.input.joins.of(entry.pair).site(entry.site);
  Divergence out;
  out.in_prologue = entry.first_step == kPrologueStep;
  out.step = out.in_prologue ? findings.input.alignment.begin : entry.first_step;
  out.micro_step = std::max(0, entry.micro_step);
  out.phase = out.in_prologue && findings.input.alignment.begin >= 0 ? Phase::load : site.phase;
  out.layer = site.layer, out.op = site.op, out.tensor = site.tensor;
  out.kind = Kind::structure;
  out.before = entry.side == OneSided::only_a ? "recorded" : "no such record";
  out.after = entry.side == OneSided::only_a ? "no such record" : "recorded";
  if (entry.has_forms()) {
    const RankPair& pair = findings.input.alignment.ranks[entry.pair];
    out.before = to_string(pair.a->layouts()[entry.layout_a]);
    out.after = to_string(pair.b->layouts()[entry.layout_b]);
  }
  std::set<int> ranks;
  for (const OneSided& other : findings.input.scan.one_sided) {
    if (!other.eval) ranks.insert(findings.input.alignment.ranks[other.pair].rank);
  }
  const bool all = ranks.size() > 1 && static_cast<int>(ranks.size()) == findings.input.run_a.world_size();
  out.rank = all ? -1 : findings.input.alignment.ranks[entry.pair].rank;
  return out;
}

void write_structure(const Findings& findings, Verdict* verdict) {
  CauseFacts facts;
  facts.structure_only = true;
  facts.level = findings.input.alignment.level;
  facts.structure = findings.structure.sentences;
  const Run& holder = findings.structure.first->side == OneSided::only_a ? findings.input.run_a : findings.input.run_b;
  facts.run_b = shell_words({holder.directory()});
  verdict->first = facts.first = structure_divergence(findings, *findings.structure.first);
  facts.site = findings.input.joins.of(findings.structure.first->pair).site(findings.structure.first->site);
  verdict->cause = decide_cause(facts);
  std::set<int> ranks;
  for (const OneSided& entry : findings.input.scan.one_sided) {
    if (!entry.eval) ranks.insert(findings.input.alignment.ranks[entry.pair].rank);
  }
  verdict->ranks_diverged.assign(ranks.begin(), ranks.end());
  verdict->reason = reason_for(facts, *verdict);
}

// Those of records alone, where the launches do not take part (an evaluation, a benign permutation).
std::vector<First> firsts_of(const Findings& findings, const std::vector<Origin>& list) {
  if (&list == &findings.origins.list) return join_firsts(findings.input, findings.origins, findings.launches);
  std::vector<First> firsts;
  for (const Origin& origin : list) {
    First& first = firsts.emplace_back();
    first.record = &origin;
    first.ranks = origin.ranks, first.everyone = origin.everyone, first.pair = origin.pair;
  }
  return firsts;
}

void name_firsts(const Findings& findings, const std::vector<First>& firsts, Verdict* verdict) {
  PointingBudget budget;
  uint64_t named = 0;
  bool prologue = false;
  for (size_t i = 0; i < firsts.size() && i <= kMostAlsoFirst; ++i) {
    const First& first = firsts[i];
    const int rank = first.everyone ? -1 : first.ranks[0];
    named += first.ranks.size();
    Divergence at;
    if (first.launch) {
      const Site* record = first.record == nullptr
                               ? nullptr
                               : &findings.input.joins.of(first.record->pair).site(first.record->difference.site);
      at = to_divergence(findings.input, *first.launch, rank, record);
    } else {
      bool skipped = false;
      at = to_divergence(findings.input, *first.record, rank);
      const StreamJoin& join = findings.input.joins.of(first.pair);
      // A setting is one number: that one word of it differs says nothing.
      if (join.site(first.record->difference.site).role != Role::scalar)
        at.pointing = budget.point_at(join, first.record->difference, &skipped);
      describe_skipped(findings, *first.record, verdict);
    }
    prologue |= at.in_prologue;
    (i == 0 ? verdict->first.emplace() : verdict->also_first.emplace_back()) = std::move(at);
  }
  if (firsts.size() > kMostAlsoFirst + 1) {
    verdict->notes.push_back(
        fmt::format("{} more independent firsts are not listed", firsts.size() - kMostAlsoFirst - 1));
  }
  const uint64_t differing = differing_records(findings) +
                             differing_launches(findings.input, findings.launches, verdict->first->step, prologue);
  verdict->propagated = differing - std::min(differing, named);
  verdict->ranks_diverged = ranks_that_differ(findings);
}

void note_rollback(const Findings& findings, const First& first, Verdict* verdict) {
  const auto& steps = findings.input.alignment.ranks[first.pair].steps;
  const size_t index = first.launch ? first.launch->node.pair_step : first.record->step_index;
  if (index >= steps.size() || steps[index].occurrence == 0) return;
  verdict->notes.push_back(
      fmt::format("the runs went back to an earlier step: this is step {} when it ran for the {}. time",
                  steps[index].step, steps[index].occurrence + 1));
}

void say_infections(const Findings& findings, int64_t step, Verdict* verdict) {
  for (const Infection& infection : findings.origins.infections) {
    if (infection.step != step) continue;
    verdict->cause.evidence.push_back(reached_text(infection));
    if (!infection.second_causes.empty()) {
      verdict->cause.evidence.push_back(fmt::format("also differs in this step, and may be a second cause: {}",
                                                    fmt::join(infection.second_causes, "; ")));
    }
  }
}

bool batch_differs(const Findings& findings, const First& first) {
  const auto is_batch = [&](const Origin& origin, const Difference& difference) {
    return findings.input.joins.of(origin.pair).site(difference.site).role == Role::batch;
  };
  return std::any_of(findings.origins.list.begin(), findings.origins.list.end(), [&](const Origin& origin) {
    if (origin.pair != first.pair || origin.step_index != first.launch->node.pair_step) return false;
    return is_batch(origin, origin.difference) ||
           std::any_of(origin.sources.begin(), origin.sources.end(),
                       [&](const Difference& source) { return is_batch(origin, source); });
  });
}

void write_launch_cause(const Findings& findings, const First& first, Verdict* verdict) {
  LaunchFacts facts = gather_launch_facts(findings.input, *first.launch, findings.launches.free_words, *verdict->first);
  facts.environment = environment_differences(findings.input.run_a, findings.input.run_b);
  facts.batch_differs = batch_differs(findings, first);
  verdict->cause = decide_launch_cause(facts);
  say_infections(findings, verdict->first->step, verdict);
  verdict->reason = reason_for(facts, *verdict);
}

void write_record_cause(const Findings& findings, const std::vector<First>& firsts, Verdict* verdict) {
  const First& first = firsts[0];
  CauseFacts facts = gather_facts(findings.input, *first.record, *verdict->first);
  const auto key = [&](const First& of) {
    return findings.input.joins.of(of.record->pair).key(of.record->difference.site);
  };
  for (size_t i = 1; i < firsts.size(); ++i) {
    const bool same =
        firsts[i].record != nullptr && firsts[i].record->step == first.record->step && key(firsts[i]) == key(first);
    if (same) facts.alike_ranks.insert(facts.alike_ranks.end(), firsts[i].ranks.begin(), firsts[i].ranks.end());
  }
  facts.structure = findings.structure.sentences;
  facts.environment = environment_differences(findings.input.run_a, findings.input.run_b);
  facts.pointing = verdict->first->pointing;
  verdict->cause = decide_cause(facts);
  verdict->cause.evidence.insert(verdict->cause.evidence.end(), first.evidence.begin(), first.evidence.end());
  say_infections(findings, first.record->step, verdict);
  verdict->reason = reason_for(facts, *verdict);
}

// What only one run records from the step right before that of the first difference on: a step that was left out, or
// called once more, shows in values a step later. nullptr: nothing.
const OneSided* structure_a_step_before(const Findings& findings, const First& first) {
  if (first.record == nullptr || first.record->in_prologue || first.record->step_index == kNoStep) return nullptr;
  const auto& own_steps = findings.input.alignment.ranks[first.record->pair].steps;
  if (own_steps[first.record->step_index].occurrence > 0) return nullptr;
  for (const OneSided& entry : findings.input.scan.one_sided) {
    if (entry.eval || entry.has_forms() || entry.first_step < 0 || entry.first_step >= first.record->step) continue;
    const auto& steps = findings.input.alignment.ranks[entry.pair].steps;
    const auto at = std::ranges::find_if(steps, [&](const StepPair& step) { return step.step == first.record->step; });
    if (at == steps.end() || at == steps.begin()) continue;
    const int64_t before = std::prev(at)->step;
    // Of steps that come more than once only the first pass can be told by its number.
    const auto repeats = [](const StepPair& step) { return step.occurrence > 0; };
    if (entry.first_step != before || std::ranges::any_of(steps, repeats)) continue;
    // There a resumed run may have set itself up; and what is another way in every step is no event of this one.
    const bool begins = before == findings.input.alignment.begin;
    if (begins && (findings.input.loaded != Loaded::no || entry.records > 1)) continue;
    const Site& site = findings.input.joins.of(entry.pair).site(entry.site);
    if (site.kind != Kind::collective && site.communicator.empty()) return &entry;
  }
  return nullptr;
}

void put_structure_first(const Findings& findings, const OneSided& entry, Verdict* verdict) {
  const std::string value = at_text(*verdict->first);
  verdict->also_first.insert(verdict->also_first.begin(), *std::move(verdict->first));
  verdict->first = structure_divergence(findings, entry);
  const Digest key = findings.input.joins.of(entry.pair).key(entry.site);
  std::set<int> ranks(verdict->ranks_diverged.begin(), verdict->ranks_diverged.end()), alike;
  for (const OneSided& other : findings.input.scan.one_sided) {
    if (other.eval || other.first_step != entry.first_step ||
        !(findings.input.joins.of(other.pair).key(other.site) == key))
      continue;
    alike.insert(findings.input.alignment.ranks[other.pair].rank);
  }
  ranks.insert(alike.begin(), alike.end());
  verdict->ranks_diverged.assign(ranks.begin(), ranks.end());
  const bool all = alike.size() > 1 && static_cast<int>(alike.size()) == findings.input.run_a.world_size();
  verdict->first->rank = all ? -1 : findings.input.alignment.ranks[entry.pair].rank;
  verdict->reason = fmt::format("the runs do not record the same: first {}; values differ first {}{}",
                                at_text(*verdict->first), value, later_text(*verdict));
  Cause& cause = verdict->cause;
  const Run& holder = entry.side == OneSided::only_a ? findings.input.run_a : findings.input.run_b;
  cause.next = fmt::format("forkpoint show {} --steps {}:{}", shell_words({holder.directory()}), entry.first_step,
                           entry.first_step);
  cause.evidence.insert(cause.evidence.begin(),
                        fmt::format("only run {} records this in step {}, and values differ from the next step on",
                                    entry.side == OneSided::only_a ? 'A' : 'B', entry.first_step));
  std::erase(cause.class_candidates, std::string("structure"));
  cause.class_candidates.insert(cause.class_candidates.begin(), "structure");
  cause.cls = "structure";
}

}  // namespace

Coverage coverage_of(const Findings& findings) {
  const Alignment& alignment = findings.input.alignment;
  Coverage out;
  out.level = name(alignment.level);
  out.limits = alignment.limits;
  if (!findings.relaid.limit.empty()) out.limits.push_back(findings.relaid.limit);
  out.ranks_compared = static_cast<int>(alignment.ranks.size());
  out.records_compared = findings.loads.compared + findings.resharding.compared;
  std::map<int64_t, size_t> ranks_of_step;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      const StepCounts& counts = findings.input.scan.steps[p][s];
      out.records_compared += counts.matched;
      if (counts.unread) continue;
      const LaunchCounts& launches = findings.launches.steps[p][s];
      out.launches_compared += launches.launches, out.buffers_compared += launches.buffers;
      out.bytes_hashed += pair.a->steps()[pair.steps[s].a].bytes_hashed;
      if (pair.steps[s].complete && pair.steps[s].step >= 0) ++ranks_of_step[pair.steps[s].step];
    }
  }
  for (const auto& [step, ranks] : ranks_of_step) out.steps_compared += ranks >= alignment.ranks.size() ? 1 : 0;
  return out;
}

void write_divergence(const Findings& findings, Verdict* verdict) {
  verdict->outcome = Outcome::diverged;
  const Origins& origins = findings.origins;
  std::vector<Origin> other;  // where no record of training differs
  const bool trained = !origins.list.empty() || launches_diverge(findings.launches);
  if (!trained && origins.evaluation) other.push_back(*origins.evaluation);
  if (!trained && other.empty() && origins.permutation) {
    other.push_back(*origins.permutation);
    other[0].permuted = true;
  }
  if (!trained && other.empty()) return write_structure(findings, verdict);

  const std::vector<First> firsts = firsts_of(findings, trained ? origins.list : other);
  name_firsts(findings, firsts, verdict);
  note_rollback(findings, firsts[0], verdict);
  if (firsts[0].launch)
    write_launch_cause(findings, firsts[0], verdict);
  else
    write_record_cause(findings, firsts, verdict);
  if (const OneSided* entry = structure_a_step_before(findings, firsts[0]))
    put_structure_first(findings, *entry, verdict);
  const auto gaps = gaps_before(findings, *verdict->first);
  if (!gaps.empty()) {
    verdict->reason += "; records were lost before it, so the first divergence may lie in a gap";
    verdict->cause.evidence.push_back(fmt::format("the first divergence may lie in a gap: {}", gaps[0]));
  }
  for (const std::string& text : findings.set_up.unsure)
    verdict->cause.evidence.push_back("the first divergence may lie before it: " + text);
  add_notes(findings, verdict);
}

std::string incomparable_reason(const std::vector<std::string>& blockers, uint64_t steps_compared,
                                uint64_t records_compared) {
  std::string reason = blockers.empty() ? "nothing could be compared" : blockers[0];
  if (blockers.size() > 1) reason += "; " + blockers[1];
  if (blockers.size() > 2) reason += fmt::format("; and {} more, see the notes", blockers.size() - 2);
  if (records_compared == 0) return reason;
  return reason + (steps_compared == 0
                       ? fmt::format("; the {} that could be compared are equal", counted(records_compared, "record"))
                   : steps_compared == 1 ? std::string("; the one common step is equal")
                                         : fmt::format("; the {} common steps are equal", grouped(steps_compared)));
}

}  // namespace forkpoint
