#include "lib/diff_verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "lib/cause_facts.h"
#include "lib/diff_parallel.h"
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

std::string reason_for(const CauseFacts& facts, const Verdict& verdict) {
  const std::string place = place_text(*verdict.first);
  if (facts.structure_only)
    return fmt::format("the runs do not record the same: first at {}; every record that both have agrees", place);
  const std::string later =
      verdict.propagated == 0
          ? ""
          : fmt::format("; {} after it", verdict.propagated == 1
                                             ? "one more record differs"
                                             : fmt::format("{} more records differ", grouped(verdict.propagated)));
  std::string how = "differs first";
  if (facts.collective_output && facts.collective_judged) how = "every member's input agrees and the output differs";
  else if (facts.site.role == Role::input && !facts.layout_differs)
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

// The first unmatched record as an origin of kind structure.
Divergence structure_divergence(const Findings& findings) {
  const OneSided& entry = *findings.structure.first;
  const Site& site = findings.input.joins.of(entry.pair).site(entry.site);
  Divergence out;
  out.in_prologue = entry.first_step == kPrologueStep;
  out.step = out.in_prologue ? findings.input.alignment.begin : entry.first_step;
  out.micro_step = std::max(0, entry.micro_step);
  out.phase = out.in_prologue ? Phase::load : site.phase;
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
  verdict->first = facts.first = structure_divergence(findings);
  facts.site = findings.input.joins.of(findings.structure.first->pair).site(findings.structure.first->site);
  verdict->cause = decide_cause(facts);
  std::set<int> ranks;
  for (const OneSided& entry : findings.input.scan.one_sided) {
    if (!entry.eval) ranks.insert(findings.input.alignment.ranks[entry.pair].rank);
  }
  verdict->ranks_diverged.assign(ranks.begin(), ranks.end());
  verdict->reason = reason_for(facts, *verdict);
}

}  // namespace

Coverage coverage_of(const Findings& findings) {
  const Alignment& alignment = findings.input.alignment;
  Coverage out;
  out.level = name(alignment.level);
  out.limits = alignment.limits;
  out.ranks_compared = static_cast<int>(alignment.ranks.size());
  out.records_compared = findings.loads.compared + findings.resharding.compared;
  std::map<int64_t, size_t> ranks_of_step;
  for (size_t p = 0; p < alignment.ranks.size(); ++p) {
    const RankPair& pair = alignment.ranks[p];
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      const StepCounts& counts = findings.input.scan.steps[p][s];
      out.records_compared += counts.matched;
      if (counts.unread) continue;
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
  std::vector<Origin> list = origins.list;
  if (list.empty() && origins.evaluation) list.push_back(*origins.evaluation);
  if (list.empty() && origins.permutation) {
    list.push_back(*origins.permutation);
    list[0].permuted = true;
  }
  if (list.empty()) return write_structure(findings, verdict);

  PointingBudget budget;
  uint64_t firsts = 0;
  for (size_t i = 0; i < list.size() && i <= kMostAlsoFirst; ++i) {
    const Origin& origin = list[i];
    Divergence at = to_divergence(findings.input, origin, origin.everyone ? -1 : origin.ranks[0]);
    bool skipped = false;
    at.pointing = budget.point_at(findings.input.joins.of(origin.pair), origin.difference, &skipped);
    firsts += origin.ranks.size();
    describe_skipped(findings, origin, verdict);
    (i == 0 ? verdict->first.emplace() : verdict->also_first.emplace_back()) = std::move(at);
  }
  if (list.size() > kMostAlsoFirst + 1) {
    verdict->notes.push_back(
        fmt::format("{} more independent firsts are not listed", list.size() - kMostAlsoFirst - 1));
  }
  if (list[0].step_index != kNoStep) {
    const StepPair& step = findings.input.alignment.ranks[list[0].pair].steps[list[0].step_index];
    if (step.occurrence > 0) {
      verdict->notes.push_back(fmt::format("the runs went back to an earlier step: this is step {} when it ran for the {}. time",
                                           step.step, step.occurrence + 1));
    }
  }
  const uint64_t differing = differing_records(findings);
  verdict->propagated = differing - std::min(differing, firsts);
  verdict->ranks_diverged = ranks_that_differ(findings);

  CauseFacts facts = gather_facts(findings.input, list[0], *verdict->first);
  for (size_t i = 1; i < list.size(); ++i) {
    const bool same =
        list[i].step == list[0].step && findings.input.joins.of(list[i].pair).key(list[i].difference.site) ==
                                            findings.input.joins.of(list[0].pair).key(list[0].difference.site);
    if (same) facts.alike_ranks.insert(facts.alike_ranks.end(), list[i].ranks.begin(), list[i].ranks.end());
  }
  facts.structure = findings.structure.sentences;
  facts.environment = environment_differences(findings.input.run_a, findings.input.run_b);
  facts.pointing = verdict->first->pointing;
  verdict->cause = decide_cause(facts);
  for (const Infection& infection : origins.infections) {
    if (infection.step != list[0].step) continue;
    verdict->cause.evidence.push_back(reached_text(infection));
    if (!infection.second_causes.empty()) {
      verdict->cause.evidence.push_back(fmt::format("also differs in this step, and may be a second cause: {}",
                                                    fmt::join(infection.second_causes, "; ")));
    }
  }
  verdict->reason = reason_for(facts, *verdict);
  const auto gaps = gaps_before(findings, *verdict->first);
  if (!gaps.empty()) {
    verdict->reason += "; records were lost before it, so the first divergence may lie in a gap";
    verdict->cause.evidence.push_back(fmt::format("the first divergence may lie in a gap: {}", gaps[0]));
  }
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
