#include "lib/cause_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>

#include "lib/cause_rules.h"
#include "lib/diff_collective.h"
#include "lib/diff_parallel.h"
#include "lib/diff_set_up.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

std::string value_text(const Site& site, const Digest& digest) {
  if (site.kind == Kind::scalar) return fmt::format("{}", scalar_value(digest));
  return fmt::format("{:016x}{:016x}", digest.a, digest.b);
}

// A step of one rank in both runs with its matched pairs; empty when it cannot be read.
struct MatchedStep {
  const StreamJoin* join = nullptr;
  StepBuffers columns;
  std::vector<uint32_t> partner;  // B's row by A's row
  bool readable = false;

  bool agrees(uint32_t row) const {
    return partner[row] != kNoRow && columns.a.digest[row] == columns.b.digest[partner[row]] &&
           join->same_layout(columns.a.layout[row], columns.b.layout[partner[row]]);
  }
  const Site& site(uint32_t row) const { return join->site(columns.a.site[row]); }
  bool training(uint32_t row) const { return (columns.a.flags[row] & kRecordEval) == 0; }
};

MatchedStep read_matched(const OriginInput& input, size_t pair, size_t step_index) {
  MatchedStep out;
  const RankPair& ranks = input.alignment.ranks[pair];
  if (step_index == kNoStep || step_index >= ranks.steps.size()) return out;
  const StepPair& step = ranks.steps[step_index];
  out.join = &input.joins.of(pair);
  try {
    read_pair(*out.join, ranks, step, &out.columns);
  } catch (const Error&) {
    return out;
  }
  out.partner.assign(out.columns.a.size(), kNoRow);
  match_step(*out.join, out.columns.a, out.columns.b, step.complete, &out.columns.scratch,
             [&](uint32_t i, uint32_t j) { out.partner[i] = j; }, [](uint32_t) {}, [](uint32_t) {});
  out.readable = true;
  return out;
}

std::string record_text(int64_t step, const Site& site) {
  return step == kPrologueStep ? "loaded before the first step, " + place_text(site)
                               : fmt::format("step {}, {}", step, place_text(site));
}

// The record before `limit` that holds `digest` in A and agrees, latest first.
const Site* holder(const MatchedStep& step, uint32_t limit, const Digest& digest, uint32_t except_site) {
  for (uint32_t row = std::min<uint32_t>(limit, static_cast<uint32_t>(step.columns.a.size())); row-- > 0;) {
    if (step.columns.a.digest[row] == digest && step.columns.a.site[row] != except_site && step.agrees(row)) {
      return &step.site(row);
    }
  }
  return nullptr;
}

void look_within_step(const MatchedStep& step, const Difference& d, int64_t number, CauseFacts* facts) {
  const StepColumns &a = step.columns.a, &b = step.columns.b;
  bool batch_seen = false, batch_agrees = true, has_gradient = false;
  for (uint32_t row = 0; row < a.size(); ++row) {
    const Site& site = step.site(row);
    if (!step.training(row)) continue;
    if (site.role == Role::batch) batch_seen = true, batch_agrees &= step.agrees(row);
    const bool reduced = site.kind == Kind::collective && site.role == Role::output;
    facts->rng_agrees |= site.role == Role::rng && row < d.row_a && step.agrees(row);
    if ((site.role == Role::gradient || reduced) && row < d.row_a && step.agrees(row)) facts->gradients_recorded = true;
    has_gradient |= site.role == Role::gradient && site.layer == facts->site.layer;
    const bool same_place = a.site[row] == d.site && a.micro_step[row] == d.micro_step;
    if ((d.flags & kRecordRecompute) != 0 && same_place && (a.flags[row] & kRecordRecompute) == 0 &&
        a.digest[row] == d.digest_a && step.partner[row] != kNoRow && !(b.digest[step.partner[row]] == d.digest_b)) {
      facts->recompute_parts = true;
    }
  }
  facts->step_inputs_agree = batch_seen && batch_agrees;
  const bool held = facts->site.role == Role::parameter || facts->site.role == Role::other;
  const bool evaluated = (d.flags & kRecordEval) != 0;
  facts->rests = held && !has_gradient && facts->site.phase == Phase::optimizer &&
                 (evaluated || facts->gradients_recorded);
  if (is_gradient_of_step(facts->site)) {
    for (uint32_t row = 0; row < a.size() && row < d.row_a; ++row) {
      const Site& site = step.site(row);
      const bool same =
          site.role == Role::gradient && site.layer == facts->site.layer && site.tensor == facts->site.tensor;
      if (same && step.training(row)) facts->last_seen = step.agrees(row) ? record_text(number, site) : std::string();
    }
  }
  if (facts->site.role != Role::input || d.digest_b == Digest{} || d.digest_a == Digest{}) return;
  if (element_count(facts->layout_a) <= 1) return;  // any count or flag may be the same number
  if (const Site* site = holder(step, d.row_a, d.digest_a, d.site)) facts->last_seen = record_text(number, *site);
  if (const Site* site = holder(step, kNoRow, d.digest_b, d.site)) facts->equals_other = record_text(number, *site);
}

void look_at_step_before(const MatchedStep& before, int64_t number, const Difference& d, CauseFacts* facts) {
  const StepColumns& a = before.columns.a;
  bool parameters = false;
  for (uint32_t row = 0; row < a.size(); ++row) {
    parameters |= before.site(row).role == Role::parameter;
    if (a.site[row] != d.site || a.micro_step[row] != d.micro_step || a.call[row] != d.call || !before.agrees(row))
      continue;
    if (number + 1 == facts->first.step && !(a.digest[row] == Digest{})) facts->value_before = a.digest[row];
  }
  facts->step_inputs_agree &= parameters;
  if (facts->site.role == Role::input && facts->last_seen.empty() && !(d.digest_a == Digest{})) {
    if (const Site* site = holder(before, kNoRow, d.digest_a, kNoRow)) facts->last_seen = record_text(number, *site);
  }
}

// The same record in a neighbouring step, in one of the runs.
std::optional<Digest> neighbour(const OriginInput& input, const Origin& origin, int distance, bool in_a) {
  const auto& steps = input.alignment.ranks[origin.pair].steps;
  const int64_t index = static_cast<int64_t>(origin.step_index) + distance;
  if (index < 0 || index >= static_cast<int64_t>(steps.size())) return {};
  if (steps[static_cast<size_t>(index)].step != origin.step + distance) return {};
  const MatchedStep step = read_matched(input, origin.pair, static_cast<size_t>(index));
  const Difference& d = origin.difference;
  for (uint32_t row = 0; step.readable && row < step.columns.a.size(); ++row) {
    const StepColumns& a = step.columns.a;
    if (a.site[row] != d.site || a.micro_step[row] != d.micro_step || a.call[row] != d.call ||
        step.partner[row] == kNoRow)
      continue;
    return in_a ? a.digest[row] : step.columns.b.digest[step.partner[row]];
  }
  return {};
}

// A run's value is stale when it is that of the step before although such a value changes from step to step: it did so
// before, or goes on doing so in the other run. A constant that one run alone has changed is no sign of it.
void look_for_stale(const OriginInput& input, const Origin& origin, CauseFacts* facts) {
  if (!facts->value_before) return;
  const bool b_stuck = *facts->value_before == origin.difference.digest_b;
  const bool a_stuck = *facts->value_before == origin.difference.digest_a;
  if (!a_stuck && !b_stuck) return;
  const auto earlier = neighbour(input, origin, -2, true);
  const auto next = neighbour(input, origin, 1, b_stuck);  // in the run that moved
  const Digest& moved = b_stuck ? origin.difference.digest_a : origin.difference.digest_b;
  const bool changes = (earlier && !(*earlier == *facts->value_before)) ||
                       (next && !(*next == moved) && !(*next == *facts->value_before));
  (b_stuck ? facts->stale_b : facts->stale_a) = changes;
}

struct OnRank {
  int rank = 0;
  bool present = false, agrees = false;
  Digest a, b;
};

// The same record on every rank.
std::vector<OnRank> on_all_ranks(const OriginInput& input, const Origin& origin) {
  const RankPair& own = input.alignment.ranks[origin.pair];
  const StepPair& at = own.steps[origin.step_index];
  const Digest key = input.joins.of(origin.pair).key(origin.difference.site);
  std::vector<OnRank> out(input.alignment.ranks.size());
  parallel_for(thread_count(input.threads), out.size(), [&](size_t p, int) {
    const RankPair& pair = input.alignment.ranks[p];
    out[p].rank = pair.rank;
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      if (pair.steps[s].step != at.step || pair.steps[s].occurrence != at.occurrence) continue;
      const MatchedStep step = read_matched(input, p, s);
      if (!step.readable) continue;
      for (uint32_t row = 0; row < step.columns.a.size(); ++row) {
        if (!(step.join->key(step.columns.a.site[row]) == key) || step.partner[row] == kNoRow ||
            step.columns.a.micro_step[row] != origin.difference.micro_step ||
            step.columns.a.call[row] != origin.difference.call) {
          continue;
        }
        out[p].present = true;
        out[p].agrees = step.agrees(row);
        out[p].a = step.columns.a.digest[row];
        out[p].b = step.columns.b.digest[step.partner[row]];
      }
    }
  });
  return out;
}

void look_at_ranks(const std::vector<OnRank>& ranks, const Origin& origin, CauseFacts* facts) {
  const Difference& d = origin.difference;
  std::set<std::pair<uint64_t, uint64_t>> values_a, values_b;
  for (const OnRank& at : ranks) {
    if (!at.present) continue;
    values_a.insert({at.a.a, at.a.b});
    values_b.insert({at.b.a, at.b.b});
    ++facts->replicas;
    if (at.agrees) facts->agreeing_ranks.push_back(at.rank);
    const bool own = std::find(origin.ranks.begin(), origin.ranks.end(), at.rank) != origin.ranks.end();
    if (!own && at.a == d.digest_b && !(d.digest_b == Digest{})) facts->equals_rank = fmt::format("rank {}", at.rank);
  }
  if (values_a.size() == 1 && facts->replicas > 1) facts->replica_values_b = static_cast<int>(values_b.size());
}

// What ran between the last compared step and this one, and was not recorded?
void look_at_steps_before(const OriginInput& input, const Origin& origin, CauseFacts* facts) {
  if (origin.in_prologue) return;
  const auto& steps = input.alignment.ranks[origin.pair].steps;
  if (origin.step_index == 0) {
    facts->start_unseen = input.loaded != Loaded::by_one || origin.step != input.alignment.begin;
    const int64_t begun = input.alignment.begun;
    if (!facts->start_unseen && begun < origin.step) {
      facts->unseen_steps =
          counted(static_cast<uint64_t>(origin.step - begun), "step") + fmt::format(" from step {} on", begun);
    }
    return;
  }
  const bool loaded = input.loaded == Loaded::by_both || input.loaded == Loaded::by_one;
  const int64_t before = steps[origin.step_index - 1].step;
  const int64_t first = before == kPrologueStep ? (loaded ? origin.step : 0) : before + 1;
  if (first < origin.step)
    facts->unseen_steps =
        counted(static_cast<uint64_t>(origin.step - first), "step") + fmt::format(" from step {} on", first);
}

// It began in this step of this rank, and before the record that differs: control flow that nothing recorded explains.
bool is_right_before(const OriginInput& input, const OneSided& entry, const Site& site, const Origin& origin) {
  if (entry.has_forms() || entry.eval || entry.pair != origin.pair || entry.first_step != origin.step) return false;
  if (origin.in_prologue || site.kind == Kind::collective || !site.communicator.empty()) return false;
  // What is another way in every step begins with the first one, and is no event of that.
  if (origin.step_index == 0 || input.alignment.ranks[origin.pair].steps[origin.step_index - 1].step == kPrologueStep)
    return false;
  const Difference& d = origin.difference;
  return entry.side == OneSided::only_a ? entry.first_row < d.row_a : entry.first_row < d.row_b;
}

void look_at_structure(const OriginInput& input, const Origin& origin, CauseFacts* facts) {
  for (const OneSided& entry : input.scan.one_sided) {
    const Site& site = input.joins.of(entry.pair).site(entry.site);
    if (facts->structure_before.empty() && is_right_before(input, entry, site, origin)) {
      facts->structure_before = fmt::format("run {} alone records {} in this step, before it",
                                            entry.side == OneSided::only_a ? 'A' : 'B', place_text(site));
    }
    if (site.kind != Kind::collective || entry.first_step > facts->first.step || entry.side == OneSided::relabelled)
      continue;
    facts->messages_differ = true;
    facts->collective_in_one_run |=
        entry.side != OneSided::regrouped && (site.layer.empty() || site.layer == facts->site.layer);
  }
  // Where the same came out, another layout changed no sum.
  for (const RelaidCalls& calls : input.scan.relaid) {
    facts->messages_differ |= calls.step <= facts->first.step && !(calls.outputs_seen && calls.outputs_same);
    // Members may call their communicator by other names.
    const Site& site = input.joins.of(calls.pair).site(calls.site);
    const bool same_family =
        site.op == facts->site.op && (calls.pair != origin.pair || site.communicator == facts->site.communicator);
    facts->inputs_relaid |= facts->collective_output && calls.step == facts->first.step && same_family;
  }
}

// What the search for origins and the manifests say already.
CauseFacts known_facts(const OriginInput& input, const Origin& origin, const Divergence& first) {
  const StreamJoin& join = input.joins.of(origin.pair);
  const Difference& d = origin.difference;
  CauseFacts facts;
  facts.first = first;
  facts.site = join.site(d.site), facts.flags = d.flags;
  facts.layout_a = join.a().layouts()[d.layout_a], facts.layout_b = join.b().layouts()[d.layout_b];
  facts.layout_differs = d.same == Same::layout, facts.relaid = d.same == Same::other_elements;
  facts.digest_a = d.digest_a, facts.digest_b = d.digest_b;
  facts.stats_a = d.stats_a, facts.stats_b = d.stats_b;
  facts.level = input.alignment.level, facts.world_size = std::max(1, input.run_a.world_size());
  facts.everyone = origin.everyone, facts.permutation_only = origin.permuted;
  facts.first_compared_step = origin.in_prologue || origin.step == input.alignment.begun;
  facts.steps_since_begin = origin.in_prologue ? 0 : origin.step - input.alignment.begun;
  facts.collective_output = origin.collective_output, facts.collective_judged = origin.judged;
  facts.alike = origin.alike, facts.keeps_own_input = origin.keeps_own_input;
  facts.outputs_agree_a = origin.outputs_agree_a, facts.outputs_disagree_b = origin.outputs_disagree_b;
  facts.members = origin.members, facts.unknown_members = origin.unknown_members;
  facts.collectives_recorded = records_collectives(join);
  facts.loaded = input.loaded;
  facts.run_b = shell_words({input.run_b.directory()});
  facts.command = shell_words(input.run_b.manifest().command);
  for (const Difference& source : origin.sources) {
    const Site& site = join.site(source.site);
    std::string text = place_text(site);
    if (site.kind == Kind::scalar) {
      text += fmt::format(" ({} and {})", value_text(site, source.digest_a), value_text(site, source.digest_b));
    }
    facts.also_differ.push_back(std::move(text));
  }
  return facts;
}

}  // namespace

void describe_values(const Site& site, const Layout& layout_a, const Layout& layout_b, const Difference& difference,
                     Divergence* out) {
  out->before = value_text(site, difference.digest_a);
  out->after = value_text(site, difference.digest_b);
  if (difference.same == Same::other_elements) {
    out->before = fmt::format("words that add up to {:08x}", difference.stats_a.word_sum);
    out->after = fmt::format("words that add up to {:08x}", difference.stats_b.word_sum);
  }
  if (site.role == Role::scalar && site.kind == Kind::tensor && difference.same == Same::value) {
    out->before = fmt::format("{:.9g}", difference.stats_a.absmax);
    out->after = fmt::format("{:.9g}", difference.stats_b.absmax);
  }
  if (difference.same != Same::layout) return;
  out->kind = Kind::structure;
  out->before = to_string(layout_a);
  out->after = to_string(layout_b);
}

Divergence to_divergence(const OriginInput& input, const Origin& origin, int rank) {
  const StreamJoin& join = input.joins.of(origin.pair);
  const Site& site = join.site(origin.difference.site);
  Divergence out;
  out.step = std::max<int64_t>(origin.step, 0);  // a program without steps: all of it is before the first
  out.micro_step = std::max(0, origin.difference.micro_step);
  out.rank = rank;
  out.phase = origin.in_prologue && input.alignment.begin >= 0 ? Phase::load : site.phase;
  out.layer = site.layer, out.op = site.op, out.tensor = site.tensor, out.kind = site.kind;
  out.in_prologue = origin.in_prologue;
  describe_values(site, join.a().layouts()[origin.difference.layout_a], join.b().layouts()[origin.difference.layout_b],
                  origin.difference, &out);
  return out;
}

CauseFacts gather_facts(const OriginInput& input, const Origin& origin, const Divergence& first) {
  CauseFacts facts = known_facts(input, origin, first);
  look_at_steps_before(input, origin, &facts);
  look_at_structure(input, origin, &facts);
  if (facts.site.role == Role::batch) facts.batch_found = find_batch(input, origin, &facts.batch_searched);
  if (origin.step_index == kNoStep) return facts;

  const Difference& d = origin.difference;
  const RankPair& pair = input.alignment.ranks[origin.pair];
  MatchedStep step = read_matched(input, origin.pair, origin.step_index);
  if (step.readable) {
    const OpInputs inputs = inputs_of(*step.join, step.columns.a, step.columns.b,
                                      pair.steps[origin.step_index], d, &step.columns.scratch);
    facts.inputs_agree = inputs.agree, facts.inputs_differ = inputs.differ, facts.inputs_one_sided = inputs.one_sided;
    facts.inputs_nonfinite_b = inputs.nonfinite_b;
    facts.passed_on_a = inputs.passed_on_a, facts.passed_on_b = inputs.passed_on_b;
    look_within_step(step, d, pair.steps[origin.step_index].step, &facts);
  }
  const size_t index_before = origin.step_index > 0 ? origin.step_index - 1 : kNoStep;
  const MatchedStep before = read_matched(input, origin.pair, index_before);
  if (before.readable) look_at_step_before(before, pair.steps[index_before].step, d, &facts);
  else facts.step_inputs_agree = false;
  if (input.alignment.prologue_compared && !origin.in_prologue && pair.steps[0].step == kPrologueStep) {
    const MatchedStep prologue = read_matched(input, origin.pair, 0);
    for (uint32_t row = 0; prologue.readable && row < prologue.columns.a.size(); ++row) {
      facts.rng_agreed_at_load |= prologue.site(row).role == Role::rng && prologue.agrees(row);
    }
  }
  look_for_stale(input, origin, &facts);
  look_at_ranks(on_all_ranks(input, origin), origin, &facts);
  return facts;
}

std::string shell_words(const std::vector<std::string>& command) {
  std::string text;
  for (const std::string& word : command) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                            "_-+=./,:@%") == std::string::npos;
    if (!text.empty()) text += ' ';
    if (plain) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    text += '\'';
  }
  return text;
}

}  // namespace forkpoint
